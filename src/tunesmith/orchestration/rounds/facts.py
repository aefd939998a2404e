"""The facts that decide about a campaign's next round, read from the store and the profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from zoneinfo import ZoneInfo

from tunesmith.core.errors import DataError, NotFound, Refused, StoreError, TunesmithError
from tunesmith.curriculum.queries import spends
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.report import MemberRole, MixKind, MixReport
from tunesmith.evaluation import queries as evaluations
from tunesmith.experience.assemble import kind_of, next_choice, rehearsed
from tunesmith.experience.queries.candidates import has_learnt, serving_history
from tunesmith.experience.queries.experiences import NotReservable
from tunesmith.experience.queries.new_data import live_quality, new_data
from tunesmith.experience.rules.held_out import Shortage
from tunesmith.experience.rules.mix import Accumulated
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState, version_name
from tunesmith.orchestration.check import check
from tunesmith.orchestration.rounds.method import PAIRWISE, MethodFacts, choose_method
from tunesmith.orchestration.rounds.rules import Cost, NextDataset, RoundDecision, RoundFacts, decide, undecidable
from tunesmith.orchestration.rounds.start_point import (
    FirstHalf,
    NamedVersion,
    PastRound,
    StartFacts,
    StartPoint,
    looks_back,
    next_start,
)
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.profile import Method, Profile
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.sections.campaign import BASE, BOTH, LIVE, CampaignBudget, CampaignPolicy
from tunesmith.profiles.sections.curriculum import MILLIONTHS
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import rounds, switches
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database, Tx
from tunesmith.training.trainers.registry import find_trainer
from tunesmith.triggers.base import TriggerFacts
from tunesmith.triggers.quality import MAX_AUDITS

_HOUR = 3600.0
LookAtData = Callable[[CheckedProfile, RoundFacts], NextDataset | None]


@dataclass(frozen=True)
class RoundStatus:
    """A campaign's next round: what is known, and whether it is opened."""

    campaign: Campaign
    decision: RoundDecision
    facts: RoundFacts | None = None
    """None: the profile's settings cannot be read."""
    policy: CampaignPolicy | None = None
    profile: Profile | None = None


def round_status(
    database: Database,
    workspace: Workspace,
    campaign: Campaign,
    *,
    asked_by: str | None = None,
    environ: Mapping[str, str] | None = None,
    look_at_data: LookAtData | None = None,
) -> RoundStatus:
    """Everything about the next round of a campaign. Reading what it would be made of takes longer the more there is.

    `look_at_data` replaces that reading and is asked only where everything else holds: for a scheduler.
    """
    try:
        overrides = campaign.overrides
        profile = resolve(campaign.profile, workspace=workspace, campaign_overrides=overrides, environ=environ).profile
    except StoreError:
        raise
    except TunesmithError as error:
        return RoundStatus(campaign, undecidable(campaign.state, error.message))
    policy = policy_of(profile, campaign)
    checked, problem = _checked(database, workspace, campaign.profile, environ)
    with database.read() as tx:
        about = trigger_facts(tx, profile, campaign)
        facts = replace(guard_facts(tx, profile, campaign, about), profile_problem=problem, asked_by=asked_by)
    decision = decide(policy, facts)
    if checked is not None and (look_at_data is None or decision.opens):
        look = look_at_data or partial(next_dataset, database, workspace)
        data = look(checked, facts)
        facts = replace(facts, data=data)
        decision = decide(policy, facts)
    return RoundStatus(campaign, decision, facts, policy, profile)


def policy_of(profile: Profile, campaign: Campaign) -> CampaignPolicy:
    """What the profile says, with the budget that the campaign was created with."""
    known = {key: value for key, value in campaign.budget.items() if key in CampaignBudget.model_fields}
    return profile.campaign.model_copy(update={"budget": profile.campaign.budget.model_copy(update=known)})


