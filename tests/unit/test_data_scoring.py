"""The score of an answer and the set of hashes: small pure parts of dataset preparation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.dedupe import SeenHashes
from tunesmith.datasets.scoring import components, quality_score

QUESTION = "Which city is the capital of France?"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris.", (1.0, 1.0, 1.0, 1.0)),
        ("?!", (0.5, 1.0, 1.0, 1.0)),
        ("{}", (0.5, 1.0, 1.0, 1.0)),
        ("(ü)", (1.0, 1.0, 1.0, 1.0)),
        (QUESTION, (1.0, 0.0, 1.0, 1.0)),
        (f" {QUESTION}\n", (1.0, 0.0, 1.0, 1.0)),
        (f"{QUESTION} Paris.", (1.0, 0.5, 1.0, 1.0)),
        ("It is the city of Paris! " * 10, (1.0, 1.0, 0.04, 1.0)),
        ("巴黎是法国的首都,也是最大的城市,人口超过两百万人。" * 5, (1.0, 1.0, 1 - 5 * 24 / 130, 1.0)),
        (" ".join(map(str, range(10_000)))[:16_000], (1.0, 1.0, 1.0, 0.5)),
    ],
)
def test_each_component_sees_its_fault_only(answer: str, expected: tuple[float, ...]) -> None:
    assert components(QUESTION, answer) == pytest.approx(expected)
    product = 1.0
    for part in expected:
        product *= part
    assert quality_score(QUESTION, answer) == pytest.approx(product, abs=1e-4)


def test_short_question_inside_an_answer_is_no_echo() -> None:
    assert quality_score("May 5", "May 5 was a Tuesday.") == 1.0


@given(st.text(min_size=1), st.text(min_size=1))
def test_score_is_a_number_from_0_to_1_and_the_same_each_time(question: str, answer: str) -> None:
    assert 0.0 <= quality_score(question, answer) <= 1.0
    assert quality_score(question, answer) == quality_score(question, answer)


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=200))
def test_seen_hashes_answer_like_a_set(values: list[int]) -> None:
    seen, plain = SeenHashes(), set()
    for value in values:
        assert seen.add(value) == (value not in plain)
        plain.add(value)
    assert seen.num == len(plain)


def test_seen_hashes_keep_everything_when_they_grow() -> None:
    values = [(number * 0x9E3779B97F4A7C15) % 2**64 for number in range(200_000)]
    seen = SeenHashes()
    assert all(seen.add(value) for value in values)
    assert not any(seen.add(value) for value in values)
