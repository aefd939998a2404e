"""Only the current owner changes anything: every write with a stale lease is refused, and no table differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import tables
from support.rows import (
    ACTOR,
    ALL_KINDS,
    ARCHITECTURE,
    WORKER,
    a_claimed_run,
    a_judgement,
    an_adapter,
    an_evaluation,
    dump,
    force,
)
from support.workspaces import a_workspace
from tunesmith.core.errors import LeaseLost, Refused
from tunesmith.core.files import publish_folder
from tunesmith.deployment.deploy import deploy
from tunesmith.evaluation.evaluate import Measured
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.settings import Settings
from tunesmith.programs.stage import DryRunPassed, Flipped, Looked, NotFlipped, Pulse, StageContext, StageEnd
from tunesmith.programs.stage import Trained as TrainedFact
from tunesmith.runs.queries import checkpoints, requests, runs, tasks
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.runs.spec import BaseModelRef
from tunesmith.store.database import Database, Tx

TRAINED = TrainedFact(path="adapters/x", digest="d" * 64, metrics={}, stopped_early=False)
ENDS: dict[str, StageEnd] = {
    "trained": StageEnd.succeeded(TRAINED),
    "validated": StageEnd.succeeded(DryRunPassed()),
    "failed": StageEnd.failed(ErrorClass.BUG, "bug"),
    "crashed": StageEnd.failed(ErrorClass.CRASH, "signal 9"),
    "cancelled": StageEnd.cancelled(),
    "paused": StageEnd(AttemptState.INTERRUPTED, decided_by=RequestKind.PAUSE),
    "interrupted": StageEnd(AttemptState.INTERRUPTED, error="TERM"),
    "stopped": StageEnd(AttemptState.STOPPED, error="live check"),
    "lost": StageEnd(AttemptState.LOST),
}

WRITES: dict[str, Callable[[Tx, Claim], object]] = {
    "renew": lambda tx, claim: tasks.renew(tx, claim.lease, 30.0),
    "guard": lambda tx, claim: tasks.require_lease(tx, claim.lease),
    "note_process": lambda tx, claim: tasks.note_process(tx, claim.lease, "{}"),
    "end_attempt": lambda tx, claim: tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER),
    "end_by": lambda tx, claim: tasks.end_by(
        tx, claim.lease, AttemptState.INTERRUPTED, TaskState.CANCELLED, actor=WORKER, reason="paused"
    ),
    "again_later": lambda tx, claim: tasks.reschedule(
        tx, claim.lease, 1.0, actor=WORKER, reason="later", payload={"num_failures": 1}
    ),
    "checkpoint": lambda tx, claim: checkpoints.register(
        tx, claim.lease, str(claim.task.run_id), step=5, path="runs/x/step-5", digest="d", kinds=("last",)
    ),
    **{
        f"settle_{name}": lambda tx, claim, end=end: lifecycle.settle(tx, claim, end, actor=WORKER)  # type: ignore[misc]
        for name, end in ENDS.items()
    },
}


def _taken_over(
    database: Database, kind: TaskKind = TaskKind.TRAIN, state: RunState = RunState.TRAINING, **spec: Any
) -> tuple[Claim, Claim]:
    """(the claim of a worker that was away too long, the claim of the one that took over)."""
    with database.write() as tx:
        _, stale = a_claimed_run(tx, state, kind, **spec)
        force(tx, tables.tasks, stale.task.id, lease_until=tx.lease_now - 1.0)
    with database.write() as tx:
        [expired] = tasks.expired(tx)
        lifecycle.settle_lost(tx, expired, actor="wk-reaper")
        force(tx, tables.tasks, stale.task.id, available_at=None)
    with database.write() as tx:
        fresh = tasks.claim(tx, "wk-other", ALL_KINDS, 30.0)
        assert fresh is not None
        assert fresh.task.id == stale.task.id
        lifecycle.begin(tx, fresh, actor="wk-other")
    return stale, fresh


@pytest.mark.parametrize("write", WRITES)
def test_stale_lease_is_refused_and_changes_nothing(database: Database, write: str) -> None:
    stale, fresh = _taken_over(database)
    before = dump(database)
    with pytest.raises(LeaseLost, match="nothing was recorded"), database.write() as tx:
        WRITES[write](tx, stale)
    assert dump(database) == before
    with database.write() as tx:
        WRITES[write](tx, fresh)  # the owner may
    if write != "guard":
        assert dump(database) != before


@pytest.mark.parametrize("write", WRITES)
def test_forged_token_is_refused_and_changes_nothing(database: Database, write: str) -> None:
    from dataclasses import replace

    with database.write() as tx:
        _, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    forged = replace(claim, lease=replace(claim.lease, token=claim.attempt.token))
    before = dump(database)
    with pytest.raises(LeaseLost), database.write() as tx:
        WRITES[write](tx, forged)
    assert dump(database) == before


def test_stale_lease_moves_no_run(database: Database) -> None:
    stale, fresh = _taken_over(database)
    run_id = str(stale.task.run_id)
    before = dump(database)
    with pytest.raises(Refused), database.write() as tx:
        runs.move(tx, run_id, RunState.EVALUATING, actor=WORKER, reason="stale", lease=stale.lease)
    with pytest.raises(Refused), database.write() as tx:  # and nobody without a lease while one is held
        runs.move(tx, run_id, RunState.CANCELLED, actor=ACTOR, reason="by hand")
    assert dump(database) == before
    with database.write() as tx:
        runs.move(tx, run_id, RunState.EVALUATING, actor=WORKER, reason="owner", lease=fresh.lease)


@pytest.mark.parametrize(
    ("kind", "state", "fact"),
    [
        (TaskKind.EVALUATE, RunState.EVALUATING, "measured"),
        (TaskKind.DEPLOY, RunState.DEPLOYING, "flipped"),
        (TaskKind.DEPLOY, RunState.DEPLOYING, "later"),
        (TaskKind.DEPLOY, RunState.DEPLOYING, "refused"),
        (TaskKind.WATCH, RunState.WATCHING, "again"),
        (TaskKind.WATCH, RunState.WATCHING, "healthy"),
        (TaskKind.WATCH, RunState.WATCHING, "roll_back"),
    ],
)
def test_stale_settle_of_later_stages_is_refused_and_changes_nothing(
    database: Database, kind: TaskKind, state: RunState, fact: str
) -> None:
    stale, fresh = _taken_over(database, kind, state)
    with database.write() as tx:
        run = runs.get(tx, str(stale.task.run_id))
        live = AdapterState.LIVE if kind is TaskKind.WATCH else AdapterState.CANDIDATE
        adapter = an_adapter(tx, live, run_id=run.id)
    facts = {
        "measured": Measured(a_judgement(run, adapter.digest, Decision.PROMOTE), adapter.id, None, "scores"),
        "flipped": Flipped(),
        "later": NotFlipped("a watch is open", "later"),
        "refused": NotFlipped("cannot load", "refused"),
        "again": Looked("again", "healthy so far"),
        "healthy": Looked("healthy", "healthy"),
        "roll_back": Looked("roll_back", "bad looks"),
    }
    before = dump(database)
    with pytest.raises(LeaseLost), database.write() as tx:
        lifecycle.settle(tx, stale, StageEnd.succeeded(facts[fact]), actor=WORKER)
    assert dump(database) == before
    with database.write() as tx:
        lifecycle.settle(tx, fresh, StageEnd.succeeded(facts[fact]), actor="wk-other")
    assert dump(database) != before


def test_stale_deploy_flips_nothing_and_serves_nothing(database: Database, tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        workspace = client.workspace
    folder = workspace.root / "models" / "tiny"
    base = BaseModelRef(path=str(folder), revision=None, digest=base_digest(folder), lock=ARCHITECTURE, context=512)
    staged = workspace.data_dir / "staged"
    staged.mkdir(parents=True)
    (staged / "adapter.txt").write_text("weights")
    digest = publish_folder(staged, workspace.data_dir / "adapters" / "x").digest
    stale, fresh = _taken_over(database, TaskKind.DEPLOY, RunState.DEPLOYING, base=base)
    with database.write() as tx:
        run = runs.get(tx, str(stale.task.run_id))
        adapter = an_adapter(tx, run_id=run.id)
        force(tx, tables.adapters, adapter.id, path="adapters/x", digest=digest)
        an_evaluation(tx, run, adapters.get(tx, adapter.id))
    before = dump(database)
    with pytest.raises(LeaseLost):
        deploy(StageContext(database, workspace, Settings(), stale, WORKER, Pulse()))
    assert dump(database) == before
    current = workspace.data_dir / "live" / run.profile / "current"
    assert not current.exists()
    end = deploy(StageContext(database, workspace, Settings(), fresh, "wk-other", Pulse()))
    assert end.fact == Flipped()
    assert current.exists()
    with database.read() as tx:
        live = adapters.live(tx, run.profile)
    assert live is not None
    assert live.id == adapter.id


def test_request_is_acknowledged_once_and_only_then_closed(database: Database) -> None:
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        request = requests.add(tx, run.id, RequestKind.CHECKPOINT, actor=ACTOR)
        requests.acknowledge(tx, request.id, actor=WORKER, answer="saved")
        requests.acknowledge(tx, request.id, actor="wk-late", answer="again")
        assert requests.get(tx, request.id).answer == "saved"
        assert requests.unanswered(tx, run.id) == []
