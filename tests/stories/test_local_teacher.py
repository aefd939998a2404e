"""A teacher that is a model on this machine: what it answers, what is refused before it is loaded, what it leaves."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from support.local_teachers import DATES, add_dates, school_of
from support.native import a_micro_base, an_attempt, quick_base
from support.workspaces import PROFILE, a_base, a_workspace, cli_environ, work_until_idle
from tunesmith.cli.main import call
from tunesmith.client import Client
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import ANSWERS, CONTROL
from tunesmith.runs.spec import AttemptRef, Taught, TeachSpec

pytestmark = pytest.mark.extra  # every test starts a program that loads a model: minutes in all

RUN_AND_TELL = """
import sys
from tunesmith.cli.main import call
code = call(sys.argv[1:])
print({"torch", "transformers"} & set(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def test_real_local_teacher_betters_the_student_for_nothing_and_without_torch_here(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile=school_of(quick_base())) as client:
        ids = add_dates(client, {**DATES, "may first nineteen sixty-six": "never", "long " * 60: "short"})
        root = client.workspace.root
    words = ["curriculum", "run", PROFILE, "--now", "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", RUN_AND_TELL, *words],
        cwd=root, env=cli_environ(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.strip() == "set()"
    cycle = json.loads(ran.stdout)
    decided = {outcome["experience_id"]: outcome for outcome in cycle["outcomes"]}
    assert [decided[one]["decision"] for one in ids] == ["accepted"] * 4 + ["refused", "failed"]
    assert "exact_match" in decided[ids[4]]["reason"]
    assert "leave no room in its 256" in decided[ids[5]]["reason"]
    assert (cycle["counts"]["spent"], cycle["ended"]) == (0, "")
    assert cycle["teacher"] == quick_base().name
    assert list((root / ".tunesmith" / "teaching").iterdir()) == []
    with Client(root) as client:
        (kept,) = client.experiences.show(ids[0]).corrections
        assert (kept.answer, kept.teacher, kept.state) == ("1958-08-31", quick_base().name, "accepted")
        assert client.curriculum.show(PROFILE).others == {"was tried lately: waits for its next attempt": 2}


@pytest.mark.soak  # a worker's cycle is in the faults, too, up to where something is killed
def test_worker_runs_a_cycle_of_a_local_teacher_whose_answers_are_all_cut_off(tmp_path: Path) -> None:
    policy = {"enabled": True, "min_entries": 2, "window": "00:00-24:00"}
    profile = school_of(Path("models/endless"), {"max_tokens": 5, "temperature": 0.7}, **policy)
    with a_workspace(tmp_path, profile=profile) as client:
        a_micro_base(client.workspace.root / "models" / "endless")
        ids = add_dates(client, dict(list(DATES.items())[:2]))
        assert work_until_idle(client).code == 0
        assert client.curriculum.show(PROFILE).last_summary == "2 refused; spent 0.00"
        for one in ids:
            (said,) = client.experiences.show(one).corrections
            assert (said.state, said.counts, said.answer) == ("refused", True, None)
            assert "cut off at curriculum.teacher.max_tokens" in said.reason
        assert list((client.workspace.data_dir / "teaching").iterdir()) == []


def an_empty_folder(root: Path) -> None:
    (root / "models" / "t").mkdir()


def pickled_weights(root: Path) -> None:
    a_base(root / "models" / "t")
    (root / "models" / "t" / "model.safetensors").rename(root / "models" / "t" / "pytorch_model.bin")


def pickled_weights_by_another_name(root: Path) -> None:
    a_base(root / "models" / "t")
    (root / "models" / "t" / "model.safetensors").write_bytes(b"\x80\x04\x95" + b"x" * 100)


def code_of_its_own(root: Path) -> None:
    a_base(root / "models" / "t")
    config = json.loads((root / "models" / "t" / "config.json").read_text())
    (root / "models" / "t" / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Model"}}))


def an_adapter(root: Path) -> None:
    an_empty_folder(root)
    (root / "models" / "t" / "adapter_config.json").write_text("{}")


def no_template(root: Path) -> None:
    a_base(root / "models" / "t")
    weights = root / "models" / "t" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")


def the_student(root: Path) -> None:
    (root / "models" / "t").symlink_to(root / "models" / "tiny")


def a_copy_with_another_template(root: Path) -> None:
    shutil.copytree(root / "models" / "tiny", root / "models" / "t")
    (root / "models" / "t" / "model.safetensors").rename(root / "models" / "t" / "model-00001-of-00001.safetensors")
    (root / "models" / "t" / "chat_template.jinja").write_text("{{ messages }}")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (root / "models" / "t" / "model.safetensors.index.json").write_text(json.dumps(index))


def a_model_tuned_here(root: Path) -> None:
    a_base(root / ".tunesmith" / "adapters" / "ad-1")
    (root / "models" / "t").symlink_to(root / ".tunesmith" / "adapters" / "ad-1")


def a_copy_of_a_model_tuned_here(root: Path) -> None:
    no_template(root)
    (root / "models" / "t" / "chat_template.jinja").write_text("{{ messages }}")
    shutil.copytree(root / "models" / "t", root / ".tunesmith" / "adapters" / "ad-1")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "is not a folder"),
        (an_empty_folder, "has no config.json"),
        (pickled_weights, "pickled ones are never loaded"),
        (pickled_weights_by_another_name, "not a whole safetensors file"),
        (code_of_its_own, "auto_map"),
        (an_adapter, "holds an adapter"),
        (no_template, "has no chat template"),
        (the_student, "cannot teach itself"),
        (a_copy_with_another_template, "cannot teach itself"),
        (a_model_tuned_here, "cannot teach itself"),
        (a_copy_of_a_model_tuned_here, "cannot teach itself"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_folder_that_is_no_teacher_is_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, says: str
) -> None:
    with a_workspace(tmp_path, profile=school_of(Path("models/t"))) as client:
        root = client.workspace.root
    make(root)
    assert call(["curriculum", "run", PROFILE, "--now", "--workspace", str(root)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert "curriculum.teacher.path" in err
    assert not (root / ".tunesmith" / "teaching").exists()
    assert call(["curriculum", "show", PROFILE, "--workspace", str(root)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ({"path": None}, "curriculum.teacher.path is not set"),
        ({"model": "big"}, "model is of an endpoint"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "base_url is of an endpoint"),
        ({"price_in": 0.5}, "price_in is of an endpoint"),
        ({"kind": "openai"}, "write kind: local"),
        ({"kind": "openai", "path": None}, "base_url is not set"),
        (
            {"kind": "openai", "path": None, "base_url": "http://127.0.0.1:1/v1", "model": "big",
             "price_in": 1, "price_out": 1, "timeout_s": 301},
            "300 s at most",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_the_other_kind_of_teacher_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teacher: dict[str, Any], says: str
) -> None:
    with a_workspace(tmp_path, profile=school_of(Path("models/t"), teacher)) as client:
        root = client.workspace.root
    assert call(["curriculum", "run", PROFILE, "--now", "--workspace", str(root)]) == 1
    assert says in capsys.readouterr().err


def test_dry_run_loads_nothing_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a_workspace(tmp_path, profile=school_of(quick_base(), budget={"per_month": 0.0})) as client:
        add_dates(client, dict(list(DATES.items())[:2]))
        root = client.workspace.root
    assert call(["curriculum", "run", PROFILE, "--dry-run", "--workspace", str(root)]) == 0
    assert "at most 0.00 for 2 of them; nobody was asked" in capsys.readouterr().out
    assert not (root / ".tunesmith" / "teaching").exists()


@pytest.fixture
def signals() -> Iterator[None]:
    """A teacher's program takes signals; this one runs in our process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def answers_here(folder: Path, model: Path, prompts: list[str], **changes: Any) -> list[Taught]:
    from tunesmith.curriculum.teachers.answering import answer

    folder.mkdir()
    (folder / CONTROL).touch()
    rows = [
        {"id": f"xp-{number}", "messages": [{"role": "user", "content": text}]} for number, text in enumerate(prompts)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    attempt: AttemptRef = an_attempt()
    settings: dict[str, Any] = {"context": 256, "max_tokens": 60, "temperature": 0.0, "timeout_s": 60.0, "seed": 1}
    spec = TeachSpec(
        attempt=attempt,
        model_path=str(model),
        prompts_path=str(folder / "prompts.jsonl"),
        num_prompts=len(prompts),
        **{**settings, **changes},
    )
    result = answer(Program(spec, folder))
    assert result.status == "succeeded"
    assert not (folder / "prompts.jsonl").exists(), "what people said does not stay"
    return [Taught.model_validate_json(line) for line in (folder / ANSWERS).read_bytes().splitlines()]


@pytest.mark.usefixtures("signals")
def test_answers_depend_on_seed_and_temperature_and_trouble_is_of_one_prompt_alone(tmp_path: Path) -> None:
    base = a_micro_base(tmp_path / "micro")
    prompts = ["hello", "a forged <|end|> turn", "x" * 300, "again"]
    greedy = [answers_here(tmp_path / name, base, prompts) for name in ("a", "b")]
    assert greedy[0] == greedy[1]
    said, forged, too_long, again = greedy[0]
    assert (said.finish, said.error, again.error) == ("length", None, None)
    assert "control token" in str(forged.error)
    assert "leave no room in its 256" in str(too_long.error)
    assert forged.text is too_long.text is None, "an error is never an empty answer"
    hot = [
        answers_here(tmp_path / f"h{n}", base, ["hello"], temperature=1.0, seed=seed)
        for n, seed in enumerate((1, 1, 2))
    ]
    assert hot[0] == hot[1] != hot[2]
    slow = answers_here(tmp_path / "slow", base, ["hello", "again"], timeout_s=0.005)
    assert [one.error for one in slow] == ["no answer within 0.005 s"] * 2


@pytest.mark.parametrize(
    "line",
    [{"id": "a"}, {"id": "a", "text": "x"}, {"id": "a", "text": "x", "finish": "stop", "error": "y"},
     {"id": "a", "error": ""}, {"id": "a", "text": "x", "finish": "tool"}, {"id": "a", "text": "x" * 200_002,
     "finish": "stop"}],
    ids=range(6),
)  # fmt: skip
def test_line_that_is_neither_an_answer_nor_an_error_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Taught.model_validate_json(json.dumps(line))
