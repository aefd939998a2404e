"""Small passes, recorded once and replayed: queueing their kernels one by one takes longer than computing them.

A recording is made of rows of one form (`segments.Form`), in the memory that it was recorded with; so a row is first
filled up to a form that many rows have. The first row of a form is computed as usual; the second is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunesmith.models.attention import Apart, Placed
from tunesmith.models.fast.batches import Row
from tunesmith.models.segments import Form

_MOST_WORK = 2.5e13
"""Tokens × parameters up to which queueing is felt: below a half of it a fast device waits for the host, and up to it
for the gaps between kernels."""
_MOST_OF_DEVICE = 0.9
_LITTLE_MORE = 1.02
"""How much more may be computed where that saves another recording."""
_MOST_RECORDINGS = 48
Through = Callable[[Any, Any, Any, Apart], tuple[Any, Any]]
"""From tokens, cosines and sines of their positions, and attention, to the residual stream and what is still to be
added to it."""


def is_small(num_tokens: int, num_parameters: int) -> bool:
    return num_tokens * num_parameters < _MOST_WORK


class Recordings:
    """What was recorded of one model; all of it shares one piece of memory, as one pass follows the other."""

    def __init__(self, through: Through) -> None:
        self._through = through
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: set[Form] = set()
        self._made: dict[Form, Recording] = {}
        self.turn = 0
        """How many passes were begun."""
        self.problem: str | None = None
        """Why nothing is recorded any more."""

    def choose(self, form: Form) -> Form:
        """The form that a row shall be filled up to: one that is recorded, if it is only a little longer."""
        fitting = [made for made in self._made if made.covers(form, _LITTLE_MORE)]
        return min(fitting, key=lambda made: (made.num_tokens, made.num_segments * made.longest), default=form)

    def __call__(self, form: Form, row: Row) -> tuple[Any, Any]:
        """The same as computing it, gradients included. Of two passes, the first goes back before the second begins."""
        recording = self._recording(form, row)
        if recording is None:
            return self._through(row.ids, row.cos, row.sin, row.attend)
        self.turn += 1
        start = torch.empty(0, device=row.ids.device, requires_grad=True)  # so that somebody asks for gradients
        made: tuple[Any, Any] = _Replayed.apply(start, row, recording, self)
        return made

    def _recording(self, form: Form, row: Row) -> Recording | None:
        is_second = form in self._seen and form not in self._made
        self._seen.add(form)
        if is_second and self.problem is None and len(self._made) < _MOST_RECORDINGS and _has_room(row.ids.device):
            try:
                self._made[form] = Recording(self._through, row, self._pool)
            except RuntimeError as error:  # a kernel that cannot be recorded, or no memory for it
                self.problem = " ".join(str(error).split())[:200]
        return self._made.get(form)


def _has_room(device: Any) -> bool:
    """Whether a pass fits twice: recordings keep the memory of one, and those that are computed need it again."""
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return bool(held + 2 * (peak - held) <= _MOST_OF_DEVICE * torch.cuda.mem_get_info(device)[1])


class Recording:
    """One pass over a row, forwards and backwards, as the device was told to do it."""

    def __init__(self, through: Through, row: Row, pool: Any) -> None:
        self._row = _copied(row)
        self._forwards, self._backwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forwards, pool=pool):
            made = through(self._row.ids, self._row.cos, self._row.sin, self._row.attend)
        self._grads = [torch.zeros_like(tensor) for tensor in made]
        with torch.cuda.graph(self._backwards, pool=pool):
            torch.autograd.backward(made, self._grads)
        self._made = [tensor.detach() for tensor in made]

    def forward(self, row: Row) -> list[Any]:
        torch._foreach_copy_(_tensors(self._row), _tensors(row))
        self._forwards.replay()
        return self._made

    def backward(self, *grads: Any) -> None:
        torch._foreach_copy_(self._grads, list(grads))
        self._backwards.replay()


def _copied(row: Row) -> Row:
    """In memory of its own. Other rows will take its place, so nothing may be recorded that looks at segments."""
    assert row.placed is not None
    starts = (row.placed.query_starts.clone(), row.placed.key_starts.clone())
    gathering = row.placed.gathering
    own = None if gathering is None else (gathering[0].clone(), gathering[1].clone())
    placed = Placed(*starts, row.placed.longest_query, row.placed.longest_key, own)
    return Row(row.ids.clone(), row.cos.clone(), row.sin.clone(), (), placed)


def _tensors(row: Row) -> list[Any]:
    assert row.placed is not None
    starts = [row.placed.query_starts, row.placed.key_starts]
    return [row.ids, row.cos, row.sin, *starts, *(row.placed.gathering or ())]


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
