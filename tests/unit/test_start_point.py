"""Where the next round starts: properties over any order of ends and settings, and the reason in words."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.orchestration.rounds.start_point import (
    FILES,
    MIN_GAIN,
    FirstHalf,
    NamedVersion,
    PastRound,
    StartFacts,
    StartPoint,
    looks_back,
    next_start,
)
from tunesmith.profiles.sections.campaign import CampaignPolicy

LIVE = NamedVersion("support@v7", "ad-7")
ENDS = ("better", "tied", "rejected")
CAUSES = {"rejections": "refresh_after_rejections", "plateau": "refresh_after_plateau", "every": "refresh_every"}


def a_round(end: str = "better", **changes: Any) -> PastRound:
    gain = {"better": 0.2, "tied": MIN_GAIN / 2, "rejected": -0.1}[end]
    return PastRound("run-1", is_rejected=end == "rejected", gain=gain, **changes)


def start(past: tuple[PastRound, ...] = (), **settings: Any) -> StartPoint:
    return next_start(CampaignPolicy(**settings), StartFacts(live=LIVE, has_learnt=True, past=past))


rounds = st.builds(
    PastRound,
    st.just("run-x"),
    is_refresh=st.booleans(),
    is_rejected=st.booleans(),
    gain=st.none() | st.floats(-1.0, 1.0),
)
limits = st.none() | st.integers(1, 6)
policies = st.builds(
    CampaignPolicy,
    start=st.sampled_from(["live", "base", "both", "v3", "support@v3"]),
    refresh_every=limits,
    refresh_after_rejections=limits,
    refresh_after_plateau=limits,
)
versions = st.builds(NamedVersion, st.just("support@v3"), id=st.sampled_from([None, "ad-3"]), is_revoked=st.booleans())
situations = st.builds(
    StartFacts,
    live=st.sampled_from([None, LIVE]),
    has_learnt=st.booleans(),
    from_files=st.booleans(),
    past=st.lists(rounds, max_size=8).map(tuple),
    named=st.none() | versions,
    first_half=st.sampled_from([None, None, FirstHalf("run-1", "rejected")]),
)


def causes(policy: CampaignPolicy, past: tuple[PastRound, ...]) -> set[str]:
    """Written another way than the code: by counting from the newest round on, one at a time."""
    found, num, rejected, tied = set(), 0, 0, 0
    still_rejected = still_tied = True
    for each in past:
        if each.is_refresh:
            break
        num += 1
        still_rejected &= each.is_rejected
        rejected += still_rejected
        still_tied &= each.is_rejected or (each.gain is not None and each.gain < MIN_GAIN)
        tied += still_tied
    if policy.refresh_after_rejections and rejected >= policy.refresh_after_rejections:
        found.add("rejections")
    if policy.refresh_after_plateau and tied >= policy.refresh_after_plateau:
        found.add("plateau")
    if policy.refresh_every and num >= policy.refresh_every - 1:
        found.add("every")
    return found


@given(policies, situations)
def test_any_facts_have_one_start_and_its_reason_names_the_true_cause(
    policy: CampaignPolicy, facts: StartFacts
) -> None:
    found = next_start(policy, facts)
    named = {cause for cause, key in CAUSES.items() if f"campaign.{key})" in found.reason}
    if policy.start in ("base", "both") or (facts.live is None and policy.start == "live"):
        assert named == set(), "no refresh is the cause where it starts from base anyway, or from both"
    elif facts.from_files:
        assert found.point != "base" or facts.live is None, "what was learnt from files would be lost"
        assert (FILES in found.reason) == (bool(causes(policy, facts.past)) and policy.start == "live")
    else:
        assert named == causes(policy, facts.past)
        assert bool(named) == (found.point == "base") or facts.live is None
    assert found.reason
    assert next_start(policy, facts) == found, "the same facts, the same start"
    for number in re.findall(r"\b(\d+) rounds\b", found.reason):
        assert int(number) <= len(facts.past)


@given(policies, situations)
def test_a_revoked_or_missing_version_is_never_a_start(policy: CampaignPolicy, facts: StartFacts) -> None:
    found = next_start(policy, facts)
    known = {version.id: version for version in (facts.live, facts.named) if version is not None}
    if found.version_id is None:
        assert found.name == "base"
        return
    assert found.name == known[found.version_id].name
    assert not known[found.version_id].is_revoked
    assert not found.is_accumulated, "what is accumulated is for a training from the bare base"


@given(policies, situations)
def test_from_base_everything_is_learnt_again_unless_nothing_ever_was(
    policy: CampaignPolicy, facts: StartFacts
) -> None:
    found = next_start(policy, facts)
    if found.version_id is None:
        assert found.is_accumulated or not facts.has_learnt


@given(policies, situations)
def test_looking_back_further_changes_nothing(policy: CampaignPolicy, facts: StartFacts) -> None:
    shorter = replace(facts, past=facts.past[: looks_back(policy)])
    assert replace(next_start(policy, facts), reason="") == replace(next_start(policy, shorter), reason="")


@given(st.lists(st.sampled_from(ENDS), min_size=12, max_size=40), st.sampled_from([2, 3, 5]))
def test_played_from_the_start_no_run_of_rounds_is_longer_than_refresh_every(ends: list[str], every: int) -> None:
    """Any order of ends: a refresh comes after at most so many rounds, and at once after two rejections in a row."""
    policy = CampaignPolicy(refresh_every=every)
    past: list[PastRound] = []  # the newest first
    for end in ends:
        found = next_start(policy, StartFacts(live=LIVE, has_learnt=True, past=tuple(past[: looks_back(policy)])))
        since = list(takewhile(lambda each: not each.is_refresh, past))
        if len(since) >= 2 and all(each.is_rejected for each in since[:2]):
            assert (found.point, "were rejected" in found.reason) == ("base", True)
        if found.point != "base":
            assert len(since) < every - 1
            assert not (len(since) >= 3 and all(each.gained_nothing for each in since[:3]))
        past.insert(0, a_round(end, is_refresh=found.point == "base"))


@pytest.mark.parametrize(
    ("past", "settings", "expected"),
    [
        ((), {}, "support@v7: campaign.start is live"),
        (("better",) * 3, {}, "support@v7: campaign.start is live"),
        (("better",) * 4, {}, "base: 4 rounds since the last one from base, and one in 5 starts there (campaign.re"),
        (("better",) * 30, {"refresh_every": None}, "support@v7: campaign.start is live"),
        (("rejected",), {}, "support@v7: campaign.start is live"),
        (("rejected", "better", "rejected"), {}, "support@v7: campaign.start is live"),
        (("rejected", "rejected"), {}, "base: the last 2 rounds were rejected (campaign.refresh_after_rejections)"),
        (("rejected", "rejected"), {"refresh_after_rejections": None}, "support@v7: campaign.start is live"),
        (("tied", "rejected", "tied"), {}, "base: each of the last 3 rounds gained less than 1% (campaign.refresh"),
        (("tied", "tied", "better"), {}, "support@v7: campaign.start is live"),
        (("rejected",), {"refresh_after_rejections": 1}, "base: the last round was rejected"),
        ((), {"start": "base"}, "base: campaign.start is base"),
        ((), {"start": "both"}, "support@v7: campaign.start is both: first from what is live, then from base"),
        ((), {"start": "v3"}, "support@v7: campaign.start is v3, of which there is none; so from what is live"),
    ],
)
def test_each_reason_by_itself(past: tuple[str, ...], settings: dict[str, Any], expected: str) -> None:
    found = start(tuple(map(a_round, past)), **settings)
    assert f"{found.name}: {found.reason}".startswith(expected)


def test_a_rejected_refresh_is_not_repeated_at_once() -> None:
    """It would train the same data from the same point."""
    refreshed = a_round("rejected", is_refresh=True)
    assert start((refreshed, a_round("rejected"), a_round("rejected"))).point == "live"
    assert start((a_round("rejected"), a_round("rejected"), refreshed)).point == "base"


def test_no_refresh_where_files_were_learnt_and_that_is_said() -> None:
    facts = StartFacts(live=LIVE, has_learnt=True, from_files=True, past=(a_round("rejected"), a_round("rejected")))
    found = next_start(CampaignPolicy(), facts)
    assert found.name == "support@v7"
    assert found.reason == (
        "campaign.start is live, and not from base (the last 2 rounds were rejected "
        "(campaign.refresh_after_rejections)): what was learnt from files is not among the accumulated data"
    )
    assert next_start(CampaignPolicy(start="base"), facts).name == "base", "whoever says so has chosen it"


def test_named_version_is_the_start_until_it_is_revoked() -> None:
    policy = CampaignPolicy(start="v3")
    facts = StartFacts(live=LIVE, named=NamedVersion("support@v3", "ad-3"))
    assert next_start(policy, facts).version_id == "ad-3"
    revoked = replace(facts, named=NamedVersion("support@v3", "ad-3", is_revoked=True))
    found = next_start(policy, revoked)
    assert (found.name, found.version_id) == ("support@v7", "ad-7")
    assert "support@v3, which is revoked" in found.reason


def test_both_starts_are_two_halves_and_one_where_nothing_is_live() -> None:
    policy = CampaignPolicy(start="both")
    first = next_start(policy, StartFacts(live=LIVE))
    assert (first.half, first.name, first.is_accumulated) == (1, "support@v7", False)
    second = next_start(policy, StartFacts(live=LIVE, first_half=FirstHalf("run-a", "deployed")))
    assert (second.half, second.first_half, second.name, second.is_accumulated) == (2, "run-a", "base", True)
    assert next_start(policy, StartFacts()).half is None, "both starts are the bare base"
