"""Data-parallel training: each process computes its shard of the micro-batches, gradients are summed over all of them.

Weights are never sent: every process makes the same update from the same summed gradients, so they stay equal. Rank 0
is the program that the worker started. It alone reports, reads requests, validates and saves; it broadcasts a command
for each step to the worker ranks (`rank_worker`).
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
_SPEC, _RENDEZVOUS = ".group-spec.json", ".group-rendezvous"
_TIMEOUT = timedelta(days=1)  # worker ranks wait while rank 0 validates; one that dies is noticed at once


class Command(StrEnum):
    """What rank 0 tells the worker ranks to do next."""

    STEP = "step"
    RANDOM = "random"
    """Send the state of the random number generators, for a checkpoint."""
    END = "end"


@dataclass(frozen=True)
class RandomState:
    """The random number generators of every process, under ``rank-N``: torch's as tensors, the others as JSON."""

    tensors: dict[str, Any]
    plain: dict[str, Any]


class TrainingGroup:
    """One process of a group of `size`; in a group of one, every method is the identity."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def shard(self, parts: Sequence[T]) -> list[T]:
        """Return this process's part of the work. Parts are sorted by size, so round-robin balances them."""
        return list(parts[self.rank :: self.size])

    def broadcast_command(self, command: Command) -> None:
        """On rank 0: make the worker ranks do this now, together with rank 0."""
        if self.size > 1:
            dist.broadcast_object_list([command.value])

    def receive_command(self) -> Command:
        """On ranks above 0: wait for the next command from rank 0."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received)
        return Command(received[0])

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts

    def all_reduce_sum(self, value: float) -> float:
        return sum(self.all_gather(value))

    def all_reduce_sums(self, values: dict[str, Any]) -> dict[str, Any]:
        """Sum each value over all processes; a process may lack some names. With one process, tensors are not read."""
        if self.size == 1:
            return values
        parts = self.all_gather({name: float(value) for name, value in values.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    def concatenate(self, parts: Sequence[T]) -> tuple[T, ...]:
        """Return the parts of every process, in the order of their ranks."""
        return tuple(one for part in self.all_gather(tuple(parts)) for one in part)

    def merge(self, values: dict[str, T]) -> dict[str, T]:
        """Return the entries of every process in one dict."""
        return {name: value for part in self.all_gather(values) for name, value in part.items()}

    def random_state(self) -> RandomState:
        """Return the generators of every process. Every rank must call it at the same time (`Command.RANDOM`)."""
        return RandomState(
            self.merge(random_tensors(self.rank)),
            self.merge(random_json(self.rank)),
        )

    def sum_gradients(self, parameters: Sequence[Any]) -> None:
        """Sum all gradients in one all-reduce; a parameter without a gradient in this process counts as zero."""
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
def led_group(spec: TrainSpec, directory: Path) -> Iterator[TrainingGroup]:
    """The process group of a run with this process as rank 0. Starts the worker ranks, which end with it."""
    size = spec.run.num_processes
    if size == 1:
        yield TrainingGroup()
        return
    (directory / _RENDEZVOUS).unlink(missing_ok=True)
    (directory / _SPEC).write_text(spec.model_dump_json())
    others = [_start(directory, rank, size) for rank in range(1, size)]
    try:
        with joined_group(directory, 0, size) as group:
            try:
                yield group
            except BaseException:
                for process in others:
                    process.kill()  # it may be waiting in the middle of a step, and would not receive a command
                raise
            group.broadcast_command(Command.END)
    finally:
        for process in others:
            _end(process)
        for name in (_SPEC, _RENDEZVOUS):
            (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def joined_group(directory: Path, rank: int, size: int) -> Iterator[TrainingGroup]:
    """Join the process group over a file in the program's folder; NCCL if every process has its own GPU, else gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    has_gpus = torch.cuda.device_count() >= size
    if has_gpus:
        torch.cuda.set_device(rank)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = dist.FileStore(str(directory / _RENDEZVOUS), size)
    dist.init_process_group("nccl" if has_gpus else "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield TrainingGroup(rank, size)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads_before)


def read_group_spec(directory: Path) -> TrainSpec:
    return TrainSpec.model_validate_json((directory / _SPEC).read_bytes())


def _start(directory: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
    """Start a worker rank. Its stdout goes to our log: only rank 0 writes the result to stdout."""
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
