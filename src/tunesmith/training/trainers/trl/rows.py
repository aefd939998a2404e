"""Examples as TRL's losses take them: our tokens and masks, so TRL neither renders a template nor cuts anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunesmith.models.packs import Item
from tunesmith.profiles.profile import Method

_IGNORED = -100
Collator = Callable[[Sequence[int]], dict[str, Any]]
_Row = tuple[list[int], list[bool]]


def num_tokens(item: Item) -> int:
    """Tokens that go through the model: TRL computes the prompt of a pair twice."""
    return sum(len(item.prompt) + len(completion.ids) for completion in item.completions)


def width(item: Item) -> int:
    """Tokens in a padded batch: both conversations of a pair become as wide as the longer one."""
    return len(item.completions) * item.longest


def collator_of(method: Method, items: Sequence[Item], pad_id: int) -> Collator:
    """From the numbers of examples to the tensors that TRL's loss of that method reads."""

    def sft(numbers: Sequence[int]) -> dict[str, Any]:
        rows = _rows(items, numbers, 0)
        return {**_padded(rows, pad_id), "labels": _labels(rows)}

    def dpo(numbers: Sequence[int]) -> dict[str, Any]:
        rows = _rows(items, numbers, 0) + _rows(items, numbers, 1)
        return {**_padded(rows, pad_id), "completion_mask": (_labels(rows) != _IGNORED).long()}

    def orpo(numbers: Sequence[int]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for name, completion in (("chosen", 0), ("rejected", 1)):
            rows = _rows(items, numbers, completion)
            batch |= {f"{name}_{key}": tensor for key, tensor in _padded(rows, pad_id).items()}
            batch[f"{name}_labels"] = _labels(rows)
        return batch

    return {Method.SFT: sft, Method.DPO: dpo, Method.ORPO: orpo}[method]


def _rows(items: Sequence[Item], numbers: Sequence[int], completion: int) -> list[_Row]:
    """Whole conversations, with what is trained of them."""
    chosen = [items[number] for number in numbers]
    return [
        (
            [*item.prompt, *item.completions[completion].ids],
            [*[False] * len(item.prompt), *item.completions[completion].loss_mask],
        )
        for item in chosen
    ]


def _padded(rows: Sequence[_Row], pad_id: int) -> dict[str, Any]:
    most = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad_id] * (most - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (most - len(ids)) for ids, _ in rows]),
    }


def _labels(rows: Sequence[_Row]) -> Any:
    """The token itself where it is trained, else what the loss ignores."""
    most = max(len(ids) for ids, _ in rows)
    labels = [
        [token if is_trained else _IGNORED for token, is_trained in zip(ids, trained, strict=True)]
        for ids, trained in rows
    ]
    return torch.tensor([row + [_IGNORED] * (most - len(row)) for row in labels])
