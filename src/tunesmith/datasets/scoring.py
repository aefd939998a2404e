"""A deterministic quality score of an answer, from 0 to 1, at write time: the product of four stated components."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w")
_TAIL = 24  # characters at the end of an answer that are looked for in the rest of it
_LOOPS = 3  # so many copies of its own end make an answer a loop
_LONG = 8_000  # characters; longer answers rarely fit a context and score less
_QUOTED = 20  # a shorter question inside an answer is no echo: "yes", a name, a date


def components(question: str, answer: str) -> tuple[float, float, float, float]:
    """What each rule says about the answer to a question:

    substance   0.5 when the answer holds no letter or digit at all
    echo        0 when the answer is the question again, 0.5 when it quotes the whole of it
    repetition  1 minus the share of the answer that repeats its own end, for answers caught in a loop
    length      falls below 1 for answers longer than 8,000 characters
    """
    size = len(answer)
    substance = 1.0 if answer[:1].isalnum() or _WORD.search(answer) else 0.5
    echo = 1.0
    if question in answer:
        echo = 0.0 if len(answer.strip()) == len(question.strip()) else 0.5 if len(question) >= _QUOTED else 1.0
    repetition = 1.0
    if size >= _LOOPS * _TAIL:
        copies = answer.count(answer[-_TAIL:])
        if copies >= _LOOPS:
            repetition = max(0.0, 1.0 - copies * _TAIL / size)
    return substance, echo, repetition, 1.0 if size <= _LONG else _LONG / size


def quality_score(question: str, answer: str) -> float:
    """The product of the components, to four decimals."""
    size = len(answer)
    if (
        size <= _LONG
        and answer[:1].isalnum()
        and (size < _LOOPS * _TAIL or answer.count(answer[-_TAIL:]) < _LOOPS)
        and question not in answer
    ):
        return 1.0  # nearly every answer; the components would say the same
    substance, echo, repetition, length = components(question, answer)
    product = substance * echo * repetition * length
    return product if product == 1.0 else round(product, 4)
