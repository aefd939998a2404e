"""A program of the user's that scores answers: what it is told, what it may say, and that everything else fails."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.candidates import a_simulated_adapter
from support.native import evaluate_here
from support.programs import World
from support.workspaces import PROFILE, a_profile, a_workspace, submit, work_here
from tunesmith.core.errors import ConfigError
from tunesmith.core.files import sha256_file
from tunesmith.evaluation.evaluators.command import command_in
from tunesmith.profiles.sections.evaluation import EvaluationSettings
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.protocol import CaseScore
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, EvaluateSpec, Subject

METRICS: dict[str, Any] = {"words": "lower", "right": "higher"}
HONEST = """
import json, sys
for line in sys.stdin:
    case = json.loads(line)
    scores = {"words": len(case["answer"].split()), "right": float(case["answer"] == case["reference"])}
    print(json.dumps({"id": case["id"], "scores": scores}))
"""
ROW = 'print(json.dumps({"id": case["id"], "scores": {"words": 1, "right": 1}}))'


def a_spec(tmp_path: Path, code: str, *, timeout_s: float = 30.0, num_cases: int = 3) -> EvaluateSpec:
    """A simulated adapter of no quality, scored by a script."""
    script = tmp_path / "score.py"
    script.write_text(code)
    world = World(tmp_path / "sim")
    folder = tmp_path / "adapter"
    adapter = AdapterRef(id="ad-1", path=str(folder), digest=a_simulated_adapter(folder, 0.0))
    spec = world.evaluate_spec((Subject(label="candidate", adapter=adapter),), num_cases=num_cases)
    cases = Path(spec.cases.path)
    rows = [
        {
            "id": f"case-{i}",
            "messages": [{"role": "user", "content": f"Ä {i}?"}, {"role": "assistant", "content": "yes"}],
        }
        for i in range(num_cases)
    ]
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EvaluationSettings(
        metrics=("command:words", "command:right"),
        command=("python", "score.py"),
        command_metrics=METRICS,
        command_timeout_s=timeout_s,
    )
    return spec.model_copy(
        update={
            "evaluation": settings,
            "command": command_in(tmp_path, settings.command),
            "cases": spec.cases.model_copy(update={"digest": sha256_file(cases)}),
        }
    )


def scored(spec: EvaluateSpec, folder: Path) -> Sequence[CaseScore]:
    return evaluate_here(spec, folder)[1].by_subject["candidate"]


def test_program_scores_every_case_and_is_told_nothing_about_the_side(tmp_path: Path) -> None:
    told = "open('told.jsonl', 'a').write(line)"
    spec = a_spec(tmp_path, HONEST.replace("    case =", f"    {told}\n    case ="))
    scores = scored(spec, tmp_path / "out")
    assert [score.values["command:words"] for score in scores] == [2.0, 2.0, 2.0], (
        "a simulated model without quality answers: not yes"
    )
    assert [score.values["command:right"] for score in scores] == [0.0, 0.0, 0.0]
    first = json.loads((tmp_path / "told.jsonl").read_text().splitlines()[0])
    assert first == {
        "id": "case-0", "messages": [{"role": "user", "content": "Ä 0?"}], "reference": "yes", "answer": "not yes",
        "finished": True,
    }  # fmt: skip


def test_error_of_one_case_is_an_error_of_that_case(tmp_path: Path) -> None:
    code = HONEST + "\n".replace("x", "")
    code = code.replace(
        "    print(",
        '    print(json.dumps({"id": case["id"], "error": "no\\nidea"})) if case["id"] == "case-1" else print(',
    )
    scores = scored(a_spec(tmp_path, code), tmp_path / "out")
    assert [score.error for score in scores] == [None, "command: no idea", None]
    assert scores[1].values == {}


def a_loop(row: str) -> str:
    return f"import json, sys, os, time\nfor line in sys.stdin:\n    case = json.loads(line)\n    {row}\n"


@pytest.mark.parametrize(("code", "error_class", "reason"), [
    ("import sys; print('why', file=sys.stderr); sys.exit(3)", ErrorClass.BUG, "it ended with 3: why"),
    (a_loop(ROW) + "sys.exit(1)", ErrorClass.BUG, "it ended with 1: it said nothing"),
    ("", ErrorClass.PROTOCOL, "it scored 0 of 3 cases; the first without a score is 'case-0'"),
    (a_loop(ROW) + "print('done')", ErrorClass.PROTOCOL, "line 4 of its output is no JSON"),
    (a_loop(ROW) + "print('[1]')", ErrorClass.PROTOCOL, "line 4 of its output is no JSON object"),
    (a_loop(ROW + "; " + ROW), ErrorClass.PROTOCOL, "scores case 'case-0' a second time"),
    (a_loop(ROW.replace('case["id"]', '"case-9"')), ErrorClass.PROTOCOL, "line 1 of its output names a case"),
    (a_loop(ROW.replace('case["id"]', "1")), ErrorClass.PROTOCOL, "line 1 of its output names a case"),
    (a_loop(ROW.replace('"right": 1', '"rihgt": 1')), ErrorClass.PROTOCOL, "exactly the scores right, words"),
    (a_loop(ROW.replace(', "right": 1', "")), ErrorClass.PROTOCOL, "exactly the scores right, words"),
    (a_loop(ROW.replace('"right": 1', '"right": True')), ErrorClass.PROTOCOL, "right is not a finite number"),
    (a_loop(ROW.replace('"right": 1', '"right": "1"')), ErrorClass.PROTOCOL, "right is not a finite number"),
    (a_loop(ROW.replace('"right": 1', '"right": float("nan")')), ErrorClass.PROTOCOL, "line 1 of its output is no"),
    (a_loop(ROW.replace('"right": 1', '"right": 10**400')), ErrorClass.PROTOCOL, "right is not a finite number"),
    (a_loop(ROW.replace('"scores"', '"note": 1, "scores"')), ErrorClass.PROTOCOL, "not exactly id and scores"),
    (a_loop('print(json.dumps({"id": case["id"], "error": " "}))'), ErrorClass.PROTOCOL, "not exactly id and scores"),
    ("print('{\"id\": \"case-0\", \"id\": \"case-1\"}')", ErrorClass.PROTOCOL, "line 1 of its output is no JSON"),
    ("import time; time.sleep(60)", ErrorClass.STALLED, r"did not end within 1\.5 s \(evaluation.command_timeout_s\)"),
    ("import sys\nwhile True: sys.stdout.write('x' * 99999)", ErrorClass.PROTOCOL, "it wrote more than 1 MiB"),
    ("import sys\nwhile True: sys.stderr.write('x' * 99999)", ErrorClass.PROTOCOL, "it wrote more than 1 MiB"),
])  # fmt: skip
def test_whatever_is_not_as_agreed_ends_the_evaluation(
    tmp_path: Path, code: str, error_class: ErrorClass, reason: str
) -> None:
    spec = a_spec(tmp_path, code, timeout_s=1.5 if error_class is ErrorClass.STALLED else 30.0)
    with pytest.raises(ProgramFailure, match=reason) as failure:
        scored(spec, tmp_path / "out")
    assert failure.value.error_class is error_class
    assert failure.value.message.startswith("evaluator command: ")
    assert not (tmp_path / "out" / "scores.json").exists()


def test_what_the_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    leaves = "import subprocess; open('pid', 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    scored(a_spec(tmp_path, leaves + a_loop(ROW)), tmp_path / "out")
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("section", "reason"), [
    ({"command": ["python", "score.py"]}, "needs both command and command_metrics"),
    ({"command_metrics": {"words": "lower"}}, "needs both command and command_metrics"),
    ({"command": ["python"], "command_metrics": METRICS}, r"name the program too, e\.g\. \[python"),
    ({"command": ["./gone.sh"], "command_metrics": METRICS}, r"no program '\./gone\.sh' in the workspace or on PATH"),
    ({"command": ["plain.txt"], "command_metrics": METRICS}, "plain.txt' is not executable; chmod"),
    ({"command": ["python", ""], "command_metrics": METRICS}, "an element is empty"),
    ({"command": ["python", "score.py"], "command_metrics": METRICS, "metrics": ["heldout_loss", "command:word"]},
     "command:word is not among evaluation.command_metrics; did you mean 'words'"),
])  # fmt: skip
def test_command_that_cannot_work_is_refused_before_queueing(
    tmp_path: Path, section: dict[str, Any], reason: str
) -> None:
    with a_workspace(tmp_path) as client:
        (client.workspace.root / "plain.txt").write_text("no program")
        a_profile(client.workspace.root, evaluation=section)
        with pytest.raises(ConfigError, match=reason):
            client.profiles.check(PROFILE)


def test_run_is_judged_by_the_program_and_a_changed_program_judges_nothing(tmp_path: Path) -> None:
    evaluation = {
        "metrics": ["heldout_loss", "command:right"], "command": ["./score.py"], "command_metrics": METRICS,
    }  # fmt: skip
    with a_workspace(tmp_path, profile={"evaluation": evaluation}) as client:
        script = client.workspace.root / "score.py"
        script.write_text(f"#!/usr/bin/env python3\n{HONEST}")
        script.chmod(0o755)
        run_id = submit(client)
        work_here(client)
        shown = client.runs.show(run_id)
        assert shown.run.state == RunState.DEPLOYED
        assert list(shown.spec["command_sha256"]) == ["./score.py"]
        assert shown.evaluation is not None
        right = next(c for c in shown.evaluation.comparisons if c["metric"] == "command:right")
        assert (right["better"], right["difference"] > 0.2) == ("higher", True)
        again = client.runs.submit(PROFILE, client.workspace.root / "data.jsonl").id
        script.write_text(script.read_text().replace("==", "!="))
        os.utime(script)
        work_here(client)
        failed = client.runs.show(again).run
        assert failed.state == RunState.FAILED
        assert "evaluation.command: './score.py' changed since the run was submitted" in failed.reason
