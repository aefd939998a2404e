"""The demo's two tasks: dates in words to ISO dates (what the base can do), numeric dates to JSON (what it must learn).

Every date can be asked in several ways; the order is fixed by the seed. The base is trained on three days out of four,
and the rows of both tasks are about the others, so that no answer can have been learnt by heart.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

Row = dict[str, Any]

# fmt: off
_MONTHS = (
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
)
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
# fmt: on
_TENS = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty", 6: "sixty", 7: "seventy", 8: "eighty", 9: "ninety"}
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_FIRST = date(1950, 1, 1)
_NUM_DAYS = 36_525  # a hundred years
_SHARE_OF_ISO, _SHARE_OF_OTHER = 0.2, 0.15
_PRINTABLE = string.ascii_letters + string.digits + string.punctuation
_WORD_FORMS = ("the {day} of {month} {year}", "{month} {day} {year}", "{year} {month} {day}")
_NUMBER_FORMS = ("{d}.{m}.{y}", "{m}/{d}/{y}", "{y}-{m}-{d}")


def base_rows(num: int, seed: int) -> list[Row]:
    """Distinct rows to train the base model with: words to ISO; an ISO date, and what is no date at all, as it is.

    The days are none that another row is about. The last two kinds teach it to copy, without which a small adapter
    could not learn a new format.
    """
    return _rows(_base_row, num, seed)


def words_rows(num: int, seed: int) -> list[Row]:
    """Distinct rows of the task that the base can do: `march seventh nineteen ninety` → `1990-03-07`."""
    return _rows(_words_row, num, seed)


def numbers_rows(num: int, seed: int) -> list[Row]:
    """Distinct rows of the task that is new to the base: `7.3.1990` → `{"year":1990,"month":3,"day":7}`."""
    return _rows(_numbers_row, num, seed)


def mixed_rows(num: int, seed: int, replay: float = 0.3) -> list[Row]:
    """The new task with a share of the old one, so that the old one is not forgotten."""
    num_old = round(num * replay)
    rows = numbers_rows(num - num_old, seed) + words_rows(num_old, seed + 1)
    random.Random(seed).shuffle(rows)  # noqa: S311 (the order of examples is no secret)
    return rows


def shuffled_answers(rows: list[Row], seed: int) -> list[Row]:
    """The same prompts, each with the answer of another: the data of an adapter that must be rejected."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)  # noqa: S311
    answers = {taken: rows[order[place - 1]]["messages"][-1] for place, taken in enumerate(order)}
    return [{"messages": [*row["messages"][:-1], answers[index]]} for index, row in enumerate(rows)]


def _rows(make: Callable[[random.Random], tuple[str, str]], num: int, seed: int) -> list[Row]:
    rng = random.Random(seed)  # noqa: S311
    by_prompt: dict[str, str] = {}
    while len(by_prompt) < num:
        prompt, answer = make(rng)
        by_prompt.setdefault(prompt, answer)
    return [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in by_prompt.items()
    ]


def _base_row(rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < _SHARE_OF_ISO:
        text = _any_date(rng, for_base=True).isoformat()
        return text, text
    if kind < _SHARE_OF_ISO + _SHARE_OF_OTHER:
        text = "".join(rng.choice(_PRINTABLE) for _ in range(rng.randint(3, 14)))
        return text, text
    return _words_row(rng, for_base=True)


def _words_row(rng: random.Random, for_base: bool = False) -> tuple[str, str]:
    day = _any_date(rng, for_base)
    parts = {"day": _ordinal(day.day), "month": _MONTHS[day.month - 1], "year": _year(day.year)}
    return rng.choice(_WORD_FORMS).format(**parts), day.isoformat()


def _numbers_row(rng: random.Random) -> tuple[str, str]:
    day = _any_date(rng, for_base=False)
    prompt = rng.choice(_NUMBER_FORMS).format(d=day.day, m=day.month, y=day.year)
    return prompt, f'{{"year":{day.year},"month":{day.month},"day":{day.day}}}'


def _any_date(rng: random.Random, for_base: bool) -> date:
    while True:
        number = rng.randrange(_NUM_DAYS)
        if (number % 4 != 0) == for_base:
            return _FIRST + timedelta(days=number)


def _number(value: int) -> str:
    if value < 20:
        return _SMALL[value]
    tens, unit = divmod(value, 10)
    return _TENS[tens] + (f"-{_SMALL[unit]}" if unit else "")


def _ordinal(value: int) -> str:
    head, _, last = _number(value).rpartition("-")
    if last in _ORDINALS:
        last = _ORDINALS[last]
    elif last.endswith("y"):
        last = last[:-1] + "ieth"
    else:
        last = last.removesuffix("e") + "th"  # twelve → twelfth is the only irregular one left
    last = last.replace("twelvth", "twelfth")
    return f"{head}-{last}" if head else last


def _year(value: int) -> str:
    century, rest = divmod(value, 100)
    if rest == 0:
        return "two thousand" if century == 20 else f"{_number(century)} hundred"
    if rest < 10:
        return f"two thousand {_number(rest)}" if century == 20 else f"{_number(century)} oh {_number(rest)}"
    return f"{_number(century)} {_number(rest)}"
