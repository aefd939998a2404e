"""Entry point of a local teacher: ``python -m tunesmith.teachers.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import sys

from tunesmith.domain.program import Result
from tunesmith.programs.host import Program, host


def teach(program: Program) -> Result:
    """The model is imported only now, so that a program whose cycle is gone ends before."""
    from tunesmith.teachers import answering

    return answering.answer(program)


if __name__ == "__main__":
    sys.exit(host(teach))
