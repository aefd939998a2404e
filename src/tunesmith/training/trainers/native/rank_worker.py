"""A process that trains under a leader: ``python -m tunesmith.training.trainers.native.rank_worker DIR RANK SIZE``.

It makes the same data, model and order from the same spec, does its share of every step that the leader calls for, and
says nothing: what it finds goes to the leader in the sums.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_tokenizer
from tunesmith.runs.spec import TrainSpec
from tunesmith.training.trainers.native.distributed import Call, Team, joined_team, read_team_spec
from tunesmith.training.trainers.native.random_state import repeat_exactly
from tunesmith.training.trainers.native.state import read_state, restore
from tunesmith.training.trainers.native.training_setup import assemble, read_data, silent_voice


def follow(spec: TrainSpec, team: Team) -> None:
    """Take part in every step until the leader is done."""
    repeat_exactly()
    chat = ChatFormat(load_tokenizer(Path(spec.run.base.path)))
    voice = silent_voice(spec.run)
    saved = read_state(spec.resume, spec.run, team.size) if spec.resume else None
    work = assemble(spec, chat, read_data(spec.run, chat, voice), team, voice)
    step = 0
    if spec.resume is not None and saved is not None:
        restore(Path(spec.resume.path), saved, work.training.adapted, work.training.optimizer, team.rank)
        step = saved.standing.step
    while (call := team.heard()) is not Call.END:
        if call is Call.RANDOM:
            team.random_state()
        else:
            work.make_step(step)
            step += 1


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader hears it too, saves, and then ends us
    directory, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    spec = read_team_spec(directory)
    with joined_team(directory, rank, size) as team:
        follow(spec, team)


if __name__ == "__main__":
    main()
