"""How surprised the model is by the assistant's tokens: the loss that training lowers and evaluation compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from tunesmith.models.attention import segmented
from tunesmith.models.chat import Tokenized
from tunesmith.models.packs import Branch, Item, Layout, Packer, packed, padded, single


class Engine(Protocol):
    """A model, and a way to compute with it what training and scoring ask for."""

    model: Any

    def start_step(self) -> None:
        """Gradients are zero again."""

    def foresee(self, layout: Layout) -> None:
        """This one will be asked for next: what can be prepared without the device may be prepared now."""

    def span_log_probs(self, layout: Layout) -> Any:
        """Of each span of the layout, the sum of the log-probabilities of its tokens; keeps the graph for training."""


class PlainEngine:
    """As transformers and peft compute it: slow, and right for every model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def start_step(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def foresee(self, layout: Layout) -> None:
        _ = layout.spread  # it is kept with the layout

    def span_log_probs(self, layout: Layout) -> Any:
        return span_log_probs(self.model, layout)


def span_log_probs(model: Any, layout: Layout) -> Any:
    """Of each span of the layout, the sum of the log-probabilities of its tokens; keeps the graph for training.

    Logits are computed only where a token is wanted.
    """
    device = next(model.parameters()).device
    inputs = {"input_ids": layout.ids.to(device), "position_ids": layout.positions.to(device), "use_cache": False}
    columns = layout.columns.to(device)
    with mixed_precision(device), contextlib.ExitStack() as stack:
        if layout.segments is not None:
            inputs |= stack.enter_context(segmented(model, layout.segments, layout.spread))
        logits = model(**inputs, logits_to_keep=columns).logits.flatten(0, 1)
    if logits.shape[0] != layout.picks.shape[0] or layout.segments is None:
        logits = logits[layout.picks.to(device)]
    losses = torch.nn.functional.cross_entropy(logits.float(), layout.wanted.to(device), reduction="none")
    sums = torch.zeros(layout.num_spans, dtype=losses.dtype, device=device)
    return sums.index_add(0, layout.spans.to(device), -losses)


def answer_log_probs(
    engine: Engine, items: Sequence[Item], packer: Packer, on_items: Callable[[int], bool] | None = None
) -> dict[str, list[float]] | None:
    """By item, the sum of the log-probabilities of each of its answers, as the model is now; None if told to stop.

    `on_items` hears how many are done and returns whether to go on.
    """
    found: dict[str, list[float]] = {}
    with evaluating(engine.model):
        for group in packer.groups(items):
            some = [items[index] for index in group]
            sums = engine.span_log_probs(packer.layout(some)).double().tolist()
            for item in some:
                found[item.id] = sums[1 : 1 + len(item.branches)]
                sums = sums[1 + len(item.branches) :]
            if on_items is not None and not on_items(len(found)):
                return None
    return found


def keeps_apart(model: Any) -> bool:
    """Whether this model, asked now, computes packed sequences as it computes them alone.

    Not every architecture passes on what attention needs to know; this one is asked instead of believed.
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
    """A little of everything that a pack can hold: a shared prompt with two answers, and one that stands alone."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # the first tokens are often special ones: an embedding of zeros, as padding has, lets gradients overflow
    first_id = min(16, vocabulary // 2)
    ids = [first_id + 7 * number % min(vocabulary - first_id, 97) for number in range(40)]
    first, second = tuple(ids[:9]), tuple(ids[9:30])
    return [
        Item("a", first, (_all_trained(ids[30:34]), _all_trained(ids[34:40]))),
        Item("b", (), (_all_trained(second, skip=1),)),
    ]


def _all_trained(ids: Sequence[int], skip: int = 0) -> Branch:
    return Branch(tuple(ids), tuple(place >= skip for place in range(len(ids))))


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
