"""docs/extending.md as a newcomer follows it: install the package, name its plug-ins in a profile, run it for real."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.native import a_micro_base, small_rows
from support.plugins import EXAMPLES, install_project, on_path
from support.workspaces import PROFILE, a_jsonl, a_workspace, cli
from tunesmith.core.files import verify_folder

ROOT = EXAMPLES.parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def section(heading: str) -> dict[str, Any]:
    """What a section of the page adds to a profile."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with on_path(install_project(EXAMPLES, tmp_path / "site")):
        yield


def test_page_is_short_and_shows_what_the_examples_hold() -> None:
    assert PAGE.count("\n") < 200
    sources = [path.read_text() for path in sorted((EXAMPLES / "acme_tunesmith").glob("*.py"))]
    shown = blocks("python")
    assert len(shown) >= 4
    for block in shown:
        assert any(block in source for source in sources), block.splitlines()[0]
    (registered,) = blocks("toml")
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    assert tomllib.loads(registered)["project"]["entry-points"] == project["entry-points"]


@pytest.mark.real_programs
def test_target_evaluator_and_verifier_of_a_package_take_a_run_to_deployed(tmp_path: Path) -> None:
    sections = {**section("A serving target"), **section("An evaluator"), **section("A verifier")}
    sections["gate"]["min_cases"] = 5
    with a_workspace(tmp_path, options={"steps": 3, "step_s": 0.0, "quality": 0.9}, profile=sections) as client:
        root = client.workspace.root
        done = cli("profile", "check", PROFILE, cwd=root, real=True)
        assert done.code == 0, done.err
        submitted = cli("run", "submit", PROFILE, a_jsonl(root / "data.jsonl"), cwd=root, real=True)
        run_id = submitted.last_line
        worked = cli("worker", "--until-idle", cwd=root, real=True, timeout_s=120.0)
        detail = client.runs.show(run_id)
        assert detail.run.state == "deployed", (worked.err, detail)
        # the target: the map names a copy of the adapter
        said = (root / "served" / f"{PROFILE}.conf").read_text()
        served = root / "served" / f"{PROFILE}@v1"
        assert said == f"map $profile $adapter {{ {PROFILE} {served}; }}\n"
        verify_folder(served)
        # the evaluator: both metrics compared, each in its direction, and the gate decided by one of them
        assert detail.evaluation is not None
        compared = {each["metric"]: each for each in detail.evaluation.comparisons}
        assert set(compared) == {"heldout_loss", "json_valid", "answer_words"}
        assert (compared["json_valid"]["better"], compared["answer_words"]["better"]) == ("higher", "lower")
        assert compared["json_valid"]["candidate"] > compared["json_valid"]["baseline"]
        assert compared["answer_words"]["candidate"] < compared["answer_words"]["baseline"]
        assert all(each["low"] > 0 for each in compared.values())
        shown = cli("run", "show", run_id, cwd=root, real=True).out
        assert "better: json_valid" in " ".join(shown.split())
        # the verifier: each captured answer
        words = ("experience", "add", PROFILE, "--prompt", "Which ticket?", "--answer", "See ac 104233.")
        added = cli(*words, cwd=root, real=True)
        assert added.code == 0, added.err
        told = " ".join(cli("experience", "show", added.last_line, cwd=root, real=True).out.split())
        assert "ticket_number 0.00 ! ac 104233 is not written as AC-104233" in told


@pytest.mark.slow
@pytest.mark.real_programs
def test_trainer_of_a_package_trains_a_real_model(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"base": {"path": "models/micro", "family": "llama"}, "deploy": {"when": "never"}}
    sections["recipe"] = {"method": "sft", "lr": 1e-3, "max_steps": 2, "max_length": 64}
    with a_workspace(tmp_path, trainer=section("A trainer")["trainer"]["kind"], profile=sections) as client:
        root = client.workspace.root
        a_micro_base(root / "models" / "micro")
        data = root / "rows.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in small_rows(60)))
        run = client.runs.submit(PROFILE, data)
        worked = cli("worker", "--until-idle", cwd=root, real=True, timeout_s=280.0)
        detail = client.runs.show(run.id)
        assert detail.run.state in ("completed", "rejected"), (worked.err, detail.attempts)
        assert detail.evaluation is not None
        logs = [path.read_text() for path in client.workspace.data_dir.rglob("events.jsonl")]
        num = detail.spec["dataset"]["num_train"]
        assert sum(f"learning rate {1e-3 * (num / 1000) ** 0.5:.3g} for {num} examples" in log for log in logs) == 1
