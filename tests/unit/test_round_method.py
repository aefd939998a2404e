"""Pairs or answers: what `recipe.method: auto` makes of a round, and why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.orchestration.rounds.method import PAIRWISE, MethodFacts, choose_method
from tunesmith.profiles.profile import Method


def facts(**changes: Any) -> MethodFacts:
    """Facts under which a round learns pairs, unless they are changed."""
    fields: dict[str, Any] = {
        "method": Method.AUTO, "trainer": "native", "can_pair": True, "is_accumulated": False, "num_pairs": 60,
        "num_others": 200, "min_new": 50,
    }  # fmt: skip
    return MethodFacts(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, "preference", "recipe.method is auto: 60 corrected answers make pairs"),
        (
            {"num_pairs": 49},
            "sft",
            "49 corrected answers to make pairs of, and a round wants 50 (experience.mix.min_new",
        ),
        ({"can_pair": False, "trainer": "mine"}, "sft", "trainer mine cannot do orpo, so corrections are learnt as"),
        ({"is_accumulated": True}, "sft", "from base, good answers and corrections are learnt together"),
        ({"last_was_pairs": True}, "sft", "the last round learnt pairs, and 200 good answers wait"),
        ({"last_was_pairs": True, "num_others": 10}, "preference", "60 corrected answers make pairs"),
        ({"method": Method.DPO, "num_pairs": 0}, "preference", "recipe.method is dpo"),
        ({"method": Method.SFT}, "sft", "recipe.method is sft"),
    ],
)
def test_choice_and_reason(changes: dict[str, Any], kind: str, reason: str) -> None:
    chosen = choose_method(facts(**changes))
    assert chosen.kind == kind
    assert reason in chosen.reason


@given(
    st.builds(
        MethodFacts,
        method=st.sampled_from(Method),
        trainer=st.just("native"),
        can_pair=st.booleans(),
        is_accumulated=st.booleans(),
        num_pairs=st.integers(0, 100),
        num_others=st.integers(0, 100),
        min_new=st.integers(1, 60),
        last_was_pairs=st.booleans(),
    )
)
def test_auto_never_makes_pairs_that_cannot_be_trained_and_lets_nothing_wait_for_ever(known: MethodFacts) -> None:
    chosen = choose_method(known)
    if known.method is not Method.AUTO:
        assert (chosen.kind == "preference") == (known.method in PAIRWISE)
    elif chosen.kind == "preference":
        assert known.can_pair
        assert known.num_pairs >= known.min_new
        assert not (known.last_was_pairs and known.num_others >= known.min_new)
