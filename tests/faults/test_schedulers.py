"""Two schedulers, one that was suspended past its lease, one that died: every round is opened once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, wait_for
from tunesmith.client import Client
from tunesmith.core.errors import LeaseLost, Refused
from tunesmith.orchestration.rounds.facts import RoundStatus, round_status
from tunesmith.orchestration.rounds.open import open_round
from tunesmith.orchestration.rounds.scheduler import NAME, Scheduler
from tunesmith.runs.queries import runs, scheduler_leases
from tunesmith.runs.queries.runs import Run
from tunesmith.store.database import Database

EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "rejection_cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"experience": {"mix": {"min_new": 10, "min_eval_examples": 0}}}
QUICK = {"lease_s": 0.6, "heartbeat_s": 0.15, "sweep_s": 0.05, "poll_s": 0.02, "triggers_s": 0.05, "grace_s": 0.1}


@pytest.fixture
def fleet(make_fleet: MakeFleet, store: str | None) -> Fleet:
    made = make_fleet(store=store, settings={"worker": QUICK})
    set_quality(made, 0.3)
    return made


def set_quality(fleet: Fleet, quality: float) -> None:
    a_profile(fleet.root, options={"quality": quality, "steps": 2}, campaign=EAGER, **MIX)


def talk(fleet: Fleet, first: int, num: int = 60) -> None:
    for number in range(first, first + num):
        turns = [("user", f"What is {number} plus one?"), ("assistant", f"One more than {number} is {number + 1}.")]
        fleet.client.experiences.add(PROFILE, [{"role": role, "content": text} for role, text in turns])


def automatic(fleet: Fleet) -> list[Run]:
    """Oldest first."""
    with fleet.database.read() as tx:
        return [run for run in reversed(runs.listing(tx, limit=1000)) if run.automatic]


def reserved(fleet: Fleet) -> int:
    with fleet.database.read() as tx:
        is_reserved = tables.experiences.c.state == "reserved"
        return int(tx.conn.execute(sa.select(sa.func.count()).where(is_reserved)).scalar_one())


def due(client: Client, campaign_id: str) -> RoundStatus:
    session = client._session
    return round_status(session.database, session.workspace, client.campaigns.show(campaign_id))


def scheduler(client: Client, name: str, lease_s: float = 30.0) -> Scheduler:
    return Scheduler(client._session.database, client.workspace, name, lease_s)


def at_once(*actions: Any) -> list[Any]:
    """Each in a thread, begun together; what they returned or raised."""
    barrier, outcomes = threading.Barrier(len(actions)), [None] * len(actions)

    def act(place: int) -> None:
        barrier.wait()
        try:
            outcomes[place] = actions[place]()
        except Exception as error:
            outcomes[place] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=act, args=(place,)) for place in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_two_schedulers_at_once_open_one_round(fleet: Fleet) -> None:
    fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    with Client(fleet.root) as other:
        two = scheduler(fleet.client, "wk-one"), scheduler(other, "wk-two")
        opened = at_once(*(each.open_due for each in two))
        assert sorted(map(len, opened)) == [0, 1], opened
        assert [each.open_due() for each in two] == [[], []], "the round has not ended"
    [run] = automatic(fleet)
    assert run.created_by in ("wk-one", "wk-two")


def test_store_refuses_the_second_round_even_if_both_hold_the_lease(fleet: Fleet) -> None:
    """As if the lease did not exist: both have decided before either has opened."""
    campaign = fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0, num=200)
    with Client(fleet.root) as other:
        opening = [
            partial(open_round, client._session.database, client.workspace, due(client, campaign.id), actor="wk-x")
            for client in (fleet.client, other)
        ]
        outcomes = at_once(*opening)
    [refused] = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(refused, Refused), refused
    [run] = automatic(fleet)
    with fleet.database.read() as tx:
        mine = tables.experiences.c.dataset_id == run.dataset_id
        num = int(tx.conn.execute(sa.select(sa.func.count()).where(mine)).scalar_one())
    assert reserved(fleet) == num, "what the loser had reserved is free again"


def test_scheduler_suspended_past_its_lease_opens_nothing(fleet: Fleet) -> None:
    campaign = fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    status = due(fleet.client, campaign.id)
    assert status.decision.opens
    lease = take(fleet.database, "wk-sleeper", 0.2)
    assert lease is not None
    time.sleep(0.3)  # suspended: nobody renews it
    fence = partial(scheduler_leases.require, lease=lease)
    with pytest.raises(LeaseLost, match="the lease of the scheduler ran out"):
        open_round(fleet.database, fleet.client.workspace, status, actor="wk-sleeper", fence=fence)
    assert automatic(fleet) == [], "nobody else holds the lease, and still it may not"
    assert reserved(fleet) == 0
    [run_id] = scheduler(fleet.client, "wk-next").open_due()
    talk(fleet, 1000)
    with pytest.raises(LeaseLost):
        open_round(fleet.database, fleet.client.workspace, status, actor="wk-sleeper", fence=fence)
    assert [run.id for run in automatic(fleet)] == [run_id]


def test_what_preparing_would_take_out_is_no_new_data_and_why_not_says_so(fleet: Fleet) -> None:
    campaign = fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    assert due(fleet.client, campaign.id).decision.opens
    limits = {"screens": ["template_limit"], "limits": {"max_per_template": 5}, "heldout_share": 0.3}
    a_profile(fleet.root, options={"quality": 0.3, "steps": 2}, campaign=EAGER, data=limits, **MIX)
    decision = due(fleet.client, campaign.id).decision
    [told] = [each for each in decision.why_not if each.startswith("minimum new")]
    assert "none of the 5 examples is held out" in told, told
    assert scheduler(fleet.client, "wk-one").open_due() == []
    assert reserved(fleet) == 0


STOPS_AS_IT_OPENS = """
import os, signal, sys
from tunesmith.client import Client
from tunesmith.orchestration.rounds import open as opening
from tunesmith.orchestration.rounds.scheduler import Scheduler

