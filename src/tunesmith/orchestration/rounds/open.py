"""Open a round: submit a run on what was captured, as a person would, if it may still be opened at that moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from tunesmith.core.errors import Refused
from tunesmith.orchestration.rounds.facts import RoundStatus, accumulated_of, guard_facts, round_status
from tunesmith.orchestration.rounds.rules import NextDataset, decide
from tunesmith.orchestration.rounds.start_point import StartPoint
from tunesmith.orchestration.submit import Submission, Submitted, submit
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import rounds
from tunesmith.runs.spec import RunSpec
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

OPENED = "round_opened"
"""The event of a campaign; its detail holds every condition at that moment."""
Fence = Callable[[Tx], None]


def open_round(
    database: Database,
    workspace: Workspace,
    status: RoundStatus,
    *,
    actor: str,
    environ: Mapping[str, str] | None = None,
    fence: Fence | None = None,
) -> Submitted:
    """Assemble and submit. Raises Refused if a condition stopped holding, and whatever `fence` raises.

    Both are looked at in the transaction that queues the run, where the store refuses a second unfinished one, too.
    """
    campaign, policy, profile, facts = status.campaign, status.policy, status.profile, status.facts
    if policy is None or profile is None or facts is None or not status.decision.opens:
        raise Refused(f"campaign {campaign.name} opens no round now: {'; '.join(status.decision.why_not)}")
    start, data = facts.start, facts.data
    assert start is not None, "a round that is opened starts somewhere"
    assert data is not None, "a round is opened on what was looked at"

    def may_open(tx: Tx, spec: RunSpec) -> None:
        if fence is not None:
            fence(tx)
        now = guard_facts(tx, profile, campaign, facts.about)
        decision = decide(policy, replace(now, data=facts.data, asked_by=facts.asked_by))
        if spec.campaign_id != campaign.id or not decision.opens:
            why = "; ".join(decision.why_not) or "another campaign of the profile took its place"
            raise Refused(f"campaign {campaign.name} opens no round any more: {why}")
        if now.start is None or replace(now.start, reason="") != replace(start, reason=""):
            raise Refused(f"campaign {campaign.name} opens no round from {start.name} any more; look again")
        detail = {
            "run": spec.run_id,
            "conditions": [asdict(each) for each in (*decision.guards, *decision.triggers)],
            "start": asdict(start),
            "method": data.method_reason,
        }
        events.record(tx, "campaign", campaign.id, OPENED, actor=actor, reason=decision.because, detail=detail)

    submission = Submission(
        campaign.profile,
        start="base" if start.version_id is None else "live",
        version_id=start.version_id,
        kind=data.kind,
        accumulated=accumulated_of(profile.campaign, start),
        metadata={"opened_by": status.decision.because, **_told(start, data)},
        may_open=may_open,
    )
    return submit(database, workspace, submission, actor=actor, environ=environ)


def _told(start: StartPoint, data: NextDataset) -> dict[str, str]:
    """What the next round, and whoever looks at this one, must know of it."""
    told = {rounds.START: start.name, rounds.START_REASON: start.reason, rounds.METHOD_REASON: data.method_reason}
    if start.half is not None:
        told[rounds.HALF] = str(start.half)
    if start.first_half is not None:
        told[rounds.FIRST_HALF] = start.first_half
    return told


def open_asked(
    database: Database,
    workspace: Workspace,
    campaign: Campaign,
    *,
    actor: str,
    environ: Mapping[str, str] | None = None,
) -> Submitted:
    """Open a round because a person asks: window, cooldowns, breaker and triggers are ignored, nothing else is."""
    status = round_status(database, workspace, campaign, asked_by=actor, environ=environ)
    return open_round(database, workspace, status, actor=actor, environ=environ)
