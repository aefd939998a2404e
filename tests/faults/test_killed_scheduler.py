"""A worker that is killed after a round's dataset was assembled and before its run was queued: nothing waits for it."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from typing import Any

import sqlalchemy as sa

from support import tables
from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.workspaces import PROFILE
from tunesmith.client import Client
from tunesmith.orchestration.rounds import scheduler
from tunesmith.orchestration.rounds.open import open_round
from tunesmith.runs.queries import runs
from tunesmith.store.database import Tx

_processes = get_context("forkserver")
EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"mix": {"min_new": 10, "min_eval_examples": 0}}


def open_a_round_and_be_killed(root: str) -> None:
    """A worker as it is, but for the look at its lease in the transaction that queues the run."""

    def be_killed(_: Tx) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def open_and_die(*words: Any, **wishes: Any) -> Any:
        return open_round(*words, **{**wishes, "fence": be_killed})

    scheduler.open_round = open_and_die
    with Client(root) as client:
        client.system.worker().run(until_idle=True)


def reserved(fleet: Fleet) -> int:
    with fleet.database.read() as tx:
        is_reserved = tables.experiences.c.state == "reserved"
        return int(tx.conn.execute(sa.select(sa.func.count()).where(is_reserved)).scalar_one())


@ON_SQLITE
def test_next_worker_opens_the_round_with_what_the_killed_one_had_reserved(
    make_fleet: MakeFleet, store: str | None
) -> None:
    sections = {"campaign": EAGER, "experience": MIX}
    worker = {"lease_s": 0.6, "heartbeat_s": 0.15, "sweep_s": 0.1, "poll_s": 0.02, "triggers_s": 0.1}
    fleet = make_fleet(store=store, profile=sections, options={"quality": 0.3, "steps": 2}, settings={"worker": worker})
    fleet.client.campaigns.create(PROFILE)
    for number in range(60):
        turns = [("user", f"What is {number} plus one?"), ("assistant", f"One more than {number} is {number + 1}.")]
        fleet.client.experiences.add(PROFILE, [{"role": role, "content": text} for role, text in turns])
    victim = _processes.Process(target=open_a_round_and_be_killed, args=(str(fleet.root),), daemon=True)
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert reserved(fleet) > 40, "it had assembled a dataset"
    deadline = time.monotonic() + 30.0
    made: list[str] = []
    while not made and time.monotonic() < deadline:
        fleet.work()
        with fleet.database.read() as tx:
            made = [run.state for run in runs.listing(tx, limit=10) if run.automatic]
    assert made == ["deployed"]
    assert reserved(fleet) == 0
