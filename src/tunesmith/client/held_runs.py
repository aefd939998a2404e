"""What a person can do about a run that is held: the same words in `inbox`, `run show` and `run watch`."""

from __future__ import annotations

from tunesmith.evaluation.listings import HeldRun
from tunesmith.models.rules import AdapterState


def next_step(run: HeldRun) -> str:
    """The command that settles a held run; where it cannot be approved, why not."""
    name = run.adapter
    if name is None:
        return f"`tunesmith run cancel {run.id}`"
    if run.adapter_state is not AdapterState.CANDIDATE and not run.deploys_again:
        return (
            f"it is {run.adapter_state}: `tunesmith adapter reject {name}`, "
            f"then `tunesmith adapter deploy {name}` to try again"
        )
    if run.lacks_evidence:
        return (
            f"without evidence it cannot be approved: `tunesmith adapter evaluate {name}` measures it again, "
            f"or `reject` it; `tunesmith adapter deploy {name} --force --reason …` puts it live all the same"
        )
    return f"`tunesmith adapter approve {name}`, or `evaluate` or `reject` it"
