"""Whether a round learns pairs or answers, where `recipe.method` is auto; with the reason in words. Pure.

A correction can be learnt as the better half of a pair (orpo), or as an answer among others (sft). Only corrections
make pairs, so a round of pairs leaves answers that are good already for another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.datasets.report import MixKind
from tunesmith.profiles.profile import Method

PAIRWISE = frozenset({Method.DPO, Method.ORPO, Method.KTO})


@dataclass(frozen=True)
class MethodFacts:
    """Everything that the choice depends on."""

    method: Method
    """`recipe.method`."""
    trainer: str
    can_pair: bool
    """The trainer can do orpo."""
    is_accumulated: bool
    """The round starts from base, on everything that was ever learnt."""
    num_pairs: int
    """New corrected answers to train on."""
    num_others: int
    """New answers to train on that are good as they are."""
    min_new: int
    last_was_pairs: bool = False
    """The campaign's last round that came to a result learnt pairs."""


@dataclass(frozen=True)
class MethodChoice:
    kind: MixKind
    reason: str


def choose_method(facts: MethodFacts) -> MethodChoice:
    """Pairs, where there are enough of them and nothing waits longer for it."""
    if facts.method is not Method.AUTO:
        kind: MixKind = "preference" if facts.method in PAIRWISE else "sft"
        return MethodChoice(kind, f"recipe.method is {facts.method}")
    if facts.is_accumulated:
        return _answers("from base, good answers and corrections are learnt together")
    if facts.num_pairs < facts.min_new:
        told = f"{facts.num_pairs} corrected answers to make pairs of"
        return _answers(f"{told}, and a round wants {facts.min_new} (experience.mix.min_new)")
    if not facts.can_pair:
        return _answers(f"trainer {facts.trainer} cannot do orpo, so corrections are learnt as answers")
    if facts.last_was_pairs and facts.num_others >= facts.min_new:
        return _answers(f"the last round learnt pairs, and {facts.num_others} good answers wait")
    return MethodChoice("preference", f"recipe.method is auto: {facts.num_pairs} corrected answers make pairs")


def _answers(why: str) -> MethodChoice:
    return MethodChoice("sft", f"recipe.method is auto: {why}")
