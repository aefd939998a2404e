"""Workers are killed at any moment of a campaign's rounds: each is opened once, from the right start, and ends."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from itertools import takewhile
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_profile, wait_for
from tunesmith.experience.queries import members
from tunesmith.runs.queries import rounds as queries
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RUN

EAGER: dict[str, Any] = {
    "window": "00:00-24:00",
    "cooldown_h": 0.0,
    "rejection_cooldown_h": 0.0,
    "triggers": {"new_data": {"count": 40}},
}
MIX = {"experience": {"mix": {"min_new": 10, "min_eval_examples": 0}}}
QUICK = {"lease_s": 0.8, "heartbeat_s": 0.2, "sweep_s": 0.1, "poll_s": 0.02, "triggers_s": 0.1, "grace_s": 0.2}

LASTS = {"script": "stall", "fail_attempts": 1, "eval_script": "wait"}


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    return make_fleet(settings={"worker": QUICK})


def set_profile(fleet: Fleet, quality: float, *, lasts: bool = False, **campaign: Any) -> None:
    """Training and evaluation either end by themselves, or last until their first attempt is killed."""
    options = {"quality": quality, "steps": 8, "step_s": 0.05, **(LASTS if lasts else {})}
    a_profile(fleet.root, options=options, campaign={**EAGER, **campaign}, **MIX)


def talk(fleet: Fleet, first: int, num: int = 60) -> None:
    lines = []
    for number in range(first, first + num):
        turns = [("user", f"What is {number} plus one?"), ("assistant", f"One more than {number} is {number + 1}.")]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    source = fleet.root / f"talk-{first}.jsonl"
    source.write_text("\n".join(lines))
    fleet.client.experiences.import_files(PROFILE, [source])


def runs_of(fleet: Fleet, campaign_id: str) -> list[Run]:
    """Oldest first."""
    with fleet.database.read() as tx:
        return queries.of_campaign(tx, campaign_id, 1000)[::-1]


def kill_at(fleet: Fleet, campaign_id: str, number: int, kind: str | None = None) -> None:
    """Kill a worker once the run with that number is open, or once it has begun a task of the kind, which lasts."""
    worker = fleet.start()

    def reached() -> bool:
        runs = runs_of(fleet, campaign_id)
        return len(runs) > number and (kind is None or bool(fleet.attempts(runs[number].id, kind)))

    try:
        wait_for(reached, 60, f"for run {number} to begin its task {kind}")
    finally:
        worker.kill()
        worker.wait()


def check(fleet: Fleet, campaign_id: str) -> None:
    """Nothing is stacked, reserved for nobody, or learnt by a run that brought nothing."""
    runs = {run.id: run for run in runs_of(fleet, campaign_id)}
    assert all(run.state in RUN.finished for run in runs.values())
    with fleet.database.read() as tx:
        rows = tx.all(sa.select(tables.experiences))
        live = tx.all(sa.select(tables.adapters.c.digest).where(tables.adapters.c.state == "live"))
        datasets = {run.dataset_id: {m.experience_id for m in members.of_dataset(tx, run.dataset_id) if m.is_new}
                    for run in runs.values()}  # fmt: skip
    assert {row["state"] for row in rows} <= {"collected", "consumed"}
    for row in rows:
        if row["state"] == "consumed":
            assert runs[row["run_id"]].state == "deployed"
            assert row["id"] in datasets[row["dataset_id"]]
    assert fleet.served() == (live[0]["digest"] if live else None)


def test_round_from_both_starts_survives_kills_at_every_stage(fleet: Fleet) -> None:
    set_profile(fleet, 0.3, start="both")
    campaign = fleet.client.campaigns.create(PROFILE).id
    talk(fleet, 0)
    wait_for_end(fleet, campaign, 1)
    set_profile(fleet, 0.5, lasts=True, start="both")
    talk(fleet, 1000)
    for number in (1, 2):
        for kind in (None, "train", "evaluate"):
            kill_at(fleet, campaign, number, kind)
    wait_for_end(fleet, campaign, 3)
    runs = runs_of(fleet, campaign)
    told = [(run.state, run.spec.metadata["start_point"], run.spec.metadata.get("half")) for run in runs]
    assert told == [("deployed", "base", None), ("deployed", "support@v1", "1"), ("rejected", "base", "2")]
    assert runs[2].spec.metadata["first_half"] == runs[1].id
    check(fleet, campaign)
    counters = fleet.client.campaigns.show(campaign).counters
    assert (counters.num_rejections, counters.failures) == (0, ())


def wait_for_end(fleet: Fleet, campaign_id: str, num: int) -> None:
    """Let a worker that nobody kills bring so many runs to their end, and look whether it opens more."""
    worker = fleet.start()

    def ended() -> bool:
        runs = runs_of(fleet, campaign_id)
        return len(runs) >= num and all(run.state in RUN.finished for run in runs)

    wait_for(ended, 60, f"for {num} runs: {[(run.state, run.reason) for run in runs_of(fleet, campaign_id)]}")
    worker.terminate()
    worker.wait(20)
    assert len(runs_of(fleet, campaign_id)) == num


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_many_rounds_with_random_kills_follow_the_policy(fleet: Fleet, seed: int) -> None:
    rng = random.Random(seed)
    set_profile(fleet, 0.1)
    campaign = fleet.client.campaigns.create(PROFILE).id
    quality = 0.1
    for number in range(10):
        is_good = number == 0 or rng.random() < 0.6
        quality += 0.08 if is_good else 0.0
        set_profile(fleet, quality if is_good else -0.5)
        talk(fleet, 1000 * number)
        for _ in range(rng.randrange(3)):
            worker = fleet.start()
            time.sleep(rng.uniform(0.1, 1.5))
            worker.kill()
            worker.wait()
        work_on(fleet, campaign, number + 1)
        check(fleet, campaign)
    starts = [(run.spec.start is None, run.state == "rejected") for run in runs_of(fleet, campaign)]
    for place, (from_base, _) in enumerate(starts[1:], start=1):
        since = list(takewhile(lambda each: not each[0], reversed(starts[:place])))
        should = len(since) >= 4 or (len(since) >= 2 and since[0][1] and since[1][1])
        should = should or (len(since) >= 3 and all(each[1] for each in since[:3]))
        assert from_base == should, f"round {place}: {starts}"
    assert Counter(run.state for run in runs_of(fleet, campaign)).keys() <= {"deployed", "rejected"}


def work_on(fleet: Fleet, campaign_id: str, num: int) -> None:
    """Until there are so many runs and all have ended; rejected data may make another one of its own accord."""
    while len(runs_of(fleet, campaign_id)) < num or unfinished(fleet, campaign_id):
        worker = fleet.start()

        def ended() -> bool:
            return len(runs_of(fleet, campaign_id)) >= num and not unfinished(fleet, campaign_id)

        wait_for(ended, 120, f"for run {num}: {[run.state for run in runs_of(fleet, campaign_id)]}")
        worker.terminate()
        worker.wait(20)


def unfinished(fleet: Fleet, campaign_id: str) -> bool:
    return any(run.state not in RUN.finished for run in runs_of(fleet, campaign_id))
