"""Choose the fastest cache strategy whose logits match an uncached forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tunesmith.serving.engine.attention import Masks, attentions
from tunesmith.serving.engine.lora_layers import LoraLayers
from tunesmith.serving.engine.runner import BatchedRunner, ModelRunner, PrefillSteps, SequentialRunner

RunnerChoice = tuple[str, Callable[[int], ModelRunner]]
"""Name of the strategy, and a factory that takes the maximum number of tokens of a prefill pass."""
_LENGTHS = (11, 4, 7)
_NUM_STEPS = 3


def fastest_runner(model: Any, lora_layers: LoraLayers) -> RunnerChoice:
    """The first strategy whose logits match those of complete sequences without a cache."""
    texts = _texts(model)
    with torch.inference_mode():
        expected = [_plain(model, text) for text in texts]
        for choice in _runners(model, lora_layers):
            if all(_matches_uncached(choice[1](tokens), texts, expected) for tokens in (64, 6)):
                return choice
    return "no_cache", lambda tokens: SequentialRunner(model, lora_layers, has_cache=False)


def _runners(model: Any, lora_layers: LoraLayers) -> Iterator[RunnerChoice]:
    """Yield runners, fastest first. Stop at the one you use: the model keeps the attention that was set for it."""
    for _ in attentions(model):
        for masks in Masks.candidates(model):
            yield "slots", lambda tokens, masks=masks: BatchedRunner(model, lora_layers, masks, tokens)  # type: ignore[misc]
    yield "sequential", lambda tokens: SequentialRunner(model, lora_layers, has_cache=True)


def _matches_uncached(runner: ModelRunner, texts: list[list[int]], expected: list[Any]) -> bool:
    """Try sequences of different lengths, one of which is added later and one of which is removed."""
    starts = [text[:-_NUM_STEPS] for text in texts]
    try:
        found = [_last(runner.prefill(starts[:2], [None, None], 0))]
        pairs = [[(0, 0), (1, 0)]]
        found.append(runner.decode([texts[0][-3], texts[1][-3]], [None, None]))
        pairs.append([(0, 1), (1, 1)])
        found.append(_last(runner.prefill(starts[2:], [None], 0)))
        pairs.append([(2, 0)])
        runner.free_slot(0)  # the slots now hold the third and the second
        found.append(runner.decode([texts[2][-3], texts[1][-2]], [None, None]))
        pairs.append([(2, 1), (1, 2)])
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
        return False
    weight = expected[0].abs().max()
    is_exact = expected[0].dtype is torch.float32
    for logits, rows in zip(found, pairs, strict=True):
        for row, (text, step) in zip(logits, rows, strict=True):
            wanted = expected[text][len(starts[text]) - 1 + step]
            if not torch.allclose(row, wanted, rtol=0.0, atol=float(weight) * (1e-4 if is_exact else 5e-2)):
                return False
    return True


def _last(reading: PrefillSteps) -> Any:
    while True:
        try:
            next(reading)
        except StopIteration as end:
            return end.value


def _plain(model: Any, text: list[int]) -> Any:
    device = next(model.parameters()).device
    return model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]


def _texts(model: Any) -> list[list[int]]:
    """Varied tokens, except the first ones of the vocabulary, which are often special."""
    num = int(model.get_input_embeddings().weight.shape[0])
    first = min(16, num // 2)
    return [
        [first + (31 * length + 7 * place) % min(num - first, 97) for place in range(length + _NUM_STEPS)]
        for length in _LENGTHS
    ]
