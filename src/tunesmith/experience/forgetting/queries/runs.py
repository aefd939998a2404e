"""Runs that learn, or have learnt, from an experience that was forgotten after they were queued."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.core.errors import Refused
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.tables import members
from tunesmith.experience.tables import erasures
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.runs.queries import runs as runs_store
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.tables import runs
from tunesmith.store.database import Tx

LEARNT = (Split.TRAIN, Split.VALIDATION)
"""A held-out example is never learnt, so forgetting it ends no run."""
_SERVED = (RunState.WATCHING,)
"""Its adapter is live already; `experience forget` names it with what to do."""


def why_ended(tx: Tx, run: Run) -> str | None:
    """Why a run may not train or go live: what it learns from was forgotten. None: nothing speaks against it.

    Goes by the dataset's fingerprint and the order of erasures, never by a clock.
    """
    fingerprint = run.spec.dataset.fingerprint
    here = erasures.c.dataset_id == run.dataset_id
    first = sa.select(sa.func.min(erasures.c.seq)).where(here, erasures.c.old_fingerprint == fingerprint)
    learnt = sa.and_(
        members.c.experience_id == erasures.c.experience_id,
        members.c.dataset_id == erasures.c.dataset_id,
        members.c.split.in_(LEARNT),
    )
    query = (
        sa.select(sa.func.count())
        .select_from(erasures.join(members, learnt))
        .where(here, erasures.c.seq >= first.scalar_subquery())
    )
    num = int(tx.conn.execute(query).scalar_one())
    if not num:
        return None
    what = "an experience" if num == 1 else f"{num} experiences"
    return (
        f"{what} in its dataset {run.dataset_id} {'was' if num == 1 else 'were'} forgotten after it was queued; "
        f"`tunesmith run retry {run.id}` trains on what is left"
    )


def refuse_to_serve(tx: Tx, adapter: Adapter) -> None:
    """Before an adapter goes live. Locks its dataset: forgetting happens before the flip, or after it."""
    if adapter.run_id is None:
        return
    run = runs_store.get(tx, adapter.run_id)
    datasets.lock(tx, run.dataset_id)
    why = why_ended(tx, run)
    if why is not None:
        raise Refused(f"{adapter.name} cannot go live: {why}")


def unfinished(tx: Tx, dataset_ids: list[str] | None = None) -> list[tuple[Run, str]]:
    """Unfinished runs that must end, each with the reason; of these datasets, or of all."""
    holding = sa.select(erasures.c.dataset_id) if dataset_ids is None else dataset_ids
    wanted = (runs.c.finished_at.is_(None), runs.c.state.not_in(_SERVED), runs.c.dataset_id.in_(holding))
    found = []
    for row in tx.all(sa.select(runs.c.id).where(*wanted).order_by(runs.c.seq)):
        run = runs_store.get(tx, row["id"])
        why = why_ended(tx, run)
        if why is not None and not _is_live(tx, run):
            found.append((run, why))
    return found


def learning(tx: Tx, dataset_id: str) -> list[str]:
    """Unfinished runs that would end if something they learn from this dataset was forgotten now."""
    wanted = (runs.c.dataset_id == dataset_id, runs.c.finished_at.is_(None), runs.c.state.not_in(_SERVED))
    return [row["id"] for row in tx.all(sa.select(runs.c.id).where(*wanted).order_by(runs.c.seq))]


def _is_live(tx: Tx, run: Run) -> bool:
    """It was flipped before, and its targets are being brought along."""
    adapter = adapters.of_run(tx, run.id) if run.state is RunState.DEPLOYING else None
    return adapter is not None and adapter.state is AdapterState.LIVE
