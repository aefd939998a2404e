"""How surprised the model is by the assistant's tokens: the loss that training lowers and evaluation compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tunesmith.modeling.chat import Tokenized

_IGNORED = -100


def nll_sums(model: Any, batch: Sequence[Tokenized], pad_id: int) -> Any:
    """Per conversation, the sum of the negative log-likelihoods of its trained tokens; keeps the graph for training.

    Rows are padded on the right, where a causal model never looks back from, so no attention mask is needed.
    Logits are computed only for the columns in which some row has a trained token.
    """
    ids, targets = _pad(batch, pad_id)
    device = next(model.parameters()).device
    columns = (targets != _IGNORED).any(dim=0).nonzero().squeeze(1)
    wanted = targets[:, columns].to(device)
    with mixed_precision(device):
        logits = model(input_ids=ids.to(device), logits_to_keep=columns.to(device), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), wanted.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    return losses.view(wanted.shape).sum(dim=1)


def mean_nlls(
    model: Any,
    examples: Sequence[Tokenized],
    pad_id: int,
    batches: Sequence[Sequence[int]],
    on_batch: Callable[[int], bool] | None = None,
) -> list[float] | None:
    """Per conversation, the mean loss over its trained tokens, in the order given; None if `on_batch` said stop.

    `batches` holds indices into `examples`; `on_batch` hears how many are done and returns whether to go on.
    """
    means = [float("nan")] * len(examples)
    done = 0
    with evaluating(model):
        for indices in batches:
            sums = nll_sums(model, [examples[index] for index in indices], pad_id).double().tolist()
            for index, total in zip(indices, sums, strict=True):
                means[index] = total / examples[index].num_trained
            done += len(indices)
            if on_batch is not None and not on_batch(done):
                return None
    return means


def batches_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length, each group within `max_tokens` padded tokens (or a single row)."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    groups: list[list[int]] = []
    for index in order:
        # sorted by length, so the newcomer is the widest row of its group
        if groups and (len(groups[-1]) + 1) * lengths[index] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def batches_by_count(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices grouped by similar length, `batch_size` rows each."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without gradients and dropout; the model goes back to what it was doing afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def mixed_precision(device: Any) -> Any:
    """On CUDA the base is bf16 and what is trained is fp32: let torch match them. On a CPU everything is fp32."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def _pad(batch: Sequence[Tokenized], pad_id: int) -> tuple[Any, Any]:
    """Token ids, and for each place the token that must come next, or `_IGNORED`."""
    width = max(len(example) for example in batch)
    ids = torch.full((len(batch), width), pad_id, dtype=torch.long)
    targets = torch.full((len(batch), width), _IGNORED, dtype=torch.long)
    for row, example in enumerate(batch):
        tokens = torch.tensor(example.ids, dtype=torch.long)
        ids[row, : len(example)] = tokens
        following = torch.where(torch.tensor(example.trained[1:], dtype=torch.bool), tokens[1:], _IGNORED)
        targets[row, : len(example) - 1] = following
    return ids, targets
