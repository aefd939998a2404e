"""What a reader can see: invisible texts say nothing, and answers that look alike are one answer."""

from __future__ import annotations

import unicodedata

import pytest

from tunesmith.core.visible_text import is_seen, looks, plainly_seen, says_nothing

INVISIBLE = [
    "", " ", "\t\n", "\u00a0", "\u200b", "\ufeff", "\u2060", "\u200d\u200c", "\u00ad", "\u034f", "\u115f\u1160",
    "\u3164", "\uffa0",
    "\u2800", "\u180e", "\u0301\u0302", "\u20dd", "\u2028\u2029", "\U000e0020", "\U000e0fff", "\ufff0",
    "\u2065", "\u202e", "\ufe0f", "\x01\x02", "\u0085", "\ufffc", "\U0001d173", "\u3000", "\u061c", " \u200b \ufeff\n",
]  # fmt: skip
SEEN = [
    "a",
    ".",
    "0",
    "é",
    "e\u0301",
    "你",
    "한",
    "ก",
    "नमस्ते",
    "مرحبا",
    "👍",
    "👩\u200d💻",
    "—",
    "\u200bx\u200b",
    "☃",
    "Ж",
]


@pytest.mark.parametrize("text", INVISIBLE)
def test_text_of_which_nothing_shows_says_nothing(text: str) -> None:
    assert says_nothing(text)


@pytest.mark.parametrize("text", SEEN)
def test_text_that_shows_says_something(text: str) -> None:
    assert not says_nothing(text)


def test_quick_answer_never_invents_a_text() -> None:
    """Every character that the quick pattern takes is one that shows; unassigned ones aside."""
    taken = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000 and plainly_seen(chr(code))]
    assert len(taken) > 20_000
    assert [each for each in taken if not is_seen(each) and unicodedata.category(each) != "Cn"] == []


@pytest.mark.parametrize(
    "other", ["Yes, it is. ", "Yes,  it\nis.", "\u200bYes, it is.", "Yes, it\u00a0is.", "Yes, it is.\ufeff"]
)
def test_answers_that_differ_in_what_cannot_be_seen_look_the_same(other: str) -> None:
    assert looks(other) == looks("Yes, it is.")


@pytest.mark.parametrize("other", ["Yes, it is!", "Yes,it is.", "yes, it is.", "Yes, it i\u0301s."])
def test_answers_that_differ_for_a_reader_look_different(other: str) -> None:
    assert looks(other) != looks("Yes, it is.")
