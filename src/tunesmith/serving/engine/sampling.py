"""The next token of each row: greedy, or drawn with the row's own random numbers, so that no row depends on another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from tunesmith.serving.generation import Generation


@dataclass
class Taste:
    """How one row picks its tokens, and what it has written."""

    temperature: float
    top_p: float
    presence: float
    frequency: float
    num_top: int | None
    random: numpy.random.Generator | None
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, asked: Generation) -> Taste:
        seed = int.from_bytes(os.urandom(8), "big") if asked.seed is None else asked.seed % (1 << 64)
        is_greedy = asked.temperature <= 0.0
        return cls(
            temperature=asked.temperature,
            top_p=asked.top_p,
            presence=asked.presence_penalty,
            frequency=asked.frequency_penalty,
            num_top=asked.num_top,
            random=None if is_greedy else numpy.random.default_rng(seed),
        )

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence or self.frequency)


@dataclass(frozen=True)
class Picked:
    """A row's next token; its log-probability and the likeliest ones where they were asked for."""

    token: int
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def pick(logits: Any, tastes: Sequence[Taste]) -> list[Picked]:
    """One token per row. Log-probabilities are of the model itself: before penalties, temperature and top_p."""
    logits = logits.float()
    biased = _penalised(logits, tastes)
    tokens = biased.argmax(dim=-1)
    drawing = [row for row, taste in enumerate(tastes) if taste.random is not None]
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        tokens[rows] = _drawn(biased[rows], [tastes[row] for row in drawing])
    chosen = tokens.tolist()
    for taste, token in zip(tastes, chosen, strict=True):
        if taste.has_penalties:
            taste.counts[token] += 1
    telling = [row for row, taste in enumerate(tastes) if taste.num_top is not None]
    if not telling:
        return [Picked(token) for token in chosen]
    told = _told(logits, telling, chosen, tastes)
    return [told.get(row) or Picked(token) for row, token in enumerate(chosen)]


def _penalised(logits: Any, tastes: Sequence[Taste]) -> Any:
    if not any(taste.counts for taste in tastes):
        return logits
    logits = logits.clone()
    for row, taste in enumerate(tastes):
        if taste.counts:
            ids = torch.tensor(list(taste.counts), device=logits.device)
            counts = torch.tensor(list(taste.counts.values()), device=logits.device, dtype=logits.dtype)
            logits[row, ids] -= taste.presence + taste.frequency * counts
    return logits


def _drawn(logits: Any, tastes: Sequence[Taste]) -> Any:
    """Where the row's draw falls when its probabilities are laid end to end, the likely ones first for top_p."""
    device = logits.device
    warmth = torch.tensor([taste.temperature for taste in tastes], device=device, dtype=torch.float64)
    draws = torch.tensor(
        [taste.random.random() if taste.random else 0.0 for taste in tastes], dtype=torch.float64, device=device
    )
    probs = torch.softmax(logits.double() / warmth[:, None].clamp(min=1e-6), dim=-1)
    kept = torch.tensor([taste.top_p for taste in tastes], device=device, dtype=torch.float64)
    if bool((kept < 1.0).any()):
        ordered, places = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        cut = (before >= kept[:, None]) & (kept[:, None] < 1.0)
        cut[:, 0] = False  # the likeliest stays, whatever top_p is
        probs = torch.zeros_like(probs).scatter(1, places, ordered.masked_fill(cut, 0.0))
    ends = probs.cumsum(dim=-1)
    found = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True).squeeze(1)
    return found.clamp(max=logits.shape[-1] - 1)


def _told(logits: Any, rows: Sequence[int], chosen: Sequence[int], tastes: Sequence[Taste]) -> dict[int, Picked]:
    log_probs = torch.log_softmax(logits[list(rows)].double(), dim=-1)
    own = log_probs.gather(1, torch.tensor([[chosen[row]] for row in rows], device=logits.device)).squeeze(1).tolist()
    most = max(tastes[row].num_top or 0 for row in rows)
    best, ids = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)
    told: dict[int, Picked] = {}
    for place, row in enumerate(rows):
        num = tastes[row].num_top or 0
        top = tuple(zip(ids[place, :num].tolist(), best[place, :num].tolist(), strict=True)) if num else ()
        told[row] = Picked(chosen[row], own[place], top)
    return told
