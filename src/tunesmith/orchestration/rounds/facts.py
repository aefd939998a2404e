"""The facts that decide about a campaign's next round, read from the store and the profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from zoneinfo import ZoneInfo

from tunesmith.core.errors import StoreError, TunesmithError
from tunesmith.curriculum.queries import spends
from tunesmith.experience.assemble import kind_of, next_choice
from tunesmith.experience.queries.candidates import serving_history
from tunesmith.experience.queries.new_data import live_quality, new_data
from tunesmith.models import queries as adapters
from tunesmith.models.rules import version_name
from tunesmith.orchestration.check import check
from tunesmith.orchestration.rounds.rules import Cost, NextDataset, RoundDecision, RoundFacts, decide, undecidable
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.sections.campaign import CampaignBudget, CampaignPolicy
from tunesmith.profiles.sections.curriculum import MILLIONTHS
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import rounds, switches
from tunesmith.store.database import Database, Tx
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
        data = next_dataset(database, workspace, checked) if look_at_data is None else look_at_data(checked, facts)
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
    return RoundFacts(
        replace(about, now=tx.now, last_round_at=rounds.last_opened_at(tx, campaign.id)),
        state=now.state,
        counters=now.counters,
        is_stopped=switches.is_on(tx, switches.ESTOP),
        unfinished=None if unfinished is None else f"{unfinished[0]} is {unfinished[1]}",
        spent=spent,
        most=most,
    )


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


def next_dataset(database: Database, workspace: Workspace, checked: CheckedProfile) -> NextDataset:
    """What would be assembled now; reads the text of every candidate, and changes nothing."""
    report, short = next_choice(database, workspace, checked)
    return NextDataset(
        num_new=report.num_new,
        min_new=checked.profile.experience.mix.min_new,
        num_held_out=None if short is None else short.num,
        min_held_out=checked.profile.gate.min_cases,
        refusal=report.refusal,
    )


def _checked(
    database: Database, workspace: Workspace, profile: str, environ: Mapping[str, str] | None
) -> tuple[CheckedProfile | None, str | None]:
    try:
        return check(database, workspace, profile, environ=environ)[0], None
    except StoreError:
        raise
    except TunesmithError as error:
        return None, error.message
