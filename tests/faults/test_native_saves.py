"""Saves of the native trainer under fire: killed at each call, disks that fail or are full, TERM, too little memory.

After each of them the last good checkpoint is there, and the resumed training ends with the bytes of one never stopped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from support.fleet import Fleet, MakeFleet, programs_below
from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    events_of,
    losses_of,
    small_rows,
)
from support.workspaces import wait_for
from tunesmith.core.errors import DataError
from tunesmith.core.files import verify_folder
from tunesmith.demo.base_model import byte_tokenizer
from tunesmith.profiles.profile import Checkpoints, Validation
from tunesmith.programs.event_log import EventReader, EventWriter
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.protocol import CheckpointEvent, Log, Metrics, Result, ResultStatus
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import ResumeSource, TrainSpec

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

CALLS = "write,pwrite64,writev,sendfile,copy_file_range,ftruncate,fsync,rename,renameat,mkdir,unlink,unlinkat,rmdir"


def strace_works() -> bool:
    try:
        return subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace cannot trace here")


@dataclass
class Forked:
    """One training in a child of the forge."""

    folder: Path
    pid: int
    forge: Forge
    tracer: subprocess.Popen[bytes] | None = None

    def wait(self) -> int:
        code = self.forge.answer()["code"]
        if self.tracer is not None:
            self.tracer.wait(10)
        return code

    def log(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")[-2000:]


class Forge:
    """The process that forks trainings; see fork_trainer.py."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._num = 0
        script = Path(__file__).with_name("fork_trainer.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(
        self, spec: TrainSpec, inject: str | None = None, left_kb: int | None = None, dies_at: int | None = None
    ) -> Forked:
        self._num += 1
        folder = self.root / f"attempt-{self._num}"
        folder.mkdir()
        path = self.root / f"spec-{self._num}.json"
        path.write_text(spec.model_dump_json())
        wish = {"spec": str(path), "dir": str(folder), "traced": inject is not None, "left_kb": left_kb}
        wish["dies_at"] = dies_at
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        forked = Forked(folder, self.answer()["pid"], self)
        if inject is not None:
            forked.tracer = trace(forked, inject)
        return forked

    def run(self, spec: TrainSpec, **how: Any) -> tuple[int, Path]:
        forked = self.start(spec, **how)
        return forked.wait(), forked.folder

    def answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def trace(forked: Forked, inject: str) -> subprocess.Popen[bytes]:
    """strace on the thread that writes checkpoints; it ends with the thread."""
    told = forked.folder / "writer"
    tid = wait_for(lambda: told.read_text() if told.exists() else None, 20, "for the writer")
    command = ["strace", "-qq", "-y", "-o", str(forked.folder.with_suffix(".strace")), "-e", f"trace={CALLS}"]
    return subprocess.Popen([*command, *(["-e", inject] if inject else []), "-p", tid])


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    made = Forge(tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    """Several micro-batches per step, dropout, trained embeddings, several epochs."""
    root = tmp_path_factory.mktemp("saves")
    return a_train_spec(
        a_base_ref(a_micro_base(root / "base")),
        a_dataset(root / "data", small_rows(40), validation_share=0.2),
        recipe=a_recipe(lora_dropout=0.1, train_embeddings=True, epochs=9, max_steps=9, batch_tokens=250),
        checkpoints=Checkpoints(every_steps=3, keep=1),
        validation=Validation(every_steps=4, max_cases=6),
    )


@pytest.fixture(scope="module")
def straight(forge: Forge, spec: TrainSpec) -> str:
    """The artefact of a training that nothing disturbed."""
    code, folder = forge.run(spec)
    assert code == 0, (folder / "stderr").read_text()
    return artifact_of(folder)


def artifact_of(folder: Path) -> str:
    result = result_of(folder)
    assert result.status is ResultStatus.SUCCEEDED, result.error
    assert result.artifact is not None
    return verify_folder(folder / "artifact", result.artifact.digest).digest


def result_of(folder: Path) -> Result:
    return Result.model_validate_json((folder / "result.json").read_bytes())


def last_good(folder: Path) -> ResumeSource | None:
    """As a worker chooses: the furthest that was announced and is whole."""
    announced = [event for event in events_of(folder) if isinstance(event, CheckpointEvent)]
    for event in sorted(announced, key=lambda event: (event.step, event.seq), reverse=True):
        path = folder / "checkpoints" / event.path
        with contextlib.suppress(DataError):
            verify_folder(path, event.digest)
            return ResumeSource(path=str(path), digest=event.digest, step=event.step)
    return None


def finish(forge: Forge, spec: TrainSpec, folder: Path) -> str:
    """Resume from the newest checkpoint that was ever announced, which must be whole; the artefact it ends with."""
    return artifact_of(resumed(forge, spec, folder))


def resumed(forge: Forge, spec: TrainSpec, folder: Path) -> Path:
    announced = [event.step for event in events_of(folder) if isinstance(event, CheckpointEvent)]
    source = last_good(folder)
    assert (source.step if source else 0) == max(announced, default=0)
    code, folder = forge.run(spec.model_copy(update={"resume": source}))
    assert code == 0, (folder / "stderr").read_text()
    return folder


# ---- killed in a save -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One system call of the writer: its kind, which of that kind it is, and how strace wrote it down."""

    kind: str
    number: int
    text: str


@pytest.fixture(scope="module")
def calls(forge: Forge, spec: TrainSpec) -> list[Call]:
    """What the writer calls over a whole training; also proof that the drill sees it."""
    forked = forge.start(spec, inject="")
    assert forked.wait() == 0, forked.log()
    made: list[Call] = []
    for line in forked.folder.with_suffix(".strace").read_text().splitlines():
        kind = line.partition("(")[0]
        number = 1 + sum(1 for call in made if call.kind == kind)
        made.append(Call(kind, number, line.replace(str(forked.folder), "")))
    assert {"write", "fsync", "rename", "renameat", "mkdir", "unlinkat"} <= {call.kind for call in made}
    return made


def killed_at(forge: Forge, spec: TrainSpec, call: Call) -> Path:
    """The folder of a training that was killed at that call of its writer."""
    forked = forge.start(spec, inject=f"inject={call.kind}:signal=SIGKILL:when={call.number}")
    assert forked.wait() == -signal.SIGKILL, f"{call.text}: {forked.log()}"
    return forked.folder


def is_at(*words: str) -> Callable[[Call], bool]:
    return lambda call: all(word in call.text for word in words)


@needs_strace
def test_save_killed_at_some_of_its_calls_leaves_the_one_before_it(
    forge: Forge, spec: TrainSpec, straight: str, calls: list[Call]
) -> None:
    """All of its calls are a drill of `make soak`."""
    for wanted in (
        is_at("write(", ".staged-step-3/adapter"),  # before anything was saved
        is_at("write(", ".staged-step-6/.tmp"),
        is_at("fsync(", ".staged-step-6/state.safetensors"),
        is_at("rename(", "/.staged-step-6", "/checkpoints/step-6"),
        is_at("write(", "events.jsonl"),
        is_at("unlinkat(", "/checkpoints/step-3"),
    ):
        call = next(call for call in calls if wanted(call))
        assert finish(forge, spec, killed_at(forge, spec, call)) == straight, call.text


@pytest.mark.soak
@needs_strace
def test_save_killed_at_each_of_its_calls_leaves_the_one_before_it(
    forge: Forge, spec: TrainSpec, straight: str, calls: list[Call]
) -> None:
    assert len(calls) > 100
    for call in calls:
        assert finish(forge, spec, killed_at(forge, spec, call)) == straight, call.text
    print(f"survived {len(calls)} kills inside the saves of one training")


# ---- disks that fail or are full ------------------------------------------------------------------------------------


@needs_strace
@pytest.mark.parametrize(
    ("kind", "place"),
    [("fsync", "state.safetensors"), ("fsync", "/checkpoints>"), ("write", ".tmp"), ("rename", "/checkpoints/step-6")],
)
def test_save_that_meets_a_broken_disk_fails_and_leaves_the_one_before_it(
    forge: Forge, spec: TrainSpec, straight: str, calls: list[Call], kind: str, place: str
) -> None:
    """A failed fsync is a failure: what the kernel did not write is never announced."""
    saves = [call for call in calls if is_at(f"{kind}(", place)(call)]
    call = next(call for call in saves if call.text.count("step-6") or call.number > 3)
    forked = forge.start(spec, inject=f"inject={kind}:error=EIO:when={call.number}")
    assert forked.wait() == 1, forked.log()
    result = result_of(forked.folder)
    assert (result.status, result.error_class) == (ResultStatus.FAILED, ErrorClass.TRANSIENT)
    assert os.strerror(errno.EIO) in str(result.error)
    assert not list(forked.folder.glob(".staged-*"))
    assert finish(forge, spec, forked.folder) == straight


@pytest.mark.soak
@needs_strace
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_save_that_meets_an_error_at_each_of_its_calls_leaves_the_one_before_it(
    forge: Forge, spec: TrainSpec, straight: str, calls: list[Call], error: str
) -> None:
    calls = [call for call in calls if call.kind in ("write", "fsync", "rename", "renameat", "mkdir")]
    ended = {"EIO": ResultStatus.FAILED, "ENOSPC": ResultStatus.INTERRUPTED}[error]
    for call in calls:
        if call.text.endswith("(File exists)"):
            continue
        forked = forge.start(spec, inject=f"inject={call.kind}:error={error}:when={call.number}")
        code = forked.wait()
        assert code in (1, 75), f"{call.text}: {forked.log()}"
        assert result_of(forked.folder).status is ended, call.text
        assert finish(forge, spec, forked.folder) == straight, call.text
    print(f"survived {error} at {len(calls)} calls")


def test_full_disk_interrupts_the_training_and_leaves_the_last_good_one(
    forge: Forge, spec: TrainSpec, straight: str
) -> None:
    """A real one, filled by somebody else: 300 KiB are left, enough for a checkpoint or two but not for all."""
    try:
        subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    code, mounted = forge.run(spec, left_kb=300)
    folder = mounted.with_name(f"{mounted.name}-left")
    assert code == 75, (folder / "stderr").read_text()
    result = result_of(folder)
    assert (result.status, result.error_class) == (ResultStatus.INTERRUPTED, ErrorClass.DISK)
    assert not list(folder.glob(".staged-*"))
    source = last_good(folder)
    assert source is not None
    assert 0 < source.step < 9
    assert finish(forge, spec, folder) == straight


# ---- killed, told to end --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def longer(spec: TrainSpec) -> TrainSpec:
    """Forty steps of several forward passes, over some twenty epochs."""
    recipe = spec.run.recipe.model_copy(update={"max_steps": 40, "epochs": 40.0})
    return spec.model_copy(update={"run": spec.run.model_copy(update={"recipe": recipe})})


@pytest.fixture(scope="module")
def longer_straight(forge: Forge, longer: TrainSpec) -> Path:
    code, folder = forge.run(longer)
    assert (code, len(losses_of(folder))) == (0, 40)
    return folder


def seeded(spec: TrainSpec, seed: int) -> TrainSpec:
    recipe = spec.run.recipe.model_copy(update={"seed": seed})
    return spec.model_copy(update={"run": spec.run.model_copy(update={"recipe": recipe})})


def killed_and_resumed(forge: Forge, spec: TrainSpec, never_stopped: Path, dies_at: int) -> bool:
    """Kill a training at a forward pass, resume it, compare; False if it has fewer forward passes."""
    code, folder = forge.run(spec, dies_at=dies_at)
    if code == 0:
        return False
    assert code == -signal.SIGKILL, (folder / "stderr").read_text()
    again = resumed(forge, spec, folder)
    expected = losses_of(never_stopped)
    assert all(expected[step] == loss for step, loss in (losses_of(folder) | losses_of(again)).items())
    assert max(losses_of(again), default=len(expected)) == len(expected)
    assert artifact_of(again) == artifact_of(never_stopped), f"killed at forward pass {dies_at}"
    return True


def test_training_killed_in_the_middle_of_a_step_equals_one_never_stopped(
    forge: Forge, longer: TrainSpec, longer_straight: Path
) -> None:
    """Before anything was saved, and at two neighbouring forward passes, of which one is in the middle of a step."""
    for dies_at in (2, 33, 34):
        assert killed_and_resumed(forge, longer, longer_straight, dies_at)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_killed_at_every_forward_pass_equals_one_never_stopped(
    forge: Forge, longer: TrainSpec, seed: int
) -> None:
    spec = seeded(longer, seed)
    code, straight = forge.run(spec)
    assert (code, len(losses_of(straight))) == (0, 40)
    number = 1
    while killed_and_resumed(forge, spec, straight, number):
        number += 1
    assert number > 80  # at least two for each step, so that the middle of every step was among them
    print(f"seed {seed}: survived {number - 1} kills")


def terminated_and_resumed(forge: Forge, spec: TrainSpec, expected: str, step: int) -> None:
    """TERM once that step was seen; what was trained until then is never trained again."""
    forked = forge.start(spec)
    wait_for(lambda: step in losses_of(forked.folder), 30, f"for step {step}")
    os.kill(forked.pid, signal.SIGTERM)
    code = forked.wait()
    if code == 0:  # so quick that it was over before
        assert artifact_of(forked.folder) == expected
        return
    assert code == 75, forked.log()
    result, source = result_of(forked.folder), last_good(forked.folder)
    assert result.status is ResultStatus.INTERRUPTED
    assert source is not None
    assert source.step == result.num_steps == max(losses_of(forked.folder))
    assert finish(forge, spec, forked.folder) == expected


def test_training_told_to_end_at_random_steps_loses_none(
    forge: Forge, longer: TrainSpec, longer_straight: Path
) -> None:
    draw = random.Random(5)
    for _ in range(2):
        terminated_and_resumed(forge, longer, artifact_of(longer_straight), draw.randrange(1, 30))


@pytest.mark.soak
def test_training_told_to_end_at_many_random_steps_loses_none(
    forge: Forge, longer: TrainSpec, longer_straight: Path
) -> None:
    draw = random.Random(6)
    for _ in range(100):
        terminated_and_resumed(forge, longer, artifact_of(longer_straight), draw.randrange(1, 40))


# ---- damaged, and written beside the training -----------------------------------------------------------------------


def test_checkpoint_damaged_after_it_was_chosen_is_tried_again_from_the_one_before(
    forge: Forge, spec: TrainSpec, straight: str
) -> None:
    _, folder = forge.run(spec)
    source = last_good(folder)
    assert source is not None
    path = Path(source.path) / "state.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    code, refused = forge.run(spec.model_copy(update={"resume": source}))
    assert code == 1
    assert result_of(refused).error_class is ErrorClass.TRANSIENT
    earlier = last_good(folder)
    assert earlier is not None
    assert earlier.step < source.step
    code, again = forge.run(spec.model_copy(update={"resume": earlier}))
    assert (code, artifact_of(again)) == (0, straight)


@needs_strace
def test_slow_disk_does_not_stop_the_steps(forge: Forge, spec: TrainSpec) -> None:
    """The first write of a save takes a second; steps are made meanwhile, and the checkpoint holds what was before."""
    keeping = {"checkpoints": Checkpoints(every_steps=3, keep=10)}
    spec = spec.model_copy(update={"run": spec.run.model_copy(update=keeping)})
    _, quick = forge.run(spec)
    forked = forge.start(spec, inject="inject=write:delay_enter=1000000:when=1")
    assert forked.wait() == 0, forked.log()
    events = events_of(forked.folder)
    metrics = [event for event in events if isinstance(event, Metrics)]
    first = next(event for event in events if isinstance(event, CheckpointEvent))
    assert max(event.step for event in metrics if event.seq < first.seq) > first.step
    assert next(event.values["save_s"] for event in metrics if event.step == first.step + 1) < 0.5
    assert any(event.values["write_s"] >= 1.0 for event in metrics)
    for name in ("adapter/adapter_model.safetensors", "state.safetensors"):
        place = Path("checkpoints") / first.path / name
        assert (forked.folder / place).read_bytes() == (quick / place).read_bytes()
    assert not [event for event in events if isinstance(event, Log) and event.level == "warning"]


# ---- too little memory ----------------------------------------------------------------------------------------------


def test_training_out_of_memory_is_planned_anew_and_steps_over_a_damaged_checkpoint(make_fleet: MakeFleet) -> None:
    """A real limit, set after some steps. The newest checkpoint is damaged before the second attempt."""
    recipe = {"method": "sft", "epochs": 1000, "max_steps": 16, "lora_rank": 2}
    big = {"batch_tokens": 8192, "micro_batch_tokens": 8192, "max_length": 256}
    rare = {"validation": {"every_steps": 1000}, "checkpoints": {"every_steps": 2}}
    fleet = make_fleet(trainer="native", profile={"recipe": {**recipe, **big}, **rare})
    a_wide_base(fleet.root / "models" / "tiny")
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    run_id = fleet.submit(lines=200)
    worker = fleet.start("train", env={"MALLOC_MMAP_THRESHOLD_": "65536"})  # freed memory goes back at once
    attempt = fleet.wait_for_step(run_id, 4, timeout_s=60)
    limit_memory(fleet, attempt.id)
    wait_for(lambda: fleet.attempts(run_id)[0].outcome != "open", 30, "for the end of the first attempt")
    worker.terminate()
    worker.wait(20)
    first = fleet.attempts(run_id)[0]
    assert (first.outcome, first.error_class) == ("failed", "oom"), fleet.logs()
    newest = last_good(fleet.folder(run_id, first))
    assert newest is not None
    (Path(newest.path) / "state.json").write_text("{}")
    fleet.work("train", timeout_s=90)
    last = fleet.attempts(run_id)[-1]
    spec = fleet.spec(run_id, last)
    assert (last.outcome, spec["micro_batch_divisor"]) == ("succeeded", 2), fleet.logs()
    assert spec["resume"]["step"] == newest.step - 2
    assert fleet.steps(run_id, last) == list(range(newest.step - 1, 17))


def test_checkpoints_of_earlier_attempts_are_thinned_out_but_never_the_good_one(make_fleet: MakeFleet) -> None:
    """A run interrupted again and again: what may still be needed stays, and a damaged newest costs one step back."""
    often = {"checkpoints": {"every_steps": 2, "keep": 2}, "validation": {"every_steps": 1000}}
    fleet = make_fleet(options={"steps": 100_000, "step_s": 0.01}, profile=often)
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    run_id = fleet.submit()
    seen = 0
    for number in range(3):
        worker = fleet.start()
        attempt = fleet.wait_for_step(run_id, seen + 12, attempt=number)
        worker.terminate()
        assert worker.wait(20) == 0
        seen = max(fleet.steps(run_id, attempt))
        newest = last_good(fleet.folder(run_id, attempt))
        assert newest is not None
        if number == 1:
            (Path(newest.path) / "state.json").unlink()
    first, second, third = fleet.attempts(run_id)
    damaged = max(fleet.steps(run_id, second))
    resumed_from = fleet.spec(run_id, third)["resume"]
    assert resumed_from["step"] < damaged
    verify_folder(Path(resumed_from["path"]), resumed_from["digest"])
    left = [path for one in (first, second) for path in (fleet.folder(run_id, one) / "checkpoints").iterdir()]
    names = sorted(int(path.name.removeprefix("step-")) for path in left)
    assert names[-1] == damaged
    assert names[-2] == resumed_from["step"]
    assert len(names) == 4  # and two more to step back to


def a_wide_base(folder: Path) -> None:
    """A model whose steps take some 100 MB of memory, in a fraction of a second."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def limit_memory(fleet: Fleet, attempt_id: str) -> None:
    """The trainer gets a quarter of what a step takes and gives back, above what it holds between two steps."""
    pids = [pid for pid, mark in programs_below(fleet.client.workspace.runs_dir) if mark == attempt_id]
    pid = next(pid for pid in pids if b"shim.py" not in Path(f"/proc/{pid}/cmdline").read_bytes())
    sizes = []
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        sizes.append(int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize())
        time.sleep(0.002)
    assert max(sizes) - min(sizes) > 40 << 20, "the drill is pointless: no step was seen"
    limit = min(sizes) + (max(sizes) - min(sizes)) // 4
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


# ---- events ---------------------------------------------------------------------------------------------------------


def test_events_of_several_threads_are_whole_lines_in_order(tmp_path: Path) -> None:
    """The writer announces checkpoints while the training tells its steps."""
    writer = EventWriter(tmp_path / "events.jsonl")

    def tell(name: str) -> None:
        for number in range(300):
            writer.write("log", level="info", message=f"{name} {number} " + "x" * (number % 97))

    threads = [threading.Thread(target=tell, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = EventReader(tmp_path / "events.jsonl").read()
    assert [event.seq for event in events] == list(range(1, 1201))
    for name in "abcd":
        told = [int(event.message.split()[1]) for event in events if event.message.startswith(name)]
        assert told == list(range(300))
