"""The evaluator program: ``python -m tunesmith.evaluation.evaluators.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import sys

from tunesmith.evaluation.evaluators import sim
from tunesmith.programs.host import Program, host
from tunesmith.programs.protocol import Result


def evaluate(program: Program) -> Result:
    """Adapters of the sim trainer are scored by its script, all others by the model."""
    if sim.is_simulated(program.evaluate_spec):
        return sim.evaluate(program)
    from tunesmith.evaluation.evaluators import held_out

    return held_out.evaluate(program)


if __name__ == "__main__":
    sys.exit(host(evaluate))
