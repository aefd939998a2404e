"""Whether a round is opened: properties over any facts, the clock's oddities, and each trigger by itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.orchestration.rounds.rules import ASKED, Cost, NextDataset, RoundFacts, decide, undecidable
from tunesmith.orchestration.rounds.start_point import StartPoint
from tunesmith.profiles.rules.campaign import (
    BREAKER_COOLDOWN,
    FAILURES_FORGOTTEN_AFTER,
    FAILURES_TO_OPEN,
    CampaignState,
    Counters,
    after_end,
)
from tunesmith.profiles.sections.campaign import CampaignPolicy
from tunesmith.runs.rules.run import RUN, DataEffect, RunState, effect_of_end
from tunesmith.triggers.base import LiveQuality, NewData, TriggerFacts
from tunesmith.triggers.cron import next_after

NOW = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
ALWAYS = {"window": "00:00-24:00", "cooldown_h": 0.0, "rejection_cooldown_h": 0.0}
NEVER_WAIVED = {"campaign", "profile", "emergency stop", "unfinished round", "minimum new"}


def about(now: datetime = NOW, zone: str = "UTC", **changes: Any) -> TriggerFacts:
    fields: dict[str, Any] = {"active_since": now - timedelta(days=5), "new": NewData(500, 250.0, now), **changes}
    return TriggerFacts(now=now, zone=ZoneInfo(zone), **fields)


def facts(now: datetime = NOW, zone: str = "UTC", **changes: Any) -> RoundFacts:
    """Facts under which a round is opened, unless they are changed."""
    data = NextDataset(num_new=80, min_new=50, num_held_out=60, min_held_out=50)
    return replace(RoundFacts(about(now, zone), data=data), **changes)


instants = st.datetimes(datetime(2024, 1, 1), datetime(2028, 12, 31), timezones=st.just(UTC))
zones = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"])
minutes = st.integers(0, 24 * 60 - 1)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int]:
    begin = draw(minutes)
    end = draw(minutes.filter(lambda at: at != begin))
    return begin, end


def as_text(window: tuple[int, int]) -> str:
    return "-".join(f"{at // 60:02}:{at % 60:02}" for at in window)


FROM_LIVE = StartPoint("live", "support@v1", "campaign.start is live", "ad-1")
SECOND = StartPoint("base", "base", "campaign.start is both", is_accumulated=True, half=2, first_half="run-first")
costs = st.floats(0.0, 20.0, allow_nan=False)


@st.composite
def situations(draw: st.DrawFn) -> tuple[CampaignPolicy, RoundFacts, tuple[int, int]]:
    now, zone, window = draw(instants), draw(zones), draw(windows())
    near = st.timedeltas(timedelta(days=-10), timedelta(days=10))  # also in the future: clocks were set back
    policy = CampaignPolicy(
        triggers={
            "new_data": {"count": draw(st.integers(1, 300))},
            "age": draw(st.sampled_from([None, {"days": 1.0}, {"days": 3.0, "of": "round"}])),
            "cron": draw(st.sampled_from([None, {"at": "0 3 * * *"}, {"at": "30 2 29 2 *"}])),
        },
        window=as_text(window),
        time_zone=zone,
        cooldown_h=draw(st.floats(0, 48)),
        rejection_cooldown_h=draw(st.floats(0, 48)),
        budget={
            "gpu_hours": draw(st.none() | costs),
            "money": draw(st.none() | costs),
            "gpu_hour_price": 1.0,
        },  # type: ignore[arg-type]
    )
    failures = sorted(now - each for each in draw(st.lists(near, max_size=5)))
    rejected = draw(st.none() | near)
    last = draw(st.none() | near)
    num = draw(st.integers(0, 400))
    seen = RoundFacts(
        TriggerFacts(
            now,
            now - draw(st.timedeltas(timedelta(0), timedelta(days=400))),
            ZoneInfo(zone),
            last_round_at=None if last is None else now - last,
            new=NewData(num, num / 2, now - draw(near) if num else None),
        ),
        state=draw(st.sampled_from(CampaignState)),
        counters=Counters(tuple(failures), last_rejected_at=None if rejected is None else now - rejected),
        profile_problem=draw(st.sampled_from([None, None, "is disabled"])),
        is_stopped=draw(st.booleans()),
        unfinished=draw(st.sampled_from([None, None, "run-x is held"])),
        spent=Cost(draw(costs), draw(costs)),
        most=Cost(draw(costs), draw(costs)),
        data=NextDataset(draw(st.integers(0, 100)), 50, draw(st.integers(0, 100)), 50),
        asked_by=draw(st.sampled_from([None, None, None, "user:ada"])),
        start=draw(st.sampled_from([None, FROM_LIVE, SECOND])),
    )
    return policy, seen, window


@given(situations())
def test_second_half_waives_cooldowns_and_triggers_and_nothing_else(
    situation: tuple[CampaignPolicy, RoundFacts, tuple[int, int]],
) -> None:
    policy, seen, _ = situation
    seen = replace(seen, asked_by=None)
    plain, second = (decide(policy, replace(seen, start=start)) for start in (FROM_LIVE, SECOND))
    blocking = {each.name for each in plain.guards if each.blocks}
    assert {each.name for each in second.guards if each.blocks} == blocking - {"cooldown", "cooldown after a rejection"}
    assert second.opens == (not any(each.blocks for each in second.guards))
    assert "second half: run-first has ended" in second.because


def is_inside(window: tuple[int, int], local: datetime) -> bool:
    """Written another way than the code: minute by minute."""
    begin, end = window
    at, length = local.hour * 60 + local.minute, (end - begin) % (24 * 60)
    return (at - begin) % (24 * 60) < length


@given(situations())
def test_what_must_never_be_is_never_opened(situation: tuple[CampaignPolicy, RoundFacts, tuple[int, int]]) -> None:
    policy, seen, window = situation
    decision = decide(policy, seen)
    budget, now = policy.budget, seen.now
    if not decision.opens:
        return
    assert seen.state is CampaignState.ACTIVE
    assert seen.unfinished is None
    assert not seen.is_stopped
    assert seen.profile_problem is None
    assert seen.data is not None
    assert seen.data.num_new >= seen.data.min_new
    assert budget.gpu_hours is None or seen.spent.gpu_hours + seen.most.gpu_hours <= budget.gpu_hours + 1e-6
    assert budget.money is None or seen.spent.money + seen.most.money <= budget.money + 1e-6
    if seen.asked_by is not None:
        return
    assert is_inside(window, now.astimezone(ZoneInfo(policy.time_zone)))
    last, rejected = seen.about.last_round_at, seen.counters.last_rejected_at
    if not seen.is_second_half:
        assert last is None or abs(now - last) >= timedelta(hours=policy.cooldown_h)
        assert rejected is None or abs(now - rejected) >= timedelta(hours=policy.rejection_cooldown_h)
    recent = [at for at in seen.counters.failures if now - at < FAILURES_FORGOTTEN_AFTER]
    assert len(recent) < FAILURES_TO_OPEN or abs(now - recent[-1]) >= BREAKER_COOLDOWN


@given(situations())
def test_why_not_names_the_true_reason_and_nothing_else(
    situation: tuple[CampaignPolicy, RoundFacts, tuple[int, int]],
) -> None:
    """Mending exactly what is named opens the round; leaving out any one of it does not."""
    policy, seen, _ = situation
    decision = decide(policy, seen)
    assert decision.opens == (decision.why_not == [])
    named = {each.name for each in decision.guards if each.blocks}
    assert {line.partition(":")[0] for line in decision.why_not if not line.startswith("no trigger")} == named
    wants_trigger = any(line.startswith("no trigger") for line in decision.why_not)
    assert wants_trigger == (not any(each.holds for each in decision.triggers))
    mended = _mended(policy, seen, named, wants_trigger)
    assert decide(*mended).opens, decide(*mended).why_not
    for left in named:
        assert not decide(*_mended(policy, seen, named - {left}, wants_trigger)).opens


def _mended(policy: CampaignPolicy, seen: RoundFacts, named: set[str], wants_trigger: bool) -> Any:
    """Settings and facts in which what is named is as it should be."""
    data = seen.data
    assert data is not None
    counters, policy_changes, budget_changes = seen.counters, {}, {}
    changes: dict[str, Any] = {}
    for name in named:
        match name:
            case "campaign":
                changes["state"] = CampaignState.ACTIVE
            case "profile":
                changes["profile_problem"] = None
            case "emergency stop":
                changes["is_stopped"] = False
            case "unfinished round":
                changes["unfinished"] = None
            case "budget, GPU hours":
                budget_changes["gpu_hours"] = None
            case "budget, money":
                budget_changes["money"] = None
            case "minimum new":
                data = replace(data, num_new=data.min_new)
            case "held-out cases":
                data = replace(data, num_held_out=data.min_held_out)
            case "window":
                policy_changes["window"] = "00:00-24:00"
            case "cooldown":
                policy_changes["cooldown_h"] = 0.0
            case "cooldown after a rejection":
                counters = replace(counters, last_rejected_at=None)
            case "breaker":
                counters = replace(counters, failures=())
            case _:
                raise AssertionError(name)
    if wants_trigger:
        changes["about"] = replace(seen.about, new=NewData(1000, 500.0, seen.now))
    budget = policy.budget.model_copy(update=budget_changes)
    policy = policy.model_copy(update={**policy_changes, "budget": budget})
    return policy, replace(seen, data=data, counters=counters, **changes)


@given(situations())
def test_a_person_waives_the_moment_and_nothing_that_must_never_be(
    situation: tuple[CampaignPolicy, RoundFacts, tuple[int, int]],
) -> None:
    policy, seen, _ = situation
    alone, asked = decide(policy, replace(seen, asked_by=None)), decide(policy, replace(seen, asked_by="user:ada"))
    assert {each.name for each in asked.guards} == {each.name for each in alone.guards}
    for before, after in zip(alone.guards, asked.guards, strict=True):
        assert (before.value, before.threshold, before.holds) == (after.value, after.threshold, after.holds)
        never = before.name in NEVER_WAIVED or before.name.startswith("budget")
        assert after.waived == (not after.holds and not never)
    assert asked.triggers[-1].name == ASKED
    assert asked.opens or not alone.opens


steps = st.lists(
    st.one_of(
        st.tuples(st.just("clock"), st.floats(-12, 72)),  # hours; a clock may be set back
        st.tuples(st.just("data"), st.integers(1, 150)),
        st.tuples(st.just("end"), st.sampled_from([state.value for state in sorted(RUN.finished)])),
        st.tuples(st.just("cost"), st.floats(0.0, 1.0)),  # share of the most it can cost
        st.tuples(st.just("pause"), st.booleans()),
        st.tuples(st.just("estop"), st.booleans()),
        st.tuples(st.just("ask"), st.just(True)),
    ),
    max_size=60,
)


@given(steps, windows(), st.floats(0.5, 6.0), st.floats(0.0, 24.0))
def test_in_any_order_of_events_no_rule_is_ever_broken(
    story: list[tuple[str, Any]], window: tuple[int, int], limit: float, cooldown_h: float
) -> None:
    """A campaign through data, clocks, ends, pauses and spending; after each event a scheduler looks."""
    policy = CampaignPolicy(window=as_text(window), cooldown_h=cooldown_h, budget={"gpu_hours": limit})  # type: ignore[arg-type]
    most, now, num, spent, share = Cost(0.5), NOW, 0, Cost(), 1.0
    counters, state, stopped, running, last = Counters(), CampaignState.ACTIVE, False, False, None
    for what, value in story:
        match what:
            case "clock":
                now += timedelta(hours=value)
            case "data":
                num += value
            case "cost":
                share = value
            case "pause":
                state = CampaignState.PAUSED if value else CampaignState.ACTIVE
            case "estop":
                stopped = value
            case "end" if running:
                running, effect = False, effect_of_end(RunState(value))
                spent += Cost(share * most.gpu_hours)
                counters = after_end(counters, effect.counters, now)
                num = 0 if effect.data is DataEffect.CONSUME else num
        seen = RoundFacts(
            TriggerFacts(now, NOW, last_round_at=last, new=NewData(num, num / 2, now if num else None)),
            state=state,
            counters=counters,
            is_stopped=stopped,
            unfinished="run-x is training" if running else None,
            spent=spent + (most if running else Cost()),
            most=most,
            data=NextDataset(num, 50, None, 50),
            asked_by="user:ada" if what == "ask" else None,
        )
        decision = decide(policy, seen)
        assert decision.opens == (not decision.why_not)
        if not decision.opens:
            continue
        assert not running, "two unfinished rounds"
        assert not stopped
        assert state is CampaignState.ACTIVE
        assert num >= 50
        if what != "ask":
            assert num >= 100
            assert is_inside(window, now)
            assert last is None or abs(now - last) >= timedelta(hours=cooldown_h)
            failures = [at for at in counters.failures if now - at < FAILURES_FORGOTTEN_AFTER]
            assert len(failures) < FAILURES_TO_OPEN or abs(now - failures[-1]) >= BREAKER_COOLDOWN
        running, last = True, now
        assert spent.gpu_hours + most.gpu_hours <= limit + 1e-6, "past the budget"


def test_every_condition_is_told_with_value_and_threshold() -> None:
    decision = decide(CampaignPolicy(), facts())
    assert decision.opens
    assert [each.name for each in decision.guards] == [
        "campaign",
        "profile",
        "emergency stop",
        "unfinished round",
        "minimum new",
        "window",
        "cooldown",
        "cooldown after a rejection",
        "breaker",
        "held-out cases",
    ]
    assert [each.name for each in decision.triggers] == ["new_data", "age", "quality"]
    assert all(each.value and each.threshold for each in (*decision.guards, *decision.triggers))
    assert decision.because == "new_data: 500 new experiences (≥ 100)"


def test_profile_that_cannot_be_read_is_the_reason() -> None:
    [line, none] = undecidable(CampaignState.ACTIVE, "profile support is gone").why_not
    assert line == "profile: profile support is gone; wanted: takes runs"
    assert none.startswith("no trigger holds")


@pytest.mark.parametrize(
    ("at", "window", "zone", "expected"),
    [
        ("2026-11-16T01:59", "02:00-06:00", "UTC", False),
        ("2026-11-16T02:00", "02:00-06:00", "UTC", True),
        ("2026-11-16T05:59", "02:00-06:00", "UTC", True),
        ("2026-11-16T06:00", "02:00-06:00", "UTC", False),
        ("2026-11-16T23:59", "22:00-04:00", "UTC", True),  # over midnight
        ("2026-11-17T00:00", "22:00-04:00", "UTC", True),
        ("2026-11-17T04:00", "22:00-04:00", "UTC", False),
        ("2028-02-29T03:00", "02:00-06:00", "UTC", True),  # a leap day
        ("2026-11-17T00:30", "00:00-01:00", "Europe/Berlin", False),
        ("2026-11-15T23:30", "00:00-01:00", "Europe/Berlin", True),  # the next day there
        # Berlin, 29 March 2026: 01:00 UTC is 03:00, 02:00-03:00 does not exist
        ("2026-03-29T00:59", "02:00-03:00", "Europe/Berlin", False),
        ("2026-03-29T01:00", "02:00-03:00", "Europe/Berlin", False),
        ("2026-03-29T01:00", "03:00-04:00", "Europe/Berlin", True),
        # Berlin, 25 October 2026: 02:00-03:00 comes twice, 00:00 and 01:00 UTC
        ("2026-10-25T00:30", "02:00-03:00", "Europe/Berlin", True),
        ("2026-10-25T01:30", "02:00-03:00", "Europe/Berlin", True),
        ("2026-10-25T02:30", "02:00-03:00", "Europe/Berlin", False),
    ],
)
def test_window_is_in_the_time_of_its_zone(at: str, window: str, zone: str, expected: bool) -> None:
    now = datetime.fromisoformat(at).replace(tzinfo=UTC)
    policy = CampaignPolicy(window=window, time_zone=zone)
    assert decide(policy, facts(now, zone)).opens is expected


def test_an_hour_that_comes_twice_opens_one_round() -> None:
    policy = CampaignPolicy(window="02:00-03:00", time_zone="Europe/Berlin")
    first, again = (datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1))
    seen = facts(again, "Europe/Berlin", about=about(again, "Europe/Berlin", last_round_at=first))
    assert [line.partition(":")[0] for line in decide(policy, seen).why_not] == ["cooldown"]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("2026-03-28T12:00", "2026-03-29T01:00"),  # 02:30 does not exist on the 29th: at the first moment after
        ("2026-03-29T01:00", "2026-03-30T00:30"),
        ("2026-10-24T12:00", "2026-10-25T00:30"),  # 02:30 comes twice: the first counts
        ("2026-10-25T00:30", "2026-10-26T01:30"),
    ],
)
def test_schedule_over_the_change_of_clocks_comes_once_a_day(after: str, expected: str) -> None:
    moment = datetime.fromisoformat(after).replace(tzinfo=UTC)
    assert next_after("30 2 * * *", moment, ZoneInfo("Europe/Berlin")).isoformat() == f"{expected}:00+00:00"


def test_schedule_on_a_leap_day_waits_for_one() -> None:
    due = next_after("0 3 29 2 *", datetime(2026, 11, 16, tzinfo=UTC), ZoneInfo("UTC"))
    assert due == datetime(2028, 2, 29, 3, tzinfo=UTC)


def scheduled(now: datetime, **changes: Any) -> bool:
    policy = CampaignPolicy(triggers={"cron": {"at": "0 3 * * sun"}}, **ALWAYS)
    return decide(policy, facts(now, about=about(now, new=NewData(), **changes))).opens


def test_schedule_that_was_missed_is_caught_up_once() -> None:
    """Sunday, 15 November 2026, 03:00; the machine was off until Tuesday."""
    tuesday = datetime(2026, 11, 17, 9, tzinfo=UTC)
    assert scheduled(tuesday, active_since=datetime(2026, 11, 10, tzinfo=UTC))
    assert not scheduled(tuesday + timedelta(hours=1), last_round_at=tuesday)
    assert not scheduled(tuesday, active_since=datetime(2026, 11, 16, tzinfo=UTC)), "it was resumed after Sunday"


def test_clock_that_was_set_back_repeats_no_schedule_and_blocks_nothing_for_long() -> None:
    sunday = datetime(2026, 11, 15, 3, 1, tzinfo=UTC)
    back = sunday - timedelta(hours=2)
    assert not scheduled(back, last_round_at=sunday, active_since=back - timedelta(days=30))
    policy = CampaignPolicy(window="00:00-24:00")
    near, far = facts(back, about=about(back, last_round_at=sunday)), facts(back)
    far = replace(far, about=about(back, last_round_at=sunday + timedelta(days=400)))
    assert [line.partition(":")[0] for line in decide(policy, near).why_not] == ["cooldown"]
    assert decide(policy, far).opens, "a round of a clock that was a year ahead"


def test_failures_of_a_clock_that_was_far_ahead_leave_the_breaker_half_open() -> None:
    ahead = (NOW + timedelta(days=300),) * 3
    assert decide(CampaignPolicy(), facts(counters=Counters(failures=ahead))).opens
    lately = (NOW + timedelta(hours=1),) * 3
    assert not decide(CampaignPolicy(), facts(counters=Counters(failures=lately))).opens


@pytest.mark.parametrize(
    ("settings", "seen", "expected"),
    [
        ({"new_data": {"count": 100}}, {"new": NewData(99, 99.0, NOW)}, False),
        ({"new_data": {"count": 100}}, {"new": NewData(100, 50.0, NOW)}, True),
        ({"new_data": {"count": 60, "weighted": True}}, {"new": NewData(100, 50.0, NOW)}, False),
        ({"new_data": {"count": 50, "weighted": True}}, {"new": NewData(100, 50.0, NOW)}, True),
        ({"age": {}}, {"new": NewData(1, 1.0, NOW - timedelta(days=30))}, True),
        ({"age": {}}, {"new": NewData(1, 1.0, NOW - timedelta(days=29.9))}, False),
        ({"age": {}}, {"new": NewData(), "active_since": NOW - timedelta(days=90)}, False),
        ({"age": {"of": "round"}}, {"new": NewData(), "active_since": NOW - timedelta(days=31)}, True),
        ({"age": {"of": "round"}}, {"last_round_at": NOW - timedelta(days=2)}, False),
        ({"quality": {}}, {"quality": LiveQuality(0.8, (0.72, 0.7))}, True),
        ({"quality": {}}, {"quality": LiveQuality(0.8, (0.75, 0.6))}, False),  # one bad audit may be chance
        ({"quality": {}}, {"quality": LiveQuality(0.8, (0.6,))}, False),
        ({"quality": {}}, {"quality": LiveQuality(None, ())}, False),
        ({"quality": {}}, {"quality": LiveQuality(0.0, (0.0, 0.0))}, False),  # cannot get worse
        ({"quality": {"audits": 3}}, {"quality": LiveQuality(0.8, (0.9, 0.5, 0.5))}, False),
        ({}, {}, False),
        ({"new_data": None}, {}, False),
    ],
)
def test_each_trigger_by_itself(settings: dict[str, Any], seen: dict[str, Any], expected: bool) -> None:
    policy = CampaignPolicy(triggers=settings, **ALWAYS)
    assert decide(policy, facts(about=about(**seen))).opens is expected