def trigger_facts(tx: Tx, profile: Profile, campaign: Campaign) -> TriggerFacts:
    """Reads the light columns of what could be learnt, and counts what is live."""
    mix, name = profile.experience.mix, profile.name
    live = adapters.live(tx, name)
    spans = serving_history(tx, name).spans
    since = spans[-1][0] if live is not None and spans else campaign.created_at
    version = version_name(name, live.version) if live is not None else f"{name}@base"
    window = profile.campaign.audit_answers
    return TriggerFacts(
        now=tx.now,
        active_since=campaign.moved_at,
        zone=ZoneInfo(profile.campaign.time_zone),
        last_round_at=rounds.last_opened_at(tx, campaign.id),
        new=new_data(
            tx,
            name,
            trusts_base=mix.unrated_base,
            needs_correction=kind_of("auto", profile.recipe.method) == "preference",
            task_types=mix.task_types,
        ),
        quality=live_quality(tx, name, version, since, window=window, num_audits=MAX_AUDITS),
    )


def guard_facts(tx: Tx, profile: Profile, campaign: Campaign, about: TriggerFacts) -> RoundFacts:
    """What may have changed since a moment ago, cheap enough for the transaction that opens a round."""
    now = campaigns.get(tx, campaign.id)
    unfinished = rounds.unfinished_automatic(tx, campaign.id)
    spent, most = costs(tx, profile, now)
    before = rounds.with_result(tx, campaign.id, 1)
    return RoundFacts(
        replace(about, now=tx.now, last_round_at=rounds.last_opened_at(tx, campaign.id)),
        state=now.state,
        counters=now.counters,
        is_stopped=switches.is_on(tx, switches.ESTOP),
        unfinished=None if unfinished is None else f"{unfinished[0]} is {unfinished[1]}",
        spent=spent,
        most=most,
        start=next_start(profile.campaign, start_facts(tx, profile, campaign)),
        last_was_pairs=any(each.method in PAIRWISE for each in before),
    )


def start_facts(tx: Tx, profile: Profile, campaign: Campaign) -> StartFacts:
    """What decides where the next round starts; all of it follows from runs, versions and evaluations."""
    live, last = adapters.live(tx, profile.name), rounds.last_automatic(tx, campaign.id)
    waits = last is not None and last.metadata.get(rounds.HALF) == "1" and last.state in rounds.WITH_RESULT
    return StartFacts(
        live=None if live is None else NamedVersion(live.name, live.id),
        has_learnt=has_learnt(tx, profile.name),
        from_files=datasets.has_learnt_from_files(tx, profile.name),
        past=tuple(
            PastRound(
                each.run_id,
                is_refresh=each.is_automatic and each.from_base,
                is_rejected=each.state in (RunState.REJECTED, RunState.ROLLED_BACK),
                gain=_gain(tx, each.run_id, profile.gate.primary),
            )
            for each in rounds.with_result(tx, campaign.id, looks_back(profile.campaign))
        ),
        named=_named(tx, profile),
        first_half=FirstHalf(last.run_id, last.state) if last is not None and waits else None,
    )


def _gain(tx: Tx, run_id: str, metric: str) -> float | None:
    """How much better a run made the metric, as a share of what it was."""
    found = evaluations.latest(tx, run_id)
    compared = None if found is None else found.judged.report.of(metric)
    if compared is None or compared.difference is None or compared.baseline is None:
        return None
    if compared.baseline == 0.0:
        return math.inf if compared.difference > 0.0 else 0.0
    return compared.difference / abs(compared.baseline)


def _named(tx: Tx, profile: Profile) -> NamedVersion | None:
    """The version that `campaign.start` names, if it names one."""
    start = profile.campaign.start
    if start in (LIVE, BASE, BOTH):
        return None
    name = start if "@" in start else f"{profile.name}@{start}"
    try:
        adapter = adapters.find(tx, name)
    except NotFound:
        return NamedVersion(name)
    if adapter.profile != profile.name:
        return NamedVersion(name)
    return NamedVersion(name, adapter.id, is_revoked=adapter.state is AdapterState.REVOKED)


