"""Trainers that lie or break the rules, end to end: nothing they made is ever registered, and the data stays free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hostile_trainer
import pytest

from support.fleet import ON_POSTGRES, Fleet, MakeFleet
from support.workspaces import PROFILE
from tunesmith.core.files import sha256_file
from tunesmith.runs.queries import queue
from tunesmith.training.trainers import registry

# script → (how the attempt ended, its error class, what the reason must say)
LIES = {
    "wrong_fingerprint": ("failed", "mismatch", "dataset_fingerprint"),
    "missing_artifact": ("failed", "mismatch", "artifact"),
    "nan_weights": ("failed", "nonfinite", "NaN"),
    "exit0_no_result": ("failed", "protocol", "without a result"),
    "success_exit_1": ("failed", "protocol", "exited 1"),
    "two_results": ("failed", "protocol", "stdout"),
    "stale_token": ("failed", "mismatch", "token"),
    "garbage_events": ("failed", "protocol", "line"),
    "half_line": ("failed", "protocol", "half a line"),
    "huge_line": ("failed", "protocol", "1 MiB"),
    "escape_path": ("failed", "protocol", "outside its folder"),
    "step_backwards": ("failed", "protocol", "forward only"),
    "untrained": ("failed", "mismatch", "nothing was learnt"),
    "no_tokens": ("failed", "mismatch", "num_trained_tokens"),
    "nan_loss": ("stopped", None, "loss is nan"),
}


def test_lies_are_never_registered_and_their_data_is_free_again(make_fleet: MakeFleet) -> None:
    """Every lie once, by two workers, beside an honest adapter that is live."""
    fleet = make_fleet()
    honest = fleet.submit()
    fleet.work()
    lies: dict[str, tuple[str, str, dict[str, str]]] = {}
    for number, script in enumerate(LIES, start=1):
        wishes = [f"trainer.options.script={script}", "trainer.options.quality=0.9", "trainer.options.step_s=0"]
        run_id = fleet.submit(*wishes, lines=30, first=1000 * number)
        dataset_id = fleet.client.runs.get(run_id).dataset_id
        lies[script] = run_id, fleet.an_experience(dataset_id, script), _digests(fleet, dataset_id)
    workers = [fleet.start(until_idle=True) for _ in range(2)]
    assert [worker.wait(120) for worker in workers] == [0, 0], fleet.logs()[-3000:]

    for script, (run_id, experience_id, digests) in lies.items():
        outcome, error_class, word = LIES[script]
        run = fleet.client.runs.get(run_id)
        [attempt] = fleet.attempts(run_id)
        assert (script, run.state, run.adapter) == (script, "failed", None)
        assert (script, attempt.outcome, attempt.error_class) == (script, outcome, error_class)
        assert word in run.reason, script
        assert "\n" not in run.reason, script
        released = fleet.experience(experience_id)
        assert (script, released.state, released.num_rejections) == (script, "collected", 0)
        assert _digests(fleet, run.dataset_id) == digests, script
    only_the_honest_adapter_is_there(fleet, honest)


def _digests(fleet: Fleet, dataset_id: str) -> dict[str, str]:
    dataset, _ = fleet.client.datasets.show(dataset_id)
    return {path.name: sha256_file(path) for path in (fleet.client.workspace.data_dir / dataset.path).iterdir()}


def only_the_honest_adapter_is_there(fleet: Fleet, honest: str) -> None:
    rows = fleet.rows()
    [adapter] = rows["adapters"]
    assert adapter["run_id"] == honest
    assert fleet.adapter_folders() == [adapter["digest"][:32]]
    assert fleet.served() == adapter["digest"]
    assert fleet.strays() == []
    for checkpoint in rows["checkpoints"]:
        folder = f"runs/{checkpoint['run_id']}/{checkpoint['attempt_id']}/checkpoints/"
        assert checkpoint["path"].startswith(folder)
        assert ".." not in checkpoint["path"]


@pytest.fixture
def hostile(make_fleet: MakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFleet]:
    """Makes a fleet in whose installation a package brought the hostile trainer."""
    site = tmp_path / "site"
    hostile_trainer.install(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    registry._installed.cache_clear()

    def make(trick: str, **kwargs: object) -> Fleet:
        return make_fleet(trainer=hostile_trainer.NAME, options={"trick": trick}, **kwargs)

    yield make
    registry._installed.cache_clear()


TRICKS = {
    "nul_in_the_log": ("failed", "told to fail"),
    "nul_in_the_detail": ("completed", ""),
    "nan_in_a_failure": ("failed", "told to fail"),
    "forged_number": ("failed", "train_s"),
    "pipe_for_a_manifest": ("failed", "manifest"),
    "link_for_an_artifact": ("failed", "link"),
    "pickle_beside": ("failed", "payload.bin"),
    "strange_ack": ("completed", ""),
    "kills_its_shim": ("failed", "SIGKILL"),
}


@ON_POSTGRES
def test_hostile_trainers_hurt_only_their_own_runs(hostile: MakeFleet, store: str | None) -> None:
    """Whatever a program of somebody else's does: the worker lives on, and the next run is done."""
    fleet = hostile("nothing", store=store, profile={"deploy": {"when": "never"}})
    ids = {trick: fleet.submit(f"trainer.options.trick={trick}") for trick in TRICKS}
    last = fleet.submit()
    fleet.work(timeout_s=90)
    ends = {trick: fleet.client.runs.get(run_id) for trick, run_id in ids.items()}
    assert {trick: run.state for trick, run in ends.items()} == {trick: state for trick, (state, _) in TRICKS.items()}
    for trick, (_, word) in TRICKS.items():
        assert word in ends[trick].reason, trick
    assert fleet.state(last) == "completed"
    honest = {ids["nul_in_the_detail"], ids["strange_ack"], last}
    assert {row["run_id"] for row in fleet.rows()["adapters"]} == honest
    assert fleet.strays() == []


def test_interruption_that_nobody_asked_for_is_not_tried_again_at_once(hostile: MakeFleet) -> None:
    """It is free, because a full disk or a preemption is; but a program must not keep a worker spinning."""
    fleet = hostile("unasked_interruption")
    run_id = fleet.submit()
    other = fleet.submit("trainer.options.trick=nothing")
    fleet.start()
    fleet.wait(other, "deployed")
    [attempt] = fleet.attempts(run_id)
    assert attempt.outcome == "interrupted"
    run = fleet.client.runs.get(run_id)
    assert run.state == "queued"
    assert run.waits_for is not None
    assert run.waits_for.startswith("tried again in")
    with fleet.database.read() as tx:
        [task] = queue.of_run(tx, run_id)
    assert (task.counts.num_crashes, task.counts.num_errors) == (0, 0)
    fleet.client.runs.cancel(run_id)
    assert fleet.client.adapters.live(PROFILE) is not None
