"""A task for a real base: a short note with a date in one of many forms → the date as YYYY-MM-DD, and nothing else.

The same notes come as answers to learn and as pairs with a plausible mistake. No two notes are about the same day, so
that no held-out answer can have been learnt by heart.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

Row = dict[str, Any]

INSTRUCTION = "Give the date in the note as YYYY-MM-DD."
_FIRST = date(1950, 1, 1)
_NUM_DAYS = 36_525  # a hundred years
# fmt: off
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
_EVENTS = (
    "Dentist", "Rent due", "Call Anna", "Flight to Oslo", "Invoice 48", "Car service", "Team dinner", "Exam",
    "Concert", "Return the books", "Pay the tax", "Order paper", "Lease ends", "Visit Karl", "Gas meter read",
)
# fmt: on
_FORMS = ("{d}.{m}.{y}", "{m}/{d}/{y}", "{d} {month} {y}", "{month} {d}, {y}", "{d}-{short}-{y}")
"""With dots the day comes first, with slashes the month: what a base cannot know, and an adapter can learn."""


@dataclass(frozen=True)
class Note:
    """One note: what is asked, the right answer, and one a careless model could give."""

    text: str
    right: str
    wrong: str

    instruction: str | None = INSTRUCTION

    @property
    def prompt(self) -> list[Row]:
        system = [] if self.instruction is None else [{"role": "system", "content": self.instruction}]
        return [*system, {"role": "user", "content": self.text}]


def make_notes(num: int, seed: int) -> list[Note]:
    """Notes about different days; the order is fixed by the seed."""
    rng = random.Random(seed)
    days = rng.sample(range(_NUM_DAYS), num)
    return [_note(_FIRST + timedelta(days=number), rng) for number in days]


def supervised_rows(notes: Sequence[Note]) -> list[Row]:
    """Notes with the answer to learn."""
    return [{"messages": [*note.prompt, _answer(note.right)]} for note in notes]


def preference_rows(notes: Sequence[Note]) -> list[Row]:
    """Notes with the right answer and a mistake."""
    return [
        {"prompt": note.prompt, "chosen": [_answer(note.right)], "rejected": [_answer(note.wrong)]} for note in notes
    ]


def names_the_day(answer: str, right: str) -> bool:
    """Whether an answer holds the year, the month (as a number or a name) and the day of the right one, in any form."""
    year, month, day = map(int, right.split("-"))
    words = [word.casefold() for word in re.findall(r"[A-Za-z]+|\d+", answer)]
    numbers = Counter(int(word) for word in words if word.isdigit() and len(word) < 9)
    if any(word[:3] == _MONTHS[month - 1][:3].casefold() for word in words):
        numbers[month] += 1
    return all(numbers[number] >= times for number, times in Counter((year, month, day)).items())


def _answer(text: str) -> Row:
    return {"role": "assistant", "content": text}


def _note(day: date, rng: random.Random) -> Note:
    month = _MONTHS[day.month - 1]
    written = rng.choice(_FORMS).format(d=day.day, m=day.month, y=day.year, month=month, short=month[:3])
    return Note(f"{rng.choice(_EVENTS)}, {written}", day.isoformat(), rng.choice(_mistakes(day, written)))


def _mistakes(day: date, written: str) -> list[str]:
    """Answers that look right at a glance; none of them is."""
    right = day.isoformat()
    found = [
        f"The date is {right}.",
        f"{day.day:02}-{day.month:02}-{day.year}",
        f"{day.year}-{day.day:02}-{day.month:02}",
        f"{day.year}-{day.month}-{day.day}",
        written,
    ]
    return [answer for answer in found if answer != right]
