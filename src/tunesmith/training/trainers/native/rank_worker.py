"""A worker rank of a training: ``python -m tunesmith.training.trainers.native.rank_worker DIR RANK SIZE``.

It builds the same data, model and batches from the same spec and computes its shard of every step that rank 0 commands.
It reports nothing itself: its results reach rank 0 through the collective operations.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_tokenizer
from tunesmith.runs.spec import TrainSpec
from tunesmith.training.trainers.native.distributed import Command, TrainingGroup, joined_group, read_group_spec
from tunesmith.training.trainers.native.random_state import repeat_exactly
from tunesmith.training.trainers.native.state import read_state, restore
from tunesmith.training.trainers.native.training_setup import build_training, null_reporter, read_data


def run_worker(spec: TrainSpec, group: TrainingGroup) -> None:
    """Take part in every step until rank 0 ends the training."""
    repeat_exactly()
    chat = ChatFormat(load_tokenizer(Path(spec.run.base.path)))
    reporter = null_reporter(spec.run)
    saved = read_state(spec.resume, spec.run, group.size) if spec.resume else None
    setup = build_training(spec, chat, read_data(spec.run, chat, reporter), group, reporter)
    step = 0
    if spec.resume is not None and saved is not None:
        restore(Path(spec.resume.path), saved, setup.training.adapted, setup.training.optimizer, group.rank)
        step = saved.standing.step
    while (command := group.receive_command()) is not Command.END:
        if command is Command.RANDOM:
            group.random_state()
        else:
            setup.make_step(step)
            step += 1


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets it too, saves, and then ends this process
    directory, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    spec = read_group_spec(directory)
    with joined_group(directory, rank, size) as group:
        run_worker(spec, group)


if __name__ == "__main__":
    main()
