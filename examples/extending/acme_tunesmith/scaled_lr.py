"""A trainer: ours, with a learning rate that shrinks with the number of examples below a thousand."""

from __future__ import annotations

import sys

from tunesmith.profiles.profile import HardwareTier, Method
from tunesmith.programs.host import Program, host
from tunesmith.programs.protocol import Result
from tunesmith.training.trainers.base import ALL_TIERS, TrainerInfo

TRAINER = TrainerInfo(
    name="scaled_lr",
    tiers=ALL_TIERS,
    default_tier=HardwareTier.CPU,
    methods=frozenset({Method.SFT}),
    argv=("python", "-m", "acme_tunesmith.scaled_lr"),
    description="native SFT whose learning rate follows the size of the dataset",
    takes_options=False,
)


def train(program: Program) -> Result:
    """Called in a process of its own, with the spec already read; the result is checked by the worker."""
    from tunesmith.training.trainers.native.train import train as train_natively  # imports torch

    run = program.train_spec.run
    lr = run.recipe.peak_lr * min(1.0, run.dataset.num_train / 1000) ** 0.5
    program.log(f"learning rate {lr:.3g} for {run.dataset.num_train} examples")
    recipe = run.recipe.model_copy(update={"lr": lr})
    program.spec = program.train_spec.model_copy(update={"run": run.model_copy(update={"recipe": recipe})})
    return train_natively(program)


if __name__ == "__main__":
    sys.exit(host(train))
