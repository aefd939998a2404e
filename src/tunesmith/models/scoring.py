"""Log-probabilities of the assistant's tokens: the loss that training lowers and evaluation compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tunesmith.models.attention import segmented
from tunesmith.models.chat import Tokenized
from tunesmith.models.packs import Completion, Item, MicroBatch, Packer, packed, padded, single


class ComputeBackend(Protocol):
    """Computes log-probabilities, and their gradients, with one model."""

    model: Any

    def start_step(self) -> None:
        """Zero the gradients."""

    def prefetch(self, batch: MicroBatch) -> None:
        """Prepare on the host a batch that `span_log_probs` will be called with next; optional."""

    def span_log_probs(self, batch: MicroBatch) -> Any:
        """Return the sum of token log-probabilities of each span, with gradients where they are enabled."""


class TransformersBackend:
    """Computes with transformers and PEFT: slower, and correct for every model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def start_step(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def prefetch(self, batch: MicroBatch) -> None:
        _ = batch.varlen  # computed now and cached

    def span_log_probs(self, batch: MicroBatch) -> Any:
        return span_log_probs(self.model, batch)


def span_log_probs(model: Any, batch: MicroBatch) -> Any:
    """Return the sum of token log-probabilities of each span, with gradients where they are enabled.

    Logits are computed only at positions that predict a target token.
    """
    device = next(model.parameters()).device
    inputs = {"input_ids": batch.ids.to(device), "position_ids": batch.positions.to(device), "use_cache": False}
    columns = batch.columns.to(device)
    with mixed_precision(device), contextlib.ExitStack() as stack:
        if batch.segments is not None:
            inputs |= stack.enter_context(segmented(model, batch.segments, batch.varlen))
        logits = model(**inputs, logits_to_keep=columns).logits.flatten(0, 1)
    if logits.shape[0] != batch.picks.shape[0] or batch.segments is None:
        logits = logits[batch.picks.to(device)]
    losses = torch.nn.functional.cross_entropy(logits.float(), batch.wanted.to(device), reduction="none")
    sums = torch.zeros(batch.num_spans, dtype=losses.dtype, device=device)
    return sums.index_add(0, batch.spans.to(device), -losses)


def answer_log_probs(
    backend: ComputeBackend, items: Sequence[Item], packer: Packer, on_items: Callable[[int], bool] | None = None
) -> dict[str, list[float]] | None:
    """Return by item the log-probability of each completion under the current weights; None if told to stop.

    `on_items` gets the number of items done and returns whether to continue.
    """
    log_probs: dict[str, list[float]] = {}
    with evaluating(backend.model):
        for group in packer.groups(items):
            some = [items[index] for index in group]
            sums = backend.span_log_probs(packer.micro_batch(some)).double().tolist()
            for item in some:
                log_probs[item.id] = sums[1 : 1 + len(item.completions)]
                sums = sums[1 + len(item.completions) :]
            if on_items is not None and not on_items(len(log_probs)):
                return None
    return log_probs


def supports_packing(model: Any) -> bool:
    """Whether this model gives packed sequences the same log-probabilities as separate ones.

    Not every architecture passes the segment attention through to its layers, so it is tested on a small batch.
    """
    items = probe_items(model)
    with evaluating(model):
        try:
            together = span_log_probs(model, packed(items))
        except (TypeError, ValueError, RuntimeError):
            return False
        apart = span_log_probs(model, padded(items, pad_id=0))
    weight = next(model.parameters())
    coarse = weight.dtype is not torch.float32 or weight.is_cuda  # there, products are made in bf16
    return bool(torch.allclose(together, apart, rtol=2e-2 if coarse else 1e-4, atol=1e-2 if coarse else 1e-5))


def probe_items(model: Any) -> list[Item]:
    """Return one item of each kind: a shared prompt with two completions, and a single conversation."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # the first tokens are often special ones: an embedding of zeros, as padding has, lets gradients overflow
    first_id = min(16, vocabulary // 2)
    ids = [first_id + 7 * number % min(vocabulary - first_id, 97) for number in range(40)]
    first, second = tuple(ids[:9]), tuple(ids[9:30])
    return [
        Item("a", first, (_all_in_loss(ids[30:34]), _all_in_loss(ids[34:40]))),
        Item("b", (), (_all_in_loss(second, skip=1),)),
    ]


def _all_in_loss(ids: Sequence[int], skip: int = 0) -> Completion:
    return Completion(tuple(ids), tuple(index >= skip for index in range(len(ids))))


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
            sums = span_log_probs(model, padded([single(examples[index]) for index in indices], pad_id))
            for index, total in zip(indices, sums.double().tolist()[1::2], strict=True):
                means[index] = -total / examples[index].num_trained
            done += len(indices)
            if on_batch is not None and not on_batch(done):
                return None
    return means


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
