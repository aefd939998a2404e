"""A trainer that an installed package brings, and that knows the protocol well enough to abuse it.

`install` puts it on an import path as a package would; `trainer.options.trick` says what it does.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from tunesmith.programs.host import Program, host
from tunesmith.programs.protocol import Result, ResultStatus
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.base import ALL_TIERS, TrainerInfo
from tunesmith.training.trainers.registry import TRAINERS
from tunesmith.training.trainers.sim import sim

NAME = "hostile"
INFO = TrainerInfo(
    name=NAME,
    tiers=ALL_TIERS,
    default_tier=TRAINERS["sim"].default_tier,
    methods=TRAINERS["sim"].methods,
    argv=("python", "-m", "hostile_trainer"),
    description="abuses the protocol as it is told",
)


def install(site: Path) -> None:
    """Make `site` hold this module and the metadata of a package that registers it."""
    about = site / "hostile_trainer-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(__file__, site / "hostile_trainer.py")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-trainer\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[tunesmith.trainers]\n{NAME} = hostile_trainer:INFO\n")


def train(program: Program) -> Result:
    """An honest sim training, twisted at its end."""
    spec = program.train_spec
    trick = spec.run.trainer_options["trick"]
    if spec.attempt.number > int(spec.run.trainer_options.get("fail_attempts", 1_000)):
        trick = "nothing"
    run = spec.run.model_copy(update={"trainer_options": {"steps": 2, "step_s": 0.0}})
    program.spec = spec.model_copy(update={"run": run})
    if trick == "unasked_interruption":
        return program.result(ResultStatus.INTERRUPTED, error="I do not feel like it")
    honest = sim.train(program)
    return honest.model_copy(update=_twist(program, trick))


def _twist(program: Program, trick: str) -> dict[str, Any]:
    artifact = program.dir / "artifact"
    failed = {
        "status": ResultStatus.FAILED,
        "error_class": ErrorClass.CONFIG,
        "error": "told to fail",
        "artifact": None,
    }
    match trick:
        case "nul_in_the_log":
            os.write(2, b"before\0after\xff\xfe\n")
            return failed
        case "nul_in_the_detail":
            return {"detail": {"note": "before\0after"}}
        case "nan_in_a_failure":
            return failed | {"metrics": {"validation_loss": float("nan")}}
        case "forged_number":
            return {"train_s": float("inf")}
        case "pipe_for_a_manifest":
            (artifact / "manifest.json").unlink()
            os.mkfifo(artifact / "manifest.json")
        case "link_for_an_artifact":
            artifact.rename(program.dir / "elsewhere")
            artifact.symlink_to(program.dir / "elsewhere")
        case "pickle_beside":
            (artifact / "payload.bin").write_bytes(b"\x80\x04.")
        case "strange_ack":
            program.ack("req-that-was-never-made", "as you wished")
        case "kills_its_shim":
            os.kill(os.getppid(), signal.SIGKILL)
    return {}


if __name__ == "__main__":
    sys.exit(host(train))
