"""The loss of each method: SFT, DPO, ORPO and KTO over the log-probabilities of completions.

A step's loss is a sum over its micro-batches: every term is divided by the totals of the *whole step* (trained tokens,
pairs, answers), so it does not depend on how the step is split into micro-batches or over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from tunesmith.models.packs import Item
from tunesmith.models.segments import to_device
from tunesmith.profiles.profile import Method, Recipe

Reference = Mapping[str, Sequence[float]]
"""By item, the log-probability of each of its completions before training."""
Scorer = Callable[[Sequence[Item]], Mapping[str, Sequence[float]]]
"""Returns by item the log-probability of each completion under the current weights, without gradients."""


@dataclass(frozen=True)
class LossDenominators:
    """The totals of a whole step that its loss terms are divided by."""

    num_trained: int
    """Tokens in the loss mask."""
    num_learnt: int
    """Tokens of the chosen answers, and of their context where that counts: the NLL term of ORPO."""
    num_items: int
    num_answers: int


def loss_denominators(items: Sequence[Item]) -> LossDenominators:
    return LossDenominators(
        num_trained=sum(item.num_trained for item in items),
        num_learnt=sum(
            item.completions[0].num_trained + (item.num_context if item.counts_context else 0) for item in items
        ),
        num_items=len(items),
        num_answers=sum(len(item.completions) for item in items),
    )


@dataclass(frozen=True)
class LossTerms:
    """What a micro-batch adds to the step's loss and metrics."""

    loss: Any
    figures: dict[str, Any] = field(default_factory=dict)
    """Metrics as numbers or scalar tensors: on CUDA they are not read here, to avoid a synchronization."""


class Sft:
    """The mean negative log-likelihood of all trained tokens."""

    needs_reference = False

    def kl_estimate(self, items: Sequence[Item], score: Scorer) -> float:
        """Return the sum over items of the KL estimate, needed before the first pass of a step; zero but for KTO."""
        return 0.0

    def terms(self, items: Sequence[Item], spans: Any, step: LossDenominators, kl_estimate: float) -> LossTerms:
        """Return the loss terms. `spans`: sums of log-probabilities, per item its context, then each completion."""
        return LossTerms(-_answers(items, spans).sum() / step.num_trained)


class Dpo(Sft):
    """Direct preference optimisation: the better answer gains on the worse one, relative to the reference."""

    needs_reference = True

    def __init__(self, recipe: Recipe, reference: Reference) -> None:
        self._beta, self._reference = recipe.beta, reference

    def terms(self, items: Sequence[Item], spans: Any, step: LossDenominators, kl_estimate: float) -> LossTerms:
        before = _like(spans, [self._reference[item.id] for item in items])
        rewards = self._beta * (_answers(items, spans).view(-1, 2) - before)
        margins = rewards[:, 0] - rewards[:, 1]
        return LossTerms(-logsigmoid(margins).sum() / step.num_items, _pair_figures(margins, step))


class Orpo(Sft):
    """Odds-ratio preference optimisation: learn the better answer, and make it likelier than the worse one."""

    def __init__(self, recipe: Recipe) -> None:
        self._beta = recipe.beta

    def terms(self, items: Sequence[Item], spans: Any, step: LossDenominators, kl_estimate: float) -> LossTerms:
        sums = _answers(items, spans).view(-1, 2)
        lengths = _like(sums, [[completion.num_trained for completion in item.completions] for item in items])
        means = sums / lengths
        log_odds = means[:, 0] - means[:, 1] - (_log1mexp(means[:, 0]) - _log1mexp(means[:, 1]))
        context = spans[:: 1 + 2]
        learning = -(sums[:, 0].sum() + context.sum()) / step.num_learnt
        figures = _pair_figures(self._beta * (means[:, 0] - means[:, 1]), step)
        return LossTerms(learning - self._beta * logsigmoid(log_odds).sum() / step.num_items, figures)


class Kto(Sft):
    """Kahneman-Tversky optimisation: chosen answers gain and rejected ones lose, relative to an estimate of the KL."""

    needs_reference = True

    def __init__(self, recipe: Recipe, reference: Reference, kl_items: Mapping[str, Item]) -> None:
        """`kl_items`: for each item its prompt with the answer to another one, to estimate the KL with."""
        self._recipe, self._reference, self._kl_items = recipe, reference, kl_items

    def kl_estimate(self, items: Sequence[Item], score: Scorer) -> float:
        """Return the sum of log-ratios to the reference of mismatched prompts and answers: the KL estimate of KTO."""
        partners = [self._kl_items[item.id] for item in items]
        now = score(partners)
        return sum(now[partner.id][0] - self._reference[partner.id][0] for partner in partners)

    def terms(self, items: Sequence[Item], spans: Any, step: LossDenominators, kl_estimate: float) -> LossTerms:
        recipe = self._recipe
        kl = max(0.0, kl_estimate / step.num_items)
        completions = [completion for item in items for completion in item.completions]
        before = _like(spans, [value for item in items for value in self._reference[item.id]])
        signs = _like(spans, [1.0 if completion.is_chosen else -1.0 for completion in completions])
        weights = _like(
            spans,
            [
                recipe.desirable_weight if completion.is_chosen else recipe.undesirable_weight
                for completion in completions
            ],
        )
        ratios = _answers(items, spans) - before
        losses = weights * (1.0 - torch.sigmoid(signs * recipe.beta * (ratios - kl)))
        is_right = ((signs * (ratios - kl)) > 0).sum()
        return LossTerms(
            losses.sum() / step.num_answers,
            {"reward_accuracy": is_right / step.num_answers, "kl": kl * len(items) / step.num_items},
        )


Objective = Sft | Dpo | Orpo | Kto


def kl_partners(items: Sequence[Item]) -> dict[str, Item]:
    """Pair each item's prompt with the first completion of the next item that has another prompt."""
    made: dict[str, Item] = {}
    for index, item in enumerate(items):
        others = (items[(index + step) % len(items)] for step in range(1, len(items)))
        other = next((candidate for candidate in others if candidate.prompt != item.prompt), item)
        made[item.id] = Item(f"{item.id}/kl", item.prompt, other.completions[:1])
    return made


def objective_of(method: Method, recipe: Recipe, reference: Reference, kl_items: Mapping[str, Item]) -> Objective:
    match method:
        case Method.DPO:
            return Dpo(recipe, reference)
        case Method.ORPO:
            return Orpo(recipe)
        case Method.KTO:
            return Kto(recipe, reference, kl_items)
        case _:
            return Sft()


def _answers(items: Sequence[Item], spans: Any) -> Any:
    """Return the spans of the completions, without those of the context."""
    keep: list[int] = []
    first = 0
    for item in items:
        keep += range(first + 1, first + 1 + len(item.completions))
        first += 1 + len(item.completions)
    return spans[to_device(torch.tensor(keep), spans.device)]


def _like(spans: Any, values: Sequence[Any]) -> Any:
    return to_device(torch.tensor(values, dtype=spans.dtype), spans.device)


def _pair_figures(margins: Any, step: LossDenominators) -> dict[str, Any]:
    margins = margins.detach()
    return {
        "reward_accuracy": (margins > 0).sum() / step.num_items,
        "reward_margin": margins.sum() / step.num_items,
    }


def _log1mexp(values: Any) -> Any:
    """log(1 − eˣ) of negative numbers, exact on both sides of −log 2; a certainty counts as almost one."""
    values = values.clamp(max=-1e-7)
    return torch.where(values < -0.6931472, torch.log1p(-torch.exp(values)), torch.log(-torch.expm1(values)))
