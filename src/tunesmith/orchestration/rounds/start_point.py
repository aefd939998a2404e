"""Where a campaign's next round starts, with the reason in words: from what is live, from the bare base, or from a
named version. Pure.

A round from what is live learns what is new and forgets a little of the old each time. So a round starts from the bare
base on the accumulated data, every so often, and where rounds from elsewhere bring nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from tunesmith.profiles.sections.campaign import BASE, BOTH, LIVE, CampaignPolicy

MIN_GAIN = 0.01
"""A round that made the gate's metric better by less than this share of it has gained nothing."""

FILES = "what was learnt from files is not among the accumulated data"


@dataclass(frozen=True)
class PastRound:
    """A round of the campaign that has ended with a result: deployed, completed, rejected or rolled back."""

    run_id: str
    is_refresh: bool = False
    """It was opened by the campaign and started from the bare base."""
    is_rejected: bool = False
    """Rejected or rolled back."""
    gain: float | None = None
    """Of the gate's metric, as a share of what it was; positive is better. None: not measured."""

    @property
    def gained_nothing(self) -> bool:
        return self.is_rejected or (self.gain is not None and self.gain < MIN_GAIN)


@dataclass(frozen=True)
class NamedVersion:
    """The version that `campaign.start` names."""

    name: str
    id: str | None = None
    """None: there is no such version of the profile."""
    is_revoked: bool = False


@dataclass(frozen=True)
class FirstHalf:
    """The first of the two runs of a round with `campaign.start: both`; it has ended with a result."""

    run_id: str
    state: str


@dataclass(frozen=True)
class StartFacts:
    """Everything that the start point depends on, apart from settings."""

    live: NamedVersion | None = None
    """None: the bare base is live."""
    has_learnt: bool = False
    """Some experience was learnt before, by a version that was deployed or completed."""
    from_files: bool = False
    """Some version that went live had learnt from files, which are not among the accumulated data."""
    past: tuple[PastRound, ...] = ()
    """The newest first; as many as the settings look back."""
    named: NamedVersion | None = None
    first_half: FirstHalf | None = None
    """The campaign's last round, if its second half is not opened yet."""


@dataclass(frozen=True)
class StartPoint:
    """Where a round starts, and why."""

    point: Literal["live", "base", "version"]
    name: str
    """`base`, or the version's, e.g. support@v3."""
    reason: str
    version_id: str | None = None
    """None: the bare base."""
    is_accumulated: bool = False
    """It learns from everything that was ever learnt, and what is new; else from what is new, with replay."""
    half: Literal[1, 2] | None = None
    """Of a round that is trained from both starts."""
    first_half: str | None = None
    """Of a second half: the run that was the first."""


def next_start(policy: CampaignPolicy, facts: StartFacts) -> StartPoint:
    """The start point of the next round; any facts have one."""
    start = policy.start
    if start == BOTH and facts.first_half is not None:
        return _second_half(facts.first_half)
    if start == BASE:
        return _from_base("campaign.start is base")
    if facts.live is None and start in (LIVE, BOTH):
        told = "nothing is live but the bare base"
        return _from_base(told) if facts.has_learnt else StartPoint("live", BASE, told)
    if start == BOTH:
        return _from_live(facts, "campaign.start is both: first from what is live, then from base", half=1)
    reasons = _refresh_reasons(policy, facts.past)
    if reasons and not facts.from_files:
        return _from_base("; ".join(reasons))
    if start == LIVE:
        kept = f", and not from base ({'; '.join(reasons)}): {FILES}" if reasons else ""
        return _from_live(facts, f"campaign.start is live{kept}")
    return _from_named(start, facts)


def _refresh_reasons(policy: CampaignPolicy, past: tuple[PastRound, ...]) -> list[str]:
    """Why the next round starts from base though `campaign.start` says otherwise; empty: it does not.

    Rounds before the last one from base count no more: to start from there once more, on nearly the same data, would
    bring the same.
    """
    since = list(takewhile(lambda each: not each.is_refresh, past))
    num_rejected = sum(1 for _ in takewhile(lambda each: each.is_rejected, since))
    num_in_vain = sum(1 for _ in takewhile(lambda each: each.gained_nothing, since))
    found = []
    if policy.refresh_after_rejections is not None and num_rejected >= policy.refresh_after_rejections:
        told = "the last round was" if num_rejected == 1 else f"the last {num_rejected} rounds were"
        found.append(f"{told} rejected (campaign.refresh_after_rejections)")
    if policy.refresh_after_plateau is not None and num_in_vain >= policy.refresh_after_plateau:
        told = "the last round" if num_in_vain == 1 else f"each of the last {num_in_vain} rounds"
        found.append(f"{told} gained less than {MIN_GAIN:.0%} (campaign.refresh_after_plateau)")
    if policy.refresh_every is not None and len(since) + 1 >= policy.refresh_every:
        told = f"{len(since)} rounds since the last one from base, and one in {policy.refresh_every} starts there"
        found.append(f"{told} (campaign.refresh_every)")
    return found


def looks_back(policy: CampaignPolicy) -> int:
    """How many past rounds the settings can depend on."""
    wanted = (policy.refresh_every, policy.refresh_after_rejections, policy.refresh_after_plateau)
    return max((each for each in wanted if each is not None), default=0)


def _from_base(reason: str) -> StartPoint:
    return StartPoint("base", BASE, reason, is_accumulated=True)


def _from_live(facts: StartFacts, reason: str, half: Literal[1] | None = None) -> StartPoint:
    if facts.live is None:
        told = f"{reason}, and nothing is live but the bare base"
        return _from_base(told) if facts.has_learnt else StartPoint("live", BASE, told)
    return StartPoint("live", facts.live.name, reason, facts.live.id, half=half)


def _from_named(start: str, facts: StartFacts) -> StartPoint:
    """A version that no target may load is no start for another one either."""
    named = facts.named
    if named is None or named.id is None:
        return _from_live(facts, f"campaign.start is {start}, of which there is none; so from what is live")
    if named.is_revoked:
        return _from_live(facts, f"campaign.start is {named.name}, which is revoked; so from what is live")
    return StartPoint("version", named.name, f"campaign.start is {named.name}", named.id)


def _second_half(first: FirstHalf) -> StartPoint:
    reason = f"campaign.start is both: {first.run_id}, from what was live, is {first.state}; now from base"
    return StartPoint("base", BASE, reason, is_accumulated=True, half=2, first_half=first.run_id)
