"""The processes that make a step together: each takes its share of the passes, gradients are summed, all update alike.

Weights never travel: every process makes the same update from the same summed gradients, so they stay equal. One of
them, the leader, is the program that the worker started: it alone speaks, listens, validates and saves, and calls the
others for each step (`follower`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunesmith.runs.spec import TrainSpec
from tunesmith.training.trainers.native.random_state import random_json, random_tensors

T = TypeVar("T")
_SPEC, _MEETING = ".team-spec.json", ".team-meeting"
_PATIENCE = timedelta(days=1)  # the others wait while the leader validates; one that dies is noticed at once


class Call(StrEnum):
    """What the leader calls the others for."""

    STEP = "step"
    RANDOM = "random"
    """Tell the state of your random numbers, for a checkpoint."""
    END = "end"


@dataclass(frozen=True)
class RandomState:
    """Of every process, under ``rank-N``: torch's generators as tensors, Python's and numpy's as JSON."""

    tensors: dict[str, Any]
    plain: dict[str, Any]


class Team:
    """One process of `size`; alone, everything here is the identity."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def share(self, parts: Sequence[T]) -> list[T]:
        """This process's part of the work; large parts come first, so that dealing them out in turn is even."""
        return list(parts[self.rank :: self.size])

    def call(self, what: Call) -> None:
        """Leader: the others do this now, together with us."""
        if self.size > 1:
            dist.broadcast_object_list([what.value])

    def heard(self) -> Call:
        """Another: wait for what the leader calls for."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard)
        return Call(heard[0])

    def gathered(self, value: T) -> list[T]:
        """What every process has, in the order of their ranks."""
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts

    def total(self, value: float) -> float:
        return sum(self.gathered(value))

    def totals(self, values: dict[str, Any]) -> dict[str, Any]:
        """Sums over all processes, as numbers; one that had nothing to do has fewer names. Alone, nothing is read."""
        if self.size == 1:
            return values
        parts = self.gathered({name: float(value) for name, value in values.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def joined(self, parts: Sequence[T]) -> tuple[T, ...]:
        """What any process found, in the order of the ranks."""
        return tuple(one for part in self.gathered(tuple(parts)) for one in part)

    def merged(self, found: dict[str, T]) -> dict[str, T]:
        return {name: value for part in self.gathered(found) for name, value in part.items()}

    def random_state(self) -> RandomState:
        """The random numbers of every process. Together: the leader has called for it."""
        return RandomState(
            self.merged(random_tensors(self.rank)),
            self.merged(random_json(self.rank)),
        )

    def sum_gradients(self, parameters: Sequence[Any]) -> None:
        """One message for all gradients; a parameter that this process did not reach counts as zero."""
        if self.size == 1:
            return
        for tensor in parameters:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        flat = torch.cat([tensor.grad.reshape(-1) for tensor in parameters])
        dist.all_reduce(flat)
        for tensor, summed in zip(parameters, flat.split([tensor.numel() for tensor in parameters]), strict=True):
            tensor.grad.copy_(summed.view_as(tensor))


@contextlib.contextmanager
def led_team(spec: TrainSpec, directory: Path) -> Iterator[Team]:
    """The team of a run, with this process as its leader; the others are started here and end with it."""
    size = spec.run.num_processes
    if size == 1:
        yield Team()
        return
    (directory / _MEETING).unlink(missing_ok=True)
    (directory / _SPEC).write_text(spec.model_dump_json())
    others = [_start(directory, rank, size) for rank in range(1, size)]
    try:
        with joined_team(directory, 0, size) as team:
            try:
                yield team
            except BaseException:
                for process in others:
                    process.kill()  # they may be waiting for us in the middle of a step, and would not hear a call
                raise
            team.call(Call.END)
    finally:
        for process in others:
            _end(process)
        for name in (_SPEC, _MEETING):
            (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def joined_team(directory: Path, rank: int, size: int) -> Iterator[Team]:
    """Meet the others in the program's folder, over loopback; NCCL where every process has a GPU of its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    has_gpus = torch.cuda.device_count() >= size
    if has_gpus:
        torch.cuda.set_device(rank)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = dist.FileStore(str(directory / _MEETING), size)
    dist.init_process_group("nccl" if has_gpus else "gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield Team(rank, size)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads_before)


def read_team_spec(directory: Path) -> TrainSpec:
    return TrainSpec.model_validate_json((directory / _SPEC).read_bytes())


def _start(directory: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
    """Its words go to our log: the result is the leader's alone."""
    argv = [
        sys.executable,
        "-m",
        "tunesmith.training.trainers.native.rank_worker",
        str(directory),
        str(rank),
        str(size),
    ]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
