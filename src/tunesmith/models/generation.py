"""Answers of the model, many at once: greedy, or sampled so that a case's answer depends on its own seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tunesmith.models.answer import Answer
from tunesmith.models.chat import ChatFormat
from tunesmith.models.scoring import evaluating, mixed_precision


@dataclass(frozen=True)
class Sampling:
    """Temperature and seed; each answer also mixes in the key of its case, so batches can be cut in any way."""

    temperature: float
    seed: int


def answer_all(
    model: Any,
    chat: ChatFormat,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    keys: Sequence[str] = (),
) -> list[Answer]:
    """One answer per prompt, in order, as one batch; greedy unless `sampling` is given, which needs `keys`."""
    if not prompts:
        return []
    device = next(model.parameters()).device
    draws = None if sampling is None else _draws(sampling.seed, keys, max_new_tokens)
    stops = torch.tensor(sorted(stop_ids(model, chat)), device=device)
    ids, mask = _pad_left(prompts, chat.pad_id, device)
    written: list[Any] = []
    open_rows = torch.ones(len(prompts), dtype=torch.bool, device=device)
    cache = None
    with evaluating(model), mixed_precision(device):
        for step in range(max_new_tokens):
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            if sampling is None or draws is None:
                tokens = logits.argmax(dim=-1)
            else:
                tokens = _sample(logits / sampling.temperature, draws[:, step].to(device))
            written.append(tokens)
            open_rows &= ~torch.isin(tokens, stops)
            if not bool(open_rows.any()):
                break
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    stop_set = set(stops.tolist())
    return [_answer(chat, row, stop_set) for row in torch.stack(written, dim=1).tolist()]


def _answer(chat: ChatFormat, tokens: list[int], stops: set[int]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    return Answer(chat.text_of(tokens[:end]), finished=end is not None)


def _sample(logits: Any, draws: Any) -> Any:
    """The token in which the draw falls when the probabilities are laid end to end."""
    ends = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    places = torch.searchsorted(ends, draws[:, None] * ends[:, -1:], right=True).squeeze(1)
    return places.clamp(max=logits.shape[-1] - 1)


def _draws(seed: int, keys: Sequence[str], num: int) -> Any:
    """Uniform numbers per case and step, from the seed and the case's key."""
    rows = [
        numpy.random.default_rng(int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big")).random(
            num
        )
        for key in keys
    ]
    return torch.from_numpy(numpy.stack(rows))


def _pad_left(prompts: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[Any, Any]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def stop_ids(model: Any, chat: ChatFormat) -> frozenset[int]:
    """What ends an answer: the end of turn of the template, and what the base's own generation settings stop at."""
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if stop is None:
        return chat.stop_ids
    return chat.stop_ids | (frozenset(stop) if isinstance(stop, Iterable) else {stop})
