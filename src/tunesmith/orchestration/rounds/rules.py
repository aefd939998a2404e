"""Whether a campaign opens its next round now: every condition with its value and threshold. Pure.

A round is opened if no guard blocks and at least one trigger holds. Guards are about what must never be (a second
unfinished round, a spent budget, the e-stop) and about when it may be (window, cooldowns, breaker). A person who asks
for a round waives the second kind. The second half of a round from both starts waits for no trigger and no cooldown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tunesmith.curriculum.rules.cycle import in_window
from tunesmith.datasets.report import MixKind
from tunesmith.orchestration.rounds.start_point import StartPoint
from tunesmith.profiles.rules.campaign import (
    BREAKER_COOLDOWN,
    FAILURES_FORGOTTEN_AFTER,
    FAILURES_TO_OPEN,
    Breaker,
    CampaignState,
    Counters,
    breaker,
    is_within,
    recent_failures,
)
from tunesmith.profiles.sections.campaign import CampaignBudget, CampaignPolicy
from tunesmith.triggers.base import Condition, TriggerFacts, days
from tunesmith.triggers.registry import look

ASKED = "request"
"""The trigger of a person who asks for a round."""
SECOND_HALF = "second half"
"""The trigger of a round that is to be trained from both starts, and was from one."""
_TOLERANCE = 1e-9  # sums of hours are not exact


@dataclass(frozen=True)
class Cost:
    """What rounds cost."""

    gpu_hours: float = 0.0
    money: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.gpu_hours + other.gpu_hours, self.money + other.money)


@dataclass(frozen=True)
class NextDataset:
    """What the next round would be made of, if it were assembled now."""

    num_new: int
    """Examples to train on that were never learnt."""
    min_new: int
    num_held_out: int | None
    """Cases to judge it on, with those of earlier rounds; None: enough."""
    min_held_out: int
    refusal: str | None = None
    """Why nothing could be assembled, whatever the numbers."""
    kind: MixKind = "sft"
    method_reason: str = ""
    """Why it would be answers or pairs."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """What would be trained, by role."""
    counts_learnt: bool = False
    """`num_new` counts what was learnt before as well: a second half needs nothing new."""


@dataclass(frozen=True)
class RoundFacts:
    """Everything that the decision depends on, apart from settings."""

    about: TriggerFacts
    state: CampaignState = CampaignState.ACTIVE
    counters: Counters = field(default_factory=Counters)
    profile_problem: str | None = None
    """Why the profile takes no runs: disabled, gone, or wrong in some other way."""
    is_stopped: bool = False
    """The e-stop is on."""
    unfinished: str | None = None
    """The campaign's automatic run that has not ended, and its state."""
    spent: Cost = Cost()
    """By all runs of the campaign; those under way count with the most they can cost."""
    most: Cost = Cost()
    """The most that the next round can cost."""
    data: NextDataset | None = None
    """None: nobody has looked; the decision is then about everything else."""
    asked_by: str | None = None
    """The person who asks for a round now."""
    start: StartPoint | None = None
    """Where the next round starts; None: nobody has looked."""
    last_was_pairs: bool = False
    """The last round that came to a result learnt pairs."""

    @property
    def is_second_half(self) -> bool:
        return self.start is not None and self.start.half == 2

    @property
    def now(self) -> datetime:
        return self.about.now


@dataclass(frozen=True)
class RoundDecision:
    """Whether a round is opened, and why or why not."""

    guards: tuple[Condition, ...]
    triggers: tuple[Condition, ...]

    @property
    def opens(self) -> bool:
        return not any(guard.blocks for guard in self.guards) and any(trigger.holds for trigger in self.triggers)

    @property
    def because(self) -> str:
        """The triggers that hold, in words."""
        return "; ".join(f"{each.name}: {each.value} ({each.threshold})" for each in self.triggers if each.holds)

    @property
    def why_not(self) -> list[str]:
        """Everything that keeps the round from being opened; empty: it is opened."""
        found = [f"{each.name}: {each.value}; wanted: {each.threshold}" for each in self.guards if each.blocks]
        if not any(trigger.holds for trigger in self.triggers):
            told = "; ".join(f"{each.name}: {each.value}, wanted: {each.threshold}" for each in self.triggers)
            found.append(f"no trigger holds ({told or 'campaign.triggers names none'})")
        return found


