"""A program of the user's own as the trainer, from submit through a worker to a published adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.fleet import Fleet, MakeFleet
from tunesmith.core.errors import ConfigError
from tunesmith.core.files import verify_folder

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """The workspace's own trainer instead of sim, as its profile says it."""
    options = {"argv": ["python", "mine.py"], "env": ["MY_SETTING"]}
    fleet = make_fleet(trainer="command", options=options, profile={"recipe": {"max_steps": 4}})
    shutil.copy(EXAMPLES / "trainer_without_tunesmith.py", fleet.root / "mine.py")
    return fleet


def test_command_trainer_trains_and_its_adapter_is_published(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SETTING", "seen")
    monkeypatch.setenv("API_TOKEN", "hidden")
    program = fleet.root / "mine.py"
    text = program.read_text().replace(
        "def main() -> int:\n", "def main() -> int:\n    print(dict(os.environ), file=sys.stderr)\n"
    )
    program.write_text(text)
    run_id = fleet.submit()
    fleet.work("train")
    assert fleet.state(run_id) == "evaluating"
    (folder,) = fleet.adapter_folders()
    verify_folder(fleet.client.workspace.adapters_dir / folder)
    (attempt,) = fleet.attempts(run_id)
    assert fleet.steps(run_id, attempt) == [1, 2, 3, 4]
    assert list(fleet.spec(run_id, attempt)["run"]["trainer_options"]["sha256"]) == ["mine.py"]
    log = (fleet.folder(run_id, attempt) / "stderr.log").read_text()
    assert "'MY_SETTING': 'seen'" in log
    assert "API_TOKEN" not in log


def test_command_program_that_changed_after_submit_is_not_started(fleet: Fleet) -> None:
    run_id = fleet.submit()
    with (fleet.root / "mine.py").open("a") as sink:
        sink.write("# another program now\n")
    fleet.work("train")
    assert fleet.state(run_id) == "failed"
    (attempt,) = fleet.attempts(run_id)
    assert "'mine.py' changed since the run was submitted; submit it again" in str(attempt.error)
    assert not (fleet.folder(run_id, attempt) / "events.jsonl").exists()


def test_command_that_cannot_be_started_is_refused_at_submit(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="no program 'no-such-thing' in the workspace or on PATH"):
        fleet.submit("trainer.options.argv=" + json.dumps(["no-such-thing"]))
    assert fleet.rows()["runs"] == []