submit = opening.submit

def stop_first(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)
    return submit(*args, **kwargs)

opening.submit = stop_first
with Client(sys.argv[1]) as client:
    print(Scheduler(client._session.database, client.workspace, "wk-sleeper", 0.5).open_due())
"""


def test_scheduler_process_stopped_past_its_lease_opens_nothing_when_it_wakes(fleet: Fleet) -> None:
    """SIGSTOP, after it has decided and before it opens; another opens the round meanwhile."""
    fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    command = [sys.executable, "-c", STOPS_AS_IT_OPENS, str(fleet.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sleeper:
        wait_for(lambda: process_state(sleeper.pid) == "T", 60.0, "for the scheduler to stop")
        opened = wait_for(lambda: scheduler(fleet.client, "wk-next").open_due() or None)
        talk(fleet, 1000)
        os.kill(sleeper.pid, signal.SIGCONT)
        out, err = sleeper.communicate(timeout=60)
    assert (sleeper.returncode, out.strip()) == (0, "[]"), err
    [run] = automatic(fleet)
    assert ([run.id], run.created_by) == (opened, "wk-next")
    with fleet.database.read() as tx:
        mine = tables.experiences.c.dataset_id == run.dataset_id
        num = int(tx.conn.execute(sa.select(sa.func.count()).where(mine)).scalar_one())
    assert reserved(fleet) == num, "what the sleeper had reserved is free again"


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def take(database: Database, holder: str, lease_s: float) -> scheduler_leases.SchedulerLease | None:
    with database.write() as tx:
        return scheduler_leases.take(tx, NAME, holder, lease_s)


def test_lease_goes_to_one_and_to_the_next_when_its_holder_is_gone(fleet: Fleet) -> None:
    assert (
        len([one for one in at_once(*[partial(take, fleet.database, f"wk-{n}", 30.0) for n in range(4)]) if one]) == 1
    )
    with fleet.database.write() as tx:
        tx.run(tables.scheduler_leases.delete())
    first = take(fleet.database, "wk-one", 0.2)
    assert first is not None
    assert take(fleet.database, "wk-two", 30.0) is None
    with fleet.database.write() as tx:
        renewed = scheduler_leases.take(tx, NAME, "wk-one", 0.2, first)
        assert renewed is not None
        scheduler_leases.renew(tx, renewed, 0.2)
    time.sleep(0.3)
    second = take(fleet.database, "wk-two", 30.0)
    assert second is not None
    with fleet.database.write() as tx:
        scheduler_leases.release(tx, renewed)  # no longer its own: nothing happens
        scheduler_leases.require(tx, second)
        with pytest.raises(LeaseLost):
            scheduler_leases.renew(tx, renewed, 30.0)
        scheduler_leases.release(tx, second)
    assert take(fleet.database, "wk-three", 30.0) is not None


def test_dataset_that_cannot_be_written_stops_no_worker(fleet: Fleet) -> None:
    fleet.client.campaigns.create(PROFILE)
    run_id = fleet.submit()
    talk(fleet, 0)
    folder = fleet.client.workspace.datasets_dir
    folder.rename(folder.with_name("kept"))
    folder.write_text("in the way")
    one = scheduler(fleet.client, "wk-one")
    assert one.open_due() == []
    one.leave()
    folder.unlink()
    folder.with_name("kept").rename(folder)
    assert reserved(fleet) == 0
    fleet.work()
    assert fleet.state(run_id) == "deployed"
    assert automatic(fleet), "the next look opens it"


@pytest.mark.parametrize("change", ["pause", "estop", "archive"])
def test_round_is_not_opened_if_somebody_stopped_it_while_it_was_assembled(fleet: Fleet, change: str) -> None:
    campaign = fleet.client.campaigns.create(PROFILE)
    talk(fleet, 0)
    status = due(fleet.client, campaign.id)
    if change == "estop":
        fleet.client.system.estop(True, "a drill")
    else:
        getattr(fleet.client.campaigns, change)(campaign.id)
    with pytest.raises(Refused, match="opens no round any more"):
        open_round(fleet.database, fleet.client.workspace, status, actor="wk-one")
    assert automatic(fleet) == []
    assert reserved(fleet) == 0
