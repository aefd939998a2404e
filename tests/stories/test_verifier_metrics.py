"""A profile's verifiers as metrics: measured on generated answers of both sides, shown, and decided by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.workspaces import PROFILE, a_profile, a_workspace, submit, work_here
from tunesmith.core.errors import ConfigError
from tunesmith.runs.rules.run import RunState

VERIFIERS: dict[str, Any] = {
    "exact_match": {},
    "length": {"max_chars": 2},
    "fabrication": {},
    "padded_minimal_input": {},
}
METRICS = ["heldout_loss", "verifier:exact_match", "verifier:length", "verifier:fabrication"]


def sections(**gate: Any) -> dict[str, Any]:
    return {
        "experience": {"verifiers": VERIFIERS},
        "evaluation": {"metrics": METRICS},
        "gate": {"min_cases": 10, **gate},
    }


def test_verifiers_are_measured_and_a_monitor_decides_only_with_a_floor(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile=sections()) as client:
        run_id = submit(client)
        work_here(client)
        first = client.runs.show(run_id)
        assert first.run.state == RunState.DEPLOYED
        assert first.spec["verifiers"] == {name: VERIFIERS[name] for name in ("exact_match", "length", "fabrication")}
        assert first.evaluation is not None
        by_metric = {c["metric"]: c for c in first.evaluation.comparisons}
        assert by_metric["verifier:exact_match"]["difference"] > 0.2
        assert by_metric["verifier:exact_match"]["shown_only"] is False
        assert by_metric["verifier:fabrication"]["shown_only"] is True
        assert by_metric["verifier:fabrication"]["candidate"] < 0.5, "sums are not in the prompt"
        assert {c["metric"] for c in first.evaluation.checks} == {None, *METRICS} - {"verifier:fabrication"}
        again = client.runs.submit(
            PROFILE, client.workspace.root / "data.jsonl", overrides=("gate.floors.verifier:fabrication=0.9",)
        ).id
        work_here(client)
        second = client.runs.show(again)
        assert second.evaluation is not None
        checks = {(c["metric"], c["name"]): c["passed"] for c in second.evaluation.checks}
        assert checks["verifier:fabrication", "floor"] is False
        assert second.run.state == RunState.REJECTED


def test_verifier_that_is_not_named_or_applies_nowhere_never_promotes(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        a_profile(client.workspace.root, evaluation={"metrics": ["heldout_loss", "verifier:language"]})
        with pytest.raises(ConfigError, match=r"name language under experience\.verifiers"):
            client.profiles.check(PROFILE)
        metrics = {"metrics": ["heldout_loss", "verifier:padded_minimal_input"]}
        a_profile(client.workspace.root, evaluation=metrics, experience={"verifiers": VERIFIERS})
        run_id = submit(client)
        work_here(client)
        run = client.runs.show(run_id)
        assert run.run.state == RunState.HELD
        assert run.run.reason == "verifier:padded_minimal_input: it applies to none of the 20 cases"


def test_version_that_is_deployed_again_is_judged_by_the_verifiers_and_the_program_of_now(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        for _ in range(2):  # the second one is no better, and rejected
            submit(client)
            work_here(client)
        root = client.workspace.root
        (root / "score.py").write_text(
            "import json, sys\n"
            "for line in sys.stdin:\n"
            "    print(json.dumps({'id': json.loads(line)['id'], 'scores': {'tone': 1}}))\n"
        )
        told = sections()
        told["evaluation"] = {
            "metrics": [*METRICS, "command:tone"],
            "command": ["python", "score.py"],
            "command_metrics": {"tone": "higher"},
        }
        a_profile(root, **told)
        run_id = client.adapters.deploy("support@v2").id
        work_here(client)
        shown = client.runs.show(run_id)
        assert shown.evaluation is not None
        assert [c["metric"] for c in shown.evaluation.comparisons] == [*METRICS, "command:tone"]
        assert all(c["problem"] is None for c in shown.evaluation.comparisons)
        assert shown.run.state == RunState.REJECTED
