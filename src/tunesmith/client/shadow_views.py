"""The part of `run show` that tells how far a candidate has come with mirrored traffic."""

from __future__ import annotations

from tunesmith.client.views import ShadowView
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Tx

_NONE = shadows.Progress(0, 0, 0, 0, 0, None, None, None)


def shadow_of(tx: Tx, run: Run) -> ShadowView | None:
    """None for a run that shadows nothing and never did."""
    found = shadows.progress(tx, run.id) or (_NONE if run.state is RunState.SHADOWING else None)
    if found is None:
        return None
    values = {name: value for name, value in vars(found).items() if name != "first_at"}
    return ShadowView(**values, min_count=run.spec.shadow.min_count, since=found.first_at)
