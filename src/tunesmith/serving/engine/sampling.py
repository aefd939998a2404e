"""Sampling: greedy, or with a random generator per sequence, so that no sequence depends on the others of its batch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from tunesmith.serving.generation import GenerationRequest


@dataclass
class SamplingParams:
    """Sampling parameters of one sequence, with its random generator and the counts for its penalties."""

    temperature: float
    top_p: float
    presence: float
    frequency: float
    top_logprobs: int | None
    random: numpy.random.Generator | None
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, request: GenerationRequest) -> SamplingParams:
        seed = int.from_bytes(os.urandom(8), "big") if request.seed is None else request.seed % (1 << 64)
        is_greedy = request.temperature <= 0.0
        return cls(
            temperature=request.temperature,
            top_p=request.top_p,
            presence=request.presence_penalty,
            frequency=request.frequency_penalty,
            top_logprobs=request.top_logprobs,
            random=None if is_greedy else numpy.random.default_rng(seed),
        )

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence or self.frequency)


@dataclass(frozen=True)
class SampledToken:
    """The next token of a sequence, with log-probabilities if they were requested."""

    token: int
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Any, params: Sequence[SamplingParams]) -> list[SampledToken]:
    """One token per sequence. Log-probabilities are those before penalties, temperature and top_p."""
    logits = logits.float()
    biased = _penalised(logits, params)
    tokens = biased.argmax(dim=-1)
    sampled = [row for row, sampling in enumerate(params) if sampling.random is not None]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        tokens[rows] = _sample(biased[rows], [params[row] for row in sampled])
    chosen = tokens.tolist()
    for sampling, token in zip(params, chosen, strict=True):
        if sampling.has_penalties:
            sampling.counts[token] += 1
    with_logprobs = [row for row, sampling in enumerate(params) if sampling.top_logprobs is not None]
    if not with_logprobs:
        return [SampledToken(token) for token in chosen]
    tokens_of = _top_logprobs(logits, with_logprobs, chosen, params)
    return [tokens_of.get(row) or SampledToken(token) for row, token in enumerate(chosen)]


def _penalised(logits: Any, params: Sequence[SamplingParams]) -> Any:
    if not any(sampling.counts for sampling in params):
        return logits
    logits = logits.clone()
    for row, sampling in enumerate(params):
        if sampling.counts:
            ids = torch.tensor(list(sampling.counts), device=logits.device)
            counts = torch.tensor(list(sampling.counts.values()), device=logits.device, dtype=logits.dtype)
            logits[row, ids] -= sampling.presence + sampling.frequency * counts
    return logits


def _sample(logits: Any, params: Sequence[SamplingParams]) -> Any:
    """Inverse transform sampling per row, after temperature and top_p."""
    device = logits.device
    temperatures = torch.tensor([sampling.temperature for sampling in params], device=device, dtype=torch.float64)
    draws = torch.tensor(
        [sampling.random.random() if sampling.random else 0.0 for sampling in params],
        dtype=torch.float64,
        device=device,
    )
    probs = torch.softmax(logits.double() / temperatures[:, None].clamp(min=1e-6), dim=-1)
    top_ps = torch.tensor([sampling.top_p for sampling in params], device=device, dtype=torch.float64)
    if bool((top_ps < 1.0).any()):
        ordered, indices = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        cut = (before >= top_ps[:, None]) & (top_ps[:, None] < 1.0)
        cut[:, 0] = False  # the most likely token is always kept
        probs = torch.zeros_like(probs).scatter(1, indices, ordered.masked_fill(cut, 0.0))
    ends = probs.cumsum(dim=-1)
    found = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True).squeeze(1)
    return found.clamp(max=logits.shape[-1] - 1)


def _top_logprobs(
    logits: Any, rows: Sequence[int], chosen: Sequence[int], params: Sequence[SamplingParams]
) -> dict[int, SampledToken]:
    log_probs = torch.log_softmax(logits[list(rows)].double(), dim=-1)
    own = log_probs.gather(1, torch.tensor([[chosen[row]] for row in rows], device=logits.device)).squeeze(1).tolist()
    max_top = max(params[row].top_logprobs or 0 for row in rows)
    best, ids = log_probs.topk(min(max_top, log_probs.shape[-1]), dim=-1)
    tokens: dict[int, SampledToken] = {}
    for index, row in enumerate(rows):
        num = params[row].top_logprobs or 0
        top = tuple(zip(ids[index, :num].tolist(), best[index, :num].tolist(), strict=True)) if num else ()
        tokens[row] = SampledToken(chosen[row], own[index], top)
    return tokens