def costs(tx: Tx, profile: Profile, campaign: Campaign) -> tuple[Cost, Cost]:
    """What the campaign has cost, with the most that runs under way can; and the most that its next round can.

    A training's time has a limit (budgets.wall_s). An evaluation has none, and is taken to last as long as the longest.
    """
    price = policy_of(profile, campaign).budget.gpu_hour_price or 0.0
    used = rounds.use_of_device(tx, campaign.id).values()
    hours = sum(each.most_s for each in used) / _HOUR
    longest_s = max((each.evaluate_s for each in used), default=0.0)
    most = (profile.budgets.wall_s * profile.hardware.processes + longest_s) / _HOUR
    teachers = spends.spent_since(tx, campaign.profile, campaign.created_at) / MILLIONTHS
    return Cost(hours, hours * price + teachers), Cost(most, most * price)


def next_dataset(database: Database, workspace: Workspace, checked: CheckedProfile, facts: RoundFacts) -> NextDataset:
    """What would be assembled now; reads the text of every candidate and prepares what is chosen, to keep nothing."""
    profile, accumulated = checked.profile, accumulated_of(checked.profile.campaign, facts.start)
    mix, trainer = profile.experience.mix, find_trainer(profile.trainer.kind)
    report, short = next_choice(database, workspace, checked, accumulated=accumulated)
    known = MethodFacts(
        method=profile.recipe.method,
        trainer=trainer.name,
        can_pair=Method.ORPO in trainer.methods,
        is_accumulated=accumulated is not None,
        num_pairs=_num_corrected(database, profile),
        num_others=report.roles[MemberRole.GOLD],
        min_new=mix.min_new,
        last_was_pairs=facts.last_was_pairs,
    )
    chosen = choose_method(known)
    if profile.recipe.method is Method.AUTO and chosen.kind == "preference":  # as it seems: now read them
        pairs, short_of_pairs = next_choice(database, workspace, checked, kind="preference", accumulated=accumulated)
        num_pairs = pairs.num_new if pairs.refusal is None else min(pairs.num_new, mix.min_new - 1)
        chosen = choose_method(replace(known, num_pairs=num_pairs))
        if chosen.kind == "preference":
            report, short = pairs, short_of_pairs
    if report.refusal is None:
        report, short = _as_prepared(database, workspace, checked, chosen.kind, accumulated, (report, short))
    counts_learnt = accumulated is not None and not accumulated.needs_new
    return NextDataset(
        num_new=sum(report.roles.values()) if counts_learnt else report.num_new,
        min_new=mix.min_new,
        num_held_out=None if short is None else short.num,
        min_held_out=profile.gate.min_cases,
        refusal=report.refusal,
        kind=chosen.kind,
        method_reason=chosen.reason,
        roles={role.value: num for role, num in report.roles.items() if num},
        counts_learnt=counts_learnt,
    )


def _as_prepared(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    kind: MixKind,
    accumulated: Accumulated | None,
    chosen: tuple[MixReport, Shortage | None],
) -> tuple[MixReport, Shortage | None]:
    """What is left of a choice when it is prepared: copies and what is too near to a held-out case are taken out."""
    try:
        with rehearsed(database, workspace, checked, kind=kind, accumulated=accumulated) as (_, report, short):
            return report.mix or chosen[0], short
    except NotReservable:  # somebody rated one of them at this moment: the next look will see it
        return chosen
    except (Refused, DataError, OSError) as error:
        return chosen[0].model_copy(update={"refusal": str(error)}), chosen[1]


def accumulated_of(policy: CampaignPolicy, start: StartPoint | None) -> Accumulated | None:
    """What a round from the bare base learns from; None: it starts elsewhere. A second half needs nothing new."""
    if start is None or not start.is_accumulated:
        return None
    return Accumulated(policy.max_accumulated, needs_new=start.half != 2)


def _num_corrected(database: Database, profile: Profile) -> int:
    """New corrected answers, whatever split their prompt is in; cheap."""
    mix = profile.experience.mix
    with database.read() as tx:
        return new_data(
            tx, profile.name, trusts_base=mix.unrated_base, needs_correction=True, task_types=mix.task_types
        ).num


def _checked(
    database: Database, workspace: Workspace, profile: str, environ: Mapping[str, str] | None
) -> tuple[CheckedProfile | None, str | None]:
    try:
        return check(database, workspace, profile, environ=environ)[0], None
    except StoreError:
        raise
    except TunesmithError as error:
        return None, error.message
