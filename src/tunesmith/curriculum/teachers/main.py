"""A local teacher's program: ``python -m tunesmith.curriculum.teachers.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import sys

from tunesmith.programs.host import Program, host
from tunesmith.programs.protocol import Result


def teach(program: Program) -> Result:
    """The model is imported only now, so that a program whose cycle is gone ends before."""
    from tunesmith.curriculum.teachers import answering

    return answering.answer(program)


if __name__ == "__main__":
    sys.exit(host(teach))
