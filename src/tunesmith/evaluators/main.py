"""Entry point of our evaluators: ``python -m tunesmith.evaluators.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import sys

from tunesmith.domain.program import Result
from tunesmith.evaluators import sim
from tunesmith.programs.host import Program, host


def evaluate(program: Program) -> Result:
    """Adapters of the sim trainer are scored by its script, all others by the model."""
    if sim.is_simulated(program.evaluate_spec):
        return sim.evaluate(program)
    from tunesmith.evaluators import held_out

    return held_out.evaluate(program)


if __name__ == "__main__":
    sys.exit(host(evaluate))
