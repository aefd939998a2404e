"""What a person can do about a run that is held: the same words in `inbox`, `run show` and `run watch`."""

from __future__ import annotations

from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.gate import missing_evidence
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.runs.queries.runs import Run
from tunesmith.store.database import Tx


def next_step(tx: Tx, run: Run) -> str:
    """The command that settles a held run; where it cannot be approved, why not."""
    adapter = adapters.of_run(tx, run.id)
    if adapter is None:
        return f"`tunesmith run cancel {run.id}`"
    if adapter.state is not AdapterState.CANDIDATE and run.spec.deploys is None:
        return (
            f"it is {adapter.state}: `tunesmith adapter reject {adapter.name}`, "
            f"then `tunesmith adapter deploy {adapter.name}` to try again"
        )
    evaluation = evaluations.latest(tx, run.id)
    if evaluation is not None and missing_evidence(evaluation.judged, run.spec.gate, run.spec.evaluation.metrics):
        return (
            f"without evidence it cannot be approved: `tunesmith adapter evaluate {adapter.name}` measures it again, "
            f"or `reject` it; `tunesmith adapter deploy {adapter.name} --force --reason …` puts it live all the same"
        )
    return f"`tunesmith adapter approve {adapter.name}`, or `evaluate` or `reject` it"
