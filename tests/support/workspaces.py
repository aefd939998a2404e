"""Builders for stories: a workspace with one profile and a tiny base, JSONL files, the real CLI, workers as processes.

`sim` needs no torch: its base is a few hundred bytes. Timings are those of a drill, so that a lease ends in seconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml

from support.places import roomy_folder
from support.quick_processes import QuickProcess, can_start_quickly, start_quickly
from tunesmith.client import Client
from tunesmith.runs.queries import runs
from tunesmith.training.trainers.sim.files import safetensors_bytes

T = TypeVar("T")
AnyProcess = subprocess.Popen[bytes] | QuickProcess

PROFILE = "support"

BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
}

DRILL_WORKER: dict[str, Any] = {
    "lease_s": 2.0,
    "heartbeat_s": 0.4,
    "sweep_s": 0.3,
    "poll_s": 0.05,
    "grace_s": 1.0,
}
"""Worker timings of a drill; the defaults are an order of magnitude slower."""


def a_workspace(
    folder: Path,
    trainer: str = "sim",
    *,
    options: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Client:
    """A client of a fresh workspace in `folder`/ws whose profile `support` trains with `trainer`.

    `options` are the trainer's, `profile` lays sections over the profile, `settings` over tunesmith.yaml.
    """
    root = an_empty_workspace(folder / "ws")
    a_base(root / "models" / "tiny")
    write_settings(root, settings or {})
    a_profile(root, trainer=trainer, options=options, **(profile or {}))
    return Client(root, actor="user:test", environ=environ)


def an_empty_workspace(root: Path) -> Path:
    """A fresh workspace, as `tunesmith init` makes it: copied from one that was made once for this test process."""
    root.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(_template_of_workspaces(), root, dirs_exist_ok=True))


@functools.cache
def _template_of_workspaces() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tunesmith-template-", dir=roomy_folder()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Client.init(folder / "ws").close()
    return folder / "ws"


def a_profile(
    root: Path, name: str = PROFILE, *, trainer: str = "sim", options: Mapping[str, Any] | None = None, **sections: Any
) -> Path:
    """Write profiles/NAME.yaml: few cases needed, a watch that ends at once; `sections` are merged over it."""
    values: dict[str, Any] = {
        "name": name,
        "role": "assistant",
        "base": {"path": "models/tiny", "family": "llama"},
        "trainer": {"kind": trainer, "options": dict(options or {})},
        "hardware": {"tier": "cpu"},
        "data": {"heldout_share": 0.3},
        "gate": {"min_cases": 10},
        "watch": {"for_s": 0.0, "interval_s": 0.1},
    }
    for section, value in sections.items():
        both = isinstance(value, Mapping) and isinstance(values.get(section), Mapping)
        values[section] = {**values[section], **value} if both else value
    path = root / "profiles" / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def write_settings(root: Path, settings: Mapping[str, Any]) -> None:
    """tunesmith.yaml with the timings of a drill; `settings` are merged over them."""
    worker = {**DRILL_WORKER, **settings.get("worker", {})}
    (root / "tunesmith.yaml").write_text(yaml.safe_dump({**settings, "worker": worker}))


def a_base(folder: Path) -> Path:
    """A folder that looks like a tiny base model; enough for `sim` and `dry-run`, not for torch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    width = int(BASE_CONFIG["hidden_size"])
    tensors = {
        "model.embed_tokens.weight": ([2, 2], [0.1, 0.2, 0.3, 0.4]),
        "model.layers.0.self_attn.q_proj.weight": ([width, width], [0.5] * width**2),
        "model.layers.0.self_attn.v_proj.weight": ([width, width], [0.9] * width**2),
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def a_jsonl(path: Path, n: int = 60, *, first: int = 0) -> Path:
    """`n` prompt/completion lines, all different; `first` numbers them, so that two files can differ."""
    lines = [{"prompt": f"What is {i} plus {i}?", "completion": str(i + i)} for i in range(first, first + n)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def submit(client: Client, *, data: Path | None = None, **wishes: Any) -> str:
    """Queue a run on 60 fresh lines; its id."""
    source = data or a_jsonl(client.workspace.root / "data.jsonl")
    return client.runs.submit(wishes.pop("profile", PROFILE), source, **wishes).id


@dataclass(frozen=True)
class Ended:
    """How a CLI process ended."""

    code: int
    out: str
    err: str
    took_s: float

    @property
    def last_line(self) -> str:
        """Where every write prints its id."""
        return self.out.rstrip("\n").rpartition("\n")[2]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def cli(
    *words: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    real: bool = False,
) -> Ended:
    """Run the command line in a process of its own, without a terminal; with `real`, in an interpreter of its own."""
    begun = time.monotonic()
    if not real and can_start_quickly(cli_environ(env)):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            handles = {"stdout": out.fileno(), "stderr": err.fileno()}
            quick = start_quickly(words, cwd=cwd, env=cli_environ(env), **handles)
            try:
                quick.wait(timeout_s)
            except subprocess.TimeoutExpired:
                quick.kill()
                raise
            said = [_text_of(file) for file in (out, err)]
        return Ended(quick.wait(), *said, time.monotonic() - begun)
    process = subprocess.run(
        [sys.executable, "-m", "tunesmith.cli.main", *map(str, words)],
        cwd=cwd,
        env=cli_environ(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Ended(process.returncode, process.stdout, process.stderr, time.monotonic() - begun)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


def cli_environ(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what would change the CLI's mind; warnings are errors there too."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TUNESMITH", "FORCE_COLOR", "COLUMNS"))}
    return {**kept, "PYTHONWARNINGS": "error", **(more or {})}


def start_worker(
    client: Client, *words: str, env: Mapping[str, str] | None = None, log: Path | None = None, real: bool = False
) -> AnyProcess:
    """`tunesmith worker` as a process of its own; the caller ends it (see `stop_worker`)."""
    where = log or client.workspace.root / "worker.log"
    with where.open("ab") as sink:
        return start_command(["worker", *words], cwd=client.workspace.root, env=env, sink=sink, real=real)


def start_command(
    words: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None, sink: IO[bytes], real: bool = False
) -> AnyProcess:
    """`tunesmith WORDS` as a process of its own that writes to `sink`; with `real`, in an interpreter of its own."""
    environ = cli_environ(env)
    if not real and can_start_quickly(environ):
        return start_quickly(words, cwd=cwd, env=environ, stdout=sink.fileno(), stderr=sink.fileno())
    return subprocess.Popen(
        [sys.executable, "-m", "tunesmith.cli.main", *words],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=sink,
    )


def stop_worker(process: AnyProcess, timeout_s: float = 20.0) -> int:
    """TERM, wait; KILL if it does not end. Its exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def work_until_idle(client: Client, *words: str, timeout_s: float = 60.0, real: bool = False) -> Ended:
    """Let one worker process do everything there is to do."""
    return cli("worker", "--until-idle", *words, cwd=client.workspace.root, timeout_s=timeout_s, real=real)


def work_here(client: Client) -> int:
    """The same in this process, where starting one more is not what is tested; how many tasks it did."""
    return client.system.worker().run(until_idle=True)


def wait_for(condition: Callable[[], T | None], timeout_s: float = 30.0, what: str = "") -> T:
    """The first value of `condition` that is neither None nor False."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value is not None and value is not False:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s} s {what}"
        time.sleep(0.02)


def wait_for_state(client: Client, run_id: str, *states: str, timeout_s: float = 30.0) -> str:
    """Until the run is in one of the states; which one."""

    def reached() -> str | None:
        with client._session.database.read() as tx:  # a whole view of the run costs ten times as much
            state = runs.get(tx, run_id).state
        return str(state) if state in states else None

    return wait_for(reached, timeout_s, f"for {run_id} to be {' or '.join(states)}")


def states_of(client: Client, run_id: str) -> Sequence[str]:
    """Every state the run has been in, in order."""
    return [event.new_state for event in client.runs.show(run_id).events if event.new_state is not None]
