"""Ask a target about the prompts of the evaluation, and compare: it must read and write as the trainer's stack did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import ProgramError
from tunesmith.deployment.rules.parity import Parity, Tolerance, compare
from tunesmith.deployment.serving_targets import ServingTarget, served_adapter
from tunesmith.deployment.targets.base import ServedAdapter, Target
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.queries import Evaluation
from tunesmith.models.queries import Adapter
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.readings import References
from tunesmith.programs.result_check import read_references
from tunesmith.programs.stage import StageContext

_ANYTHING = ({"role": "user", "content": "hello"},)


@dataclass(frozen=True)
class ParityProbe:
    """The result of a parity check; `parity` is None if the target cannot be probed."""

    refusal: str | None = None
    parity: Parity | None = None
    tolerance: Tolerance | None = None

    @property
    def told(self) -> str:
        """For the history: how close the target is, and what is allowed."""
        if self.parity is None or self.tolerance is None:
            return "cannot be asked"
        apart = self.parity.max_difference
        shown = "tells no log-probabilities" if apart is None else f"{apart:.2g} apart"
        return f"{shown}, {self.tolerance.log_prob:g} allowed ({self.tolerance.why})"

    @property
    def numbers(self) -> dict[str, Any]:
        if self.parity is None or self.tolerance is None:
            return {"asked": False}
        return {
            "asked": True,
            "num_prompts": self.parity.num_prompts,
            "num_tokens": self.parity.num_tokens,
            "max_difference": self.parity.max_difference,
            "tolerance": self.tolerance.log_prob,
            "why": self.tolerance.why,
        }


def references_of(workspace: Workspace, evaluation: Evaluation | None) -> References | None:
    """What the evaluation wrote down; None where it did not, or where that is gone or altered."""
    digest = None if evaluation is None else evaluation.judged.evidence.references
    if evaluation is None or digest is None:
        return None
    try:
        return read_references((workspace.data_dir / Path(evaluation.scores_path)).parent, digest)
    except ProgramError:
        return None


def probe(target: Target, serving: ServingTarget, served: ServedAdapter, references: References | None) -> ParityProbe:
    """Check whether the target answers with the loaded adapter as the evaluation did. Raises TargetError."""
    if references is None or references.adapter != served.digest:
        if target.probe(served, [_ANYTHING], 1) is None:
            return ParityProbe()
        return ParityProbe("there is nothing to compare its answers with: evaluate it again (`adapter evaluate`)")
    prompts = [reading.messages for reading in references.readings]
    readings = target.probe(served, prompts, references.max_tokens)
    if readings is None:
        return ParityProbe()
    tolerance = serving.tolerance(references.dtype)
    parity = compare(references, readings, tolerance.log_prob)
    return ParityProbe(None if parity.is_same else parity.told, parity, tolerance)


def parity_problem_after_reload(
    context: StageContext, live: Adapter, serving: ServingTarget, target: Target
) -> str | None:
    """Return why the live version must not be flipped to again: the target now runs another model or chat template.

    A version that went live before references were stored passes.
    """
    with context.database.read() as tx:
        evaluation = None if live.run_id is None else evaluations.latest(tx, live.run_id)
    references = references_of(context.workspace, evaluation)
    if references is None or references.adapter != live.digest:
        return None
    refusal = probe(target, serving, served_adapter(context.workspace, live), references).refusal
    return None if refusal is None else f"it answers otherwise than it did when it was evaluated: {refusal}"
