"""Rounds that nobody sits beside: what a killed worker or a server that is down must not leave for a person."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import drill_target
import pytest
import sqlalchemy as sa
from drill_target import DrillServer, serving

from support import tables
from support.fleet import ON_SQLITE, Fleet, MakeFleet
from support.store_processes import FORKED
from support.workspaces import PROFILE
from tunesmith.client import Client
from tunesmith.orchestration import lifecycle
from tunesmith.orchestration.rounds import scheduler
from tunesmith.orchestration.rounds.open import open_round
from tunesmith.runs.queries import runs
from tunesmith.runs.rules.run import RUN
from tunesmith.store.database import Tx

EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"mix": {"min_new": 10, "min_eval_examples": 0}}
WORKER = {"lease_s": 0.6, "heartbeat_s": 0.15, "sweep_s": 0.1, "poll_s": 0.02, "triggers_s": 0.1}


def talk(fleet: Fleet) -> None:
    """Enough for a round, with a campaign that opens it."""
    fleet.client.campaigns.create(PROFILE)
    for number in range(60):
        turns = [("user", f"What is {number} plus one?"), ("assistant", f"One more than {number} is {number + 1}.")]
        fleet.client.experiences.add(PROFILE, [{"role": role, "content": text} for role, text in turns])


def work_until_a_round_has_ended(fleet: Fleet, timeout_s: float = 30.0) -> list[str]:
    """The states of the rounds, once one has ended or waits for a person."""
    deadline = time.monotonic() + timeout_s
    while True:
        fleet.work()
        with fleet.database.read() as tx:
            made = [run for run in runs.listing(tx, limit=10) if run.automatic]
        if any(run.state in (*RUN.finished, "held") for run in made) or time.monotonic() > deadline:
            return [run.state for run in made]


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
    fleet = make_fleet(store=store, profile=sections, options={"quality": 0.3, "steps": 2}, settings={"worker": WORKER})
    talk(fleet)
    victim = FORKED.Process(target=open_a_round_and_be_killed, args=(str(fleet.root),), daemon=True)
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    assert reserved(fleet) > 40, "it had assembled a dataset"
    assert work_until_a_round_has_ended(fleet) == ["deployed"]
    assert reserved(fleet) == 0


class AbsentServer(DrillServer):
    """A server that is down for longer than the three tries of a run that somebody submitted."""

    num_refused = 0

    def answer(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.num_refused < 5:
            self.num_refused += 1
            raise ValueError("the server is being started")
        return super().answer(verb, body)


def test_round_whose_target_is_down_goes_live_when_it_is_back(
    make_fleet: MakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drill_target.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    monkeypatch.setattr(lifecycle, "backoff_s", lambda _: 0.05)
    server = AbsentServer()
    with serving(server) as url:
        targets = [{"name": "http", "kind": "drill-http", "options": {"url": url}}]
        sections = {"campaign": EAGER, "experience": MIX, "targets": targets}
        fleet = make_fleet(profile=sections, options={"quality": 0.3, "steps": 2}, settings={"worker": WORKER})
        talk(fleet)
        assert work_until_a_round_has_ended(fleet) == ["deployed"]
        assert server.num_refused == 5
        live = fleet.client.adapters.live(PROFILE)
        assert live is not None
        assert server.live == live.digest
