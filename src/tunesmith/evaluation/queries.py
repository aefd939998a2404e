"""Evaluations: what was measured, what it is bound to, and the verdict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tunesmith.core.ids import new_id
from tunesmith.evaluation.rules.gate import Judged
from tunesmith.evaluation.tables import evaluations
from tunesmith.store import events
from tunesmith.store.database import Tx


@dataclass(frozen=True)
class Evaluation:
    id: str
    run_id: str
    adapter_id: str
    baseline_adapter_id: str | None
    judged: Judged
    scores_path: str
    created_at: datetime


def add(
    tx: Tx,
    judged: Judged,
    *,
    run_id: str,
    adapter_id: str,
    baseline_adapter_id: str | None,
    scores_path: str,
    actor: str,
) -> str:
    evaluation_id = new_id("ev")
    verdict = judged.verdict
    tx.run(
        evaluations.insert().values(
            id=evaluation_id,
            run_id=run_id,
            adapter_id=adapter_id,
            baseline_adapter_id=baseline_adapter_id,
            judged=judged.model_dump(mode="json"),
            scores_path=scores_path,
            created_at=tx.now,
        )
    )
    detail = {"evaluation": evaluation_id, "decision": verdict.decision}
    events.record(tx, "run", run_id, "judged", actor=actor, reason="; ".join(verdict.reasons), detail=detail)
    return evaluation_id


def latest(tx: Tx, run_id: str) -> Evaluation | None:
    return _newest(tx, evaluations.c.run_id == run_id)


def latest_of_adapter(tx: Tx, adapter_id: str) -> Evaluation | None:
    """Of whichever run: the one that made it, or one that deploys it again."""
    return _newest(tx, evaluations.c.adapter_id == adapter_id)


def stored_judged(tx: Tx, run_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """The newest evaluation of each run, by run id, as it was stored: an older schema need not be readable."""
    newest = sa.select(sa.func.max(evaluations.c.seq)).where(evaluations.c.run_id.in_(sorted(run_ids)))
    query = sa.select(evaluations.c.run_id, evaluations.c.judged)
    rows = tx.all(query.where(evaluations.c.seq.in_(newest.group_by(evaluations.c.run_id)))) if run_ids else []
    return {row["run_id"]: row["judged"] for row in rows}


def _newest(tx: Tx, chosen: sa.ColumnElement[bool]) -> Evaluation | None:
    row = tx.first(sa.select(evaluations).where(chosen).order_by(evaluations.c.seq.desc()).limit(1))
    if row is None:
        return None
    fields = {key: value for key, value in row.items() if key != "seq"}
    return Evaluation(**{**fields, "judged": Judged.model_validate(row["judged"])})
