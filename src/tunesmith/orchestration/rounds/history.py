"""What the rounds of a campaign have learnt from, scored and cost, and what the next one can be expected to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any

from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.comparison import Comparison
from tunesmith.models import queries as adapters
from tunesmith.orchestration.rounds.open import OPENED
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.sections.campaign import BASE
from tunesmith.runs.queries import rounds
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.store import events
from tunesmith.store.database import Tx

_WITHOUT_RESULT = frozenset({RunState.CANCELLED, RunState.SKIPPED, RunState.VALIDATED})


@dataclass(frozen=True)
class Round:
    """One run of a campaign."""

    run_id: str
    opened_at: datetime
    opened_by: str
    """The triggers that held, or the person who submitted it."""
    is_automatic: bool
    start: str
    """What it started from: `base`, or a version, e.g. support@v3."""
    start_reason: str
    """Why there; empty where a person has chosen it."""
    half: int | None
    """1 or 2, of a round that was trained from both starts."""
    method: str
    method_reason: str
    learnt_from: dict[str, int]
    """Examples to train on: by role where they were assembled from experiences, else their number."""
    metric: str
    """The primary one of the gate."""
    before: float | None
    """Of what was live, on the same cases; None: not measured."""
    after: float | None
    gain: float | None
    """Their difference, positive if better."""
    gpu_hours: float
    money: float
    state: RunState
    reason: str
    version: str | None
    """The adapter version it made."""


@dataclass(frozen=True)
class Expectation:
    """What the next round may bring, from those that have ended."""

    num_rounds: int
    """How many it is taken from; 0: nothing is known."""
    gpu_hours: float | None
    money: float | None
    gain: float | None
    metric: str | None
    num_live: int
    """How many of them went live or completed."""


def history(tx: Tx, campaign: Campaign, price: float, limit: int) -> list[Round]:
    """The campaign's rounds, the newest first; `price` is that of a GPU hour."""
    why = {
        event.detail["run"]: event.reason
        for event in events.of_entity(tx, "campaign", campaign.id)
        if event.action == OPENED
    }
    used = rounds.use_of_device(tx, campaign.id)
    return [
        _round(tx, run, why.get(run.id) or run.created_by, used[run.id].seconds / 3600, price)
        for run in rounds.of_campaign(tx, campaign.id, limit)
    ]


def expectation(earlier: Sequence[Round]) -> Expectation:
    """Means over the rounds that came to a result."""
    ended = [each for each in earlier if each.state in RUN.finished - _WITHOUT_RESULT]
    gains = [each.gain for each in ended if each.gain is not None]
    return Expectation(
        num_rounds=len(ended),
        gpu_hours=fmean(each.gpu_hours for each in ended) if ended else None,
        money=fmean(each.money for each in ended) if ended else None,
        gain=fmean(gains) if gains else None,
        metric=ended[0].metric if ended else None,
        num_live=sum(each.state in (RunState.DEPLOYED, RunState.COMPLETED) for each in ended),
    )


def _round(tx: Tx, run: Run, opened_by: str, gpu_hours: float, price: float) -> Round:
    primary = _primary(tx, run)
    adapter = adapters.of_run(tx, run.id)
    told = run.spec.metadata if run.automatic else {}
    return Round(
        run_id=run.id,
        opened_at=run.created_at,
        opened_by=opened_by,
        is_automatic=run.automatic,
        start=BASE if run.spec.start is None else adapters.get(tx, run.spec.start.id).name,
        start_reason=told.get(rounds.START_REASON, ""),
        half=int(told[rounds.HALF]) if rounds.HALF in told else None,
        method=run.spec.method.value,
        method_reason=told.get(rounds.METHOD_REASON, ""),
        learnt_from=_learnt_from(tx, run),
        metric=run.spec.gate.primary,
        before=None if primary is None else primary.baseline,
        after=None if primary is None else primary.candidate,
        gain=None if primary is None else primary.difference,
        gpu_hours=gpu_hours,
        money=gpu_hours * price,
        state=run.state,
        reason=run.reason,
        version=None if adapter is None else adapter.name,
    )


def _primary(tx: Tx, run: Run) -> Comparison | None:
    found = evaluations.latest(tx, run.id)
    return None if found is None else found.judged.report.of(run.spec.gate.primary)


def _learnt_from(tx: Tx, run: Run) -> dict[str, int]:
    for event in events.of_entity(tx, "dataset", run.dataset_id):
        roles: dict[str, Any] = event.detail.get("roles", {}) if event.action == "assembled" else {}
        if roles:
            return {role: int(num) for role, num in roles.items() if num}
    return {"train": run.spec.dataset.num_train}
