"""Finds contamination: rows that overlap a held-out case, which a model that learns them passes without being better.

The split by hash already separates identical prompts. This finds near-duplicates by shared sequences of six words.
Sequences that several cases share are ignored: they belong to a template or a common phrase.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tunesmith.datasets.screens.finding import ScreenFinding

_SIZE = 6  # words in a sequence
_MIN_SHARE = 0.5  # of the sequences of a case
_MIN_WORDS = 0.75  # of all words of a question and a case that have a sequence in common
_COMMON = 3  # so many cases make a sequence common
_MIN_WHOLE = 4  # words of a short question that is compared as a whole
_LONG = 64  # words; of longer texts every fourth sequence is looked up first
_STRIDE = 4
_MIN_SAME_QUESTION = 1 / 3  # of the longer words, for the answer to count
_LONG_WORD = 4
_MARKS = b".,;:!?\"'()[]{}"
_FOLD = bytes(ord(" ") if byte in _MARKS else ord(chr(byte).lower()) for byte in range(128)) + bytes(range(128, 256))
"""Signs of arithmetic and code stay: they are what differs between two questions."""

HeldCase = tuple[str, str]
"""What a case asks, and its answer."""


class ContaminationCheck:
    """The held-out cases, indexed for comparison with rows."""

    def __init__(self, cases: Iterable[HeldCase]) -> None:
        texts = [(number, part, _words(text)) for number, case in enumerate(cases) for part, text in enumerate(case)]
        num_in: Counter[bytes] = Counter()
        for _, _, words in texts:
            num_in.update(set(_sequences(words)))
        self._where: dict[bytes, list[int]] = {}
        self._num: list[int] = []
        self._part: list[int] = []
        self._words: list[frozenset[bytes]] = []
        self._whole: set[bytes] = set()
        self._questions = {number: _longer(words) for number, part, words in texts if part == 0}
        self._numbers = {number: _numbers(words) for number, part, words in texts if part == 0}
        self._case: list[int] = []
        for number, part, words in texts:
            own = {sequence for sequence in _sequences(words) if num_in[sequence] < _COMMON}
            for sequence in own:
                self._where.setdefault(sequence, []).append(len(self._num))
            self._num.append(len(own))
            self._part.append(part)
            self._case.append(number)
            if part == 0 and _MIN_WHOLE <= len(words) < _SIZE:
                self._whole.add(b" ".join(words))
            self._words.append(frozenset(words))

    def find(self, question: str, answer: str) -> ScreenFinding | None:
        """Return a finding if the row overlaps a case too much."""
        asked = _words(question)
        if len(asked) < _SIZE and b" ".join(asked) in self._whole:
            return _finding("asks what a held-out case asks, beside another system message or in another conversation")
        for part, words in ((0, asked), (1, _words(answer))):
            for text, share in self._common(part, words):
                what = "question" if part == 0 else "answer"
                if self._is_same_question(part, self._case[text], asked):
                    told = f"has {share:.0%} of the sequences of {_SIZE} words of a held-out case in its {what}"
                    return _finding(told)
        return None

    def _is_same_question(self, part: int, case: int, asked: list[bytes]) -> bool:
        """With another number it is another question; and an answer counts only if the questions are alike."""
        if not self._numbers[case].issubset(asked):
            return False
        return part == 0 or _same(self._questions[case], _longer(asked)) >= _MIN_SAME_QUESTION

    def _common(self, part: int, words: list[bytes]) -> list[tuple[int, float]]:
        """Texts of the cases of which so much is in these words, with how much."""
        where = self._where
        stride = _STRIDE if len(words) > _LONG else 1
        if not any(
            b" ".join(words[place : place + _SIZE]) in where for place in range(0, len(words) - _SIZE + 1, stride)
        ):
            return []
        hits = Counter(text for sequence in set(_sequences(words)) for text in where.get(sequence, ()))
        mine = frozenset(words)
        return [
            (text, num / self._num[text])
            for text, num in hits.items()
            if self._part[text] == part
            and (num / self._num[text] >= _MIN_SHARE or _same(self._words[text], mine) >= _MIN_WORDS)
        ]


def _words(text: str) -> list[bytes]:
    return text.encode("utf-8", "surrogatepass").translate(_FOLD).split()


def _numbers(words: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(word for word in words if any(48 <= byte <= 57 for byte in word))


def _finding(reason: str) -> ScreenFinding:
    return ScreenFinding("evaluation_overlap", 0, 0, 0, f"{reason}, so it is never trained", "")


def _sequences(words: list[bytes]) -> Iterable[bytes]:
    return (b" ".join(words[place : place + _SIZE]) for place in range(len(words) - _SIZE + 1))


def _longer(words: list[bytes]) -> frozenset[bytes]:
    return frozenset(word for word in words if len(word) >= _LONG_WORD)


def _same(one: frozenset[bytes], two: frozenset[bytes]) -> float:
    return len(one & two) / len(one | two) if one or two else 1.0


def write_cases(path: Path, cases: Sequence[HeldCase]) -> None:
    """The cases as a file that any process can read."""
    path.write_text(json.dumps(cases), encoding="utf-8")


def read_cases(path: Path) -> ContaminationCheck:
    return ContaminationCheck([(question, answer) for question, answer in json.loads(path.read_text(encoding="utf-8"))])
