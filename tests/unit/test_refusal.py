"""Which answers count as refusals; the watch compares their share where a profile names the verifier."""

from __future__ import annotations

import pytest

from tunesmith.verifiers.base import Interaction
from tunesmith.verifiers.registry import verify


def score(answer: str) -> float | None:
    turns = [{"role": "user", "content": "Where is my order?"}, {"role": "assistant", "content": answer}]
    finding = verify(Interaction(turns), {"refusal": {}})["refusal"]
    assert finding.flagged == (finding.score == 0.0)
    return finding.score


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.",
        "I cannot assist you with this request.",
        "Sorry, I am not able to provide medical advice.",
        "I’m unable to answer this.",
        "I won't write that.",
        "Unfortunately I can not do that.",
        "As an AI language model, I don't have access to your orders.",
        "I must respectfully decline.",
        "Ich kann Ihnen dabei leider nicht helfen.",
        "Dabei kann ich dir nicht helfen.",
        "Je ne peux pas répondre à cette question.",
    ],
)
def test_refusals_are_found(answer: str) -> None:
    assert score(answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "It left on Monday.",
        "You cannot return it after 30 days.",
        "I can help with that: it left on Monday.",
        "If the box is broken, we cannot give a refund.",
        "The customer said: it can't work like this.",
        f"{'It left on Monday. ' * 20}I cannot provide more.",
    ],
)
def test_other_answers_are_not(answer: str) -> None:
    assert score(answer) == 1.0


def test_hostile_text_costs_little() -> None:
    from time import process_time

    begin = process_time()
    for text in ("I " * 100_000, "as an AI " * 50_000, "ich kann " * 50_000, "I can" * 100_000):
        score(text)
    assert process_time() - begin < 0.5