def decide(policy: CampaignPolicy, facts: RoundFacts) -> RoundDecision:
    """Every guard and every trigger, in the order that people read them."""
    guards = [*_never(policy.budget, facts), *_not_now(policy, facts)]
    triggers = [look(trigger, settings, facts.about) for trigger, settings in policy.wanted]
    if facts.start is not None and facts.is_second_half:
        triggers.append(Condition(SECOND_HALF, f"{facts.start.first_half} has ended", "campaign.start is both", True))
    if facts.asked_by is not None:
        triggers.append(Condition(ASKED, f"asked for by {facts.asked_by}", "a person asks", True))
    return RoundDecision(tuple(guards), tuple(triggers))


def undecidable(state: CampaignState, problem: str) -> RoundDecision:
    """For a profile whose settings cannot be read."""
    return RoundDecision((_state(state), _profile(problem)), ())


def _never(budget: CampaignBudget, facts: RoundFacts) -> Iterator[Condition]:
    """What nobody may waive."""
    yield _state(facts.state)
    yield _profile(facts.profile_problem)
    yield Condition("emergency stop", "on" if facts.is_stopped else "off", "off", not facts.is_stopped)
    unfinished = facts.unfinished
    yield Condition("unfinished round", unfinished or "none", "none", unfinished is None)
    for name, limit, spent, most in (
        ("budget, GPU hours", budget.gpu_hours, facts.spent.gpu_hours, facts.most.gpu_hours),
        ("budget, money", budget.money, facts.spent.money, facts.most.money),
    ):
        if limit is not None:
            value = f"{spent:.4g} spent, and the next round may cost {most:.4g}"
            yield Condition(name, value, f"≤ {limit:g} together", spent + most <= limit + _TOLERANCE)
    data = facts.data
    if data is not None:
        told = f"{data.num_new}{'' if data.counts_learnt else ' new'} examples to train on"
        value = told if data.refusal is None or data.num_new < data.min_new else f"{told}; {data.refusal}"
        is_enough = data.num_new >= data.min_new and data.refusal is None
        yield Condition("minimum new", value, f"≥ {data.min_new} (experience.mix.min_new)", is_enough)


def _not_now(policy: CampaignPolicy, facts: RoundFacts) -> Iterator[Condition]:
    """What waits for a better moment; a person who asks now has chosen the moment."""
    now, asked = facts.now, facts.asked_by is not None

    def condition(name: str, value: str, threshold: str, holds: bool) -> Condition:
        return Condition(name, value, threshold, holds, waived=asked and not holds)

    local = now.astimezone(facts.about.zone)
    yield condition(
        "window", f"{local:%H:%M} {policy.time_zone}", f"{policy.window} {policy.time_zone}",
        in_window(policy.window, local),
    )  # fmt: skip
    for name, hours, at in (
        ("cooldown", policy.cooldown_h, facts.about.last_round_at),
        ("cooldown after a rejection", policy.rejection_cooldown_h, facts.counters.last_rejected_at),
    ):
        span = timedelta(hours=hours)
        is_over = not is_within(span, at, now)
        waived = not is_over and (asked or facts.is_second_half)
        yield Condition(name, _ago(at, now), f"{days(span)} since then", is_over, waived=waived)
    state, recent = breaker(facts.counters, now), recent_failures(facts.counters.failures, now)
    last = f", the last {_ago(recent[-1], now)}" if recent else ""
    yield condition(
        "breaker", f"{state.value.replace('_', '-')}: {len(recent)} failures in {days(FAILURES_FORGOTTEN_AFTER)}{last}",
        f"< {FAILURES_TO_OPEN}, or {days(BREAKER_COOLDOWN)} since the last", state is not Breaker.OPEN,
    )  # fmt: skip
    data = facts.data
    if data is not None:
        num = data.num_held_out
        yield condition(
            "held-out cases", f"{'enough' if num is None else num} to judge the round on",
            f"≥ {data.min_held_out} (gate.min_cases)", num is None or num >= data.min_held_out,
        )  # fmt: skip


def _state(state: CampaignState) -> Condition:
    return Condition("campaign", state.value, CampaignState.ACTIVE.value, state is CampaignState.ACTIVE)


def _profile(problem: str | None) -> Condition:
    return Condition("profile", problem or "takes runs", "takes runs", problem is None)


def _ago(at: datetime | None, now: datetime) -> str:
    if at is None:
        return "never"
    return f"{days(now - at)} ago" if at <= now else f"in {days(at - now)}: a clock was set back"
