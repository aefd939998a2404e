"""Entry point of our trainers: ``python -m tunesmith.training.trainers.main --spec SPEC.json --output-dir DIR``."""

from __future__ import annotations

import importlib
import sys

from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.host import Program, ProgramFailure, host
from tunesmith.programs.protocol import Result
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.registry import find_trainer


def train(program: Program) -> Result:
    """Hand over to the trainer that the spec names, if this is still the code that the run was submitted with."""
    run = program.train_spec.run
    if run.fingerprints.code != code_fingerprint():
        raise ProgramFailure(
            ErrorClass.MISMATCH,
            "the code or a library changed since the run was submitted, so its weights could not be explained; "
            f"submit it again: tunesmith run retry {run.run_id}",
        )
    trainer = find_trainer(run.trainer)
    if trainer.module is None:
        raise ProgramFailure(ErrorClass.CONFIG, f"trainer {trainer.name!r} is started by a command of its own")
    result: Result = importlib.import_module(trainer.module).train(program)
    return result


if __name__ == "__main__":
    sys.exit(host(train))
