"""What a person sees of a verdict: every check with its number, threshold, source and n."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.workspaces import a_workspace, submit, work_here
from tunesmith.cli.main import call
from tunesmith.client import Client

PROFILE = {
    "evaluation": {"metrics": ["heldout_loss", "exact_match_greedy"]},
    "gate": {"floors": {"exact_match_greedy": 0.1}},
}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path, profile=PROFILE) as client:
        yield client


def page_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert call(words) == 0
    return capsys.readouterr().out


def test_run_and_adapter_show_every_check_with_its_source(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(client.workspace.root)
    run_id = submit(client, overrides=("gate.min_gain=0.02",))
    work_here(client)
    detail = client.runs.show(run_id)
    assert detail.evaluation is not None
    checks = {(check["name"], check["metric"]): check for check in detail.evaluation.checks}
    gain = checks["gain", "heldout_loss"]
    assert (gain["threshold"], gain["setting"], gain["passed"]) == (0.02, "gate.min_gain", True)
    assert gain["origin"] != "default"
    assert gain["actual"] == detail.evaluation.comparisons[0]["difference"]
    assert gain["n"] == detail.evaluation.num_cases
    floor = checks["floor", "exact_match_greedy"]
    assert floor["origin"].startswith("profiles/support.yaml:")
    assert checks["change", "exact_match_greedy"]["origin"] == "default"

    shown = page_of(["run", "show", run_id], capsys)
    for word in ("surely better", "by chance", "min_gain (--set)", "floors (profile:", "(default)"):
        assert word in shown
    of_adapter = page_of(["adapter", "show", "support@v1"], capsys)
    assert "surely better" in of_adapter
    in_json = client.adapters.show("support@v1").evaluation
    assert in_json is not None
    assert in_json.checks == detail.evaluation.checks
