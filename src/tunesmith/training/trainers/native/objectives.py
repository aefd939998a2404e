"""What each method lowers: SFT, DPO, ORPO and KTO over the log-probabilities of answers.

A step's loss is a sum over its passes: every term is divided by what the *whole step* holds (trained tokens, pairs,
answers), so it is the same however the step is cut into passes or spread over processes.
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
"""By item, what the model gave each of its answers before training: sums of log-probabilities."""
Scorer = Callable[[Sequence[Item]], Mapping[str, Sequence[float]]]
"""What the model, as it is now, gives each answer of these items; without gradients."""


@dataclass(frozen=True)
class Weights:
    """What a whole step holds; its terms are divided by these."""

    num_trained: int
    """Tokens of answers that count."""
    num_learnt: int
    """Tokens of the first answers, and of their context where that counts: what ORPO learns by heart."""
    num_items: int
    num_answers: int


def weigh(items: Sequence[Item]) -> Weights:
    return Weights(
        num_trained=sum(item.num_trained for item in items),
        num_learnt=sum(
            item.completions[0].num_trained + (item.num_context if item.counts_context else 0) for item in items
        ),
        num_items=len(items),
        num_answers=sum(len(item.completions) for item in items),
    )


@dataclass(frozen=True)
class Terms:
    """What a pass adds to the step's loss, and to the figures people look at."""

    loss: Any
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers, or tensors of one: on CUDA nobody waits for them here."""


class Sft:
    """The mean negative log-likelihood of all trained tokens."""

    needs_reference = False

    def aside(self, items: Sequence[Item], score: Scorer) -> float:
        """A sum over items that must be known before the first pass of a step; none here."""
        return 0.0

    def terms(self, items: Sequence[Item], spans: Any, step: Weights, aside: float) -> Terms:
        """`spans`: of each item its context and each of its answers, as sums of log-probabilities."""
        return Terms(-_answers(items, spans).sum() / step.num_trained)


class Dpo(Sft):
    """Direct preference optimisation: the better answer gains on the worse one, relative to the reference."""

    needs_reference = True

    def __init__(self, recipe: Recipe, reference: Reference) -> None:
        self._beta, self._reference = recipe.beta, reference

    def terms(self, items: Sequence[Item], spans: Any, step: Weights, aside: float) -> Terms:
        before = _like(spans, [self._reference[item.id] for item in items])
        rewards = self._beta * (_answers(items, spans).view(-1, 2) - before)
        margins = rewards[:, 0] - rewards[:, 1]
        return Terms(-logsigmoid(margins).sum() / step.num_items, _pair_figures(margins, step))


class Orpo(Sft):
    """Odds-ratio preference optimisation: learn the better answer, and make it likelier than the worse one."""

    def __init__(self, recipe: Recipe) -> None:
        self._beta = recipe.beta

    def terms(self, items: Sequence[Item], spans: Any, step: Weights, aside: float) -> Terms:
        sums = _answers(items, spans).view(-1, 2)
        lengths = _like(sums, [[completion.num_trained for completion in item.completions] for item in items])
        means = sums / lengths
        log_odds = means[:, 0] - means[:, 1] - (_log1mexp(means[:, 0]) - _log1mexp(means[:, 1]))
        context = spans[:: 1 + 2]
        learning = -(sums[:, 0].sum() + context.sum()) / step.num_learnt
        figures = _pair_figures(self._beta * (means[:, 0] - means[:, 1]), step)
        return Terms(learning - self._beta * logsigmoid(log_odds).sum() / step.num_items, figures)


class Kto(Sft):
    """Kahneman-Tversky optimisation: good answers gain and bad ones lose, measured from where the model drifts to."""

    needs_reference = True

    def __init__(self, recipe: Recipe, reference: Reference, drift_items: Mapping[str, Item]) -> None:
        """`drift_items`: for each item its prompt with an answer to another one, to measure drift by."""
        self._recipe, self._reference, self._drift_items = recipe, reference, drift_items

    def aside(self, items: Sequence[Item], score: Scorer) -> float:
        """How much likelier, in all, answers that do not belong to their prompts became since the start."""
        partners = [self._drift_items[item.id] for item in items]
        now = score(partners)
        return sum(now[partner.id][0] - self._reference[partner.id][0] for partner in partners)

    def terms(self, items: Sequence[Item], spans: Any, step: Weights, aside: float) -> Terms:
        recipe = self._recipe
        drift = max(0.0, aside / step.num_items)
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
        losses = weights * (1.0 - torch.sigmoid(signs * recipe.beta * (ratios - drift)))
        is_right = ((signs * (ratios - drift)) > 0).sum()
        return Terms(
            losses.sum() / step.num_answers,
            {"reward_accuracy": is_right / step.num_answers, "drift": drift * len(items) / step.num_items},
        )


Objective = Sft | Dpo | Orpo | Kto


def drift_partners(items: Sequence[Item]) -> dict[str, Item]:
    """For each item its prompt with the first answer of the next item that has another prompt."""
    made: dict[str, Item] = {}
    for place, item in enumerate(items):
        others = (items[(place + step) % len(items)] for step in range(1, len(items)))
        other = next((candidate for candidate in others if candidate.prompt != item.prompt), item)
        made[item.id] = Item(f"{item.id}/drift", item.prompt, other.completions[:1])
    return made


def objective_of(method: Method, recipe: Recipe, reference: Reference, drift_items: Mapping[str, Item]) -> Objective:
    match method:
        case Method.DPO:
            return Dpo(recipe, reference)
        case Method.ORPO:
            return Orpo(recipe)
        case Method.KTO:
            return Kto(recipe, reference, drift_items)
        case _:
            return Sft()


def _answers(items: Sequence[Item], spans: Any) -> Any:
    """The sums of the answers, the context's left out."""
    keep: list[int] = []
    place = 0
    for item in items:
        keep += range(place + 1, place + 1 + len(item.completions))
        place += 1 + len(item.completions)
    return spans[to_device(torch.tensor(keep), spans.device)]


def _like(spans: Any, values: Sequence[Any]) -> Any:
    return to_device(torch.tensor(values, dtype=spans.dtype), spans.device)


def _pair_figures(margins: Any, step: Weights) -> dict[str, Any]:
    margins = margins.detach()
    return {
        "reward_accuracy": (margins > 0).sum() / step.num_items,
        "reward_margin": margins.sum() / step.num_items,
    }


def _log1mexp(values: Any) -> Any:
    """log(1 − eˣ) of negative numbers, exact on both sides of −log 2; a certainty counts as almost one."""
    values = values.clamp(max=-1e-7)
    return torch.where(values < -0.6931472, torch.log1p(-torch.exp(values)), torch.log(-torch.expm1(values)))
