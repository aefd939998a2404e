"""What a method makes of the dataset's examples: tokenised items, and the ids of what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunesmith.core.errors import DataError
from tunesmith.datasets.report import Example
from tunesmith.models.chat import ChatFormat
from tunesmith.models.packs import Item, single, with_shared_prompt
from tunesmith.profiles.profile import Method
from tunesmith.runs.spec import RunSpec

_TOLD_EVERY = 500


@dataclass(frozen=True)
class Items:
    """Examples that fit, in the dataset's order, with what the model computes for each; and what had to be left out."""

    examples: list[Example]
    items: list[Item]
    dropped: list[str]


def make_items(
    run: RunSpec, chat: ChatFormat, examples: Sequence[Example], on_progress: Callable[[int, int], None]
) -> Items:
    """Nothing is cut: an example with a conversation longer than the run allows is dropped whole."""
    made = Items([], [], [])
    limit = max_length(run)
    for number, example in enumerate(examples, start=1):
        item = item_of(run, chat, example)
        if item.longest > limit:
            made.dropped.append(example.id)
        else:
            made.examples.append(example)
            made.items.append(item)
        if number % _TOLD_EVERY == 0:
            on_progress(number, len(examples))
    return made


def item_of(run: RunSpec, chat: ChatFormat, example: Example) -> Item:
    """What the run's method computes for one example."""
    good = [chat.tokenize(example.id, example.prompt + example.chosen)] if example.chosen else []
    bad = [chat.tokenize(example.id, example.prompt + example.rejected)] if example.rejected else []
    needed = {Method.SFT: good, Method.KTO: good + bad}.get(run.method, good and bad)
    if not needed:
        raise DataError(f"recipe.method: {run.method} cannot use example {example.id}; choose a method for this data")
    if run.method is Method.SFT:
        return single(good[0])
    counts_context = run.method is Method.ORPO and run.recipe.orpo_nll == "conversation"
    are_chosen = [True] * len(good) + [False] * len(bad)
    return with_shared_prompt(example.id, good + bad, are_chosen, counts_context=counts_context)


def max_length(run: RunSpec) -> int:
    return min(run.recipe.max_length, run.base.context)
