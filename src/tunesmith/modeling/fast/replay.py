"""Small passes, recorded once and replayed: queueing their kernels one by one takes longer than computing them.

A recording is made of rows of one form (`segments.Form`), in the memory that it was recorded with; so a row is first
filled up to a form that many rows have. The first row of a form is computed as usual; the second is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.modeling.attention import Apart, Placed
from tunesmith.modeling.segments import Form, Segment

_MOST_WORK = 2.5e13
"""Tokens × parameters up to which queueing is felt: below a half of it a fast device waits for the host, and up to it
for the gaps between kernels."""
_MOST_OF_DEVICE = 0.9
_MOST_RECORDINGS = 48
Through = Callable[[Any, Any, Any, Apart], tuple[Any, Any]]
"""From tokens, cosines and sines of their positions, and attention, to the residual stream and what is still to be
added to it."""


def is_small(num_tokens: int, num_parameters: int) -> bool:
    return num_tokens * num_parameters < _MOST_WORK


@dataclass(frozen=True)
class Row:
    """A row of one form, on the device."""

    ids: Any
    cos: Any
    sin: Any
    segments: tuple[Segment, ...]
    placed: Placed

    @property
    def attend(self) -> Apart:
        return Apart(self.segments, self.ids.device, placed=self.placed)

    @property
    def tensors(self) -> list[Any]:
        starts = [self.placed.query_starts, self.placed.key_starts]
        return [self.ids, self.cos, self.sin, *starts, *(self.placed.gathering or ())]

    def copied(self) -> Row:
        """In memory of its own. Other rows will take its place, so nothing may be recorded that looks at segments."""
        gathering = self.placed.gathering
        placed = Placed(
            self.placed.query_starts.clone(),
            self.placed.key_starts.clone(),
            self.placed.longest_query,
            self.placed.longest_key,
            None if gathering is None else (gathering[0].clone(), gathering[1].clone()),
        )
        return Row(self.ids.clone(), self.cos.clone(), self.sin.clone(), (), placed)


class Recordings:
    """What was recorded of one model; all of it shares one piece of memory, as one pass follows the other."""

    def __init__(self, through: Through) -> None:
        self._through = through
        self._pool = torch.cuda.graph_pool_handle()
        self._made: dict[Form, Recording | None] = {}
        self._num_made = 0
        self._turn = 0
        self.problem: str | None = None
        """Why nothing is recorded any more."""

    def __call__(self, form: Form, row: Row) -> tuple[Any, Any]:
        """The same as computing it, gradients included. Of two passes, the first goes back before the second begins."""
        recording = self._recording(form, row)
        if recording is None:
            return self._through(row.ids, row.cos, row.sin, row.attend)
        self._turn += 1
        start = torch.empty(0, device=row.ids.device, requires_grad=True)  # so that somebody asks for gradients
        made: tuple[Any, Any] = _Replayed.apply(start, row, recording, self)
        return made

    def _recording(self, form: Form, row: Row) -> Recording | None:
        is_second = form in self._made and self._made[form] is None
        if is_second and self.problem is None and self._num_made < _MOST_RECORDINGS and _has_room(row.ids.device):
            try:
                self._made[form] = Recording(self._through, row, self._pool)
                self._num_made += 1
            except RuntimeError as error:  # a kernel that cannot be recorded, or no memory for it
                self.problem = " ".join(str(error).split())[:200]
        return self._made.setdefault(form, None)

    @property
    def turn(self) -> int:
        return self._turn


def _has_room(device: Any) -> bool:
    """Whether a pass fits twice: recordings keep the memory of one, and those that are computed need it again."""
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return held + 2 * (peak - held) <= _MOST_OF_DEVICE * torch.cuda.mem_get_info(device)[1]


class Recording:
    """One pass over a row, forwards and backwards, as the device was told to do it."""

    def __init__(self, through: Through, row: Row, pool: Any) -> None:
        self._row = row.copied()
        self._forwards, self._backwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forwards, pool=pool):
            self._made = through(self._row.ids, self._row.cos, self._row.sin, self._row.attend)
        self._grads = tuple(torch.zeros_like(tensor) for tensor in self._made)
        with torch.cuda.graph(self._backwards, pool=pool):
            torch.autograd.backward(self._made, self._grads)
        self._made = tuple(tensor.detach() for tensor in self._made)

    def forward(self, row: Row) -> tuple[Any, ...]:
        torch._foreach_copy_(self._row.tensors, row.tensors)
        self._forwards.replay()
        return self._made

    def backward(self, *grads: Any) -> None:
        torch._foreach_copy_(list(self._grads), list(grads))
        self._backwards.replay()


class _Replayed(torch.autograd.Function):
    """Gradients of parameters are added to where they are collected, as the recorded layers do it."""

    @staticmethod
    def forward(ctx: Any, start: Any, row: Row, recording: Recording, among: Recordings) -> tuple[Any, ...]:
        ctx.recording, ctx.among, ctx.turn = recording, among, among.turn
        return tuple(tensor.view_as(tensor) for tensor in recording.forward(row))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        if ctx.turn != ctx.among.turn:
            raise RuntimeError("another pass was begun before this one went back: its numbers are gone")
        ctx.recording.backward(*grads)
        return None, None, None, None
