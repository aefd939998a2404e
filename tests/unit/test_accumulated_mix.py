"""What a round from the bare base learns from: all that was ever learnt, evenly over its age, and what is new."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole
from tunesmith.experience.rules.experience import ExperienceClass
from tunesmith.experience.rules.mix import Accumulated, MixCandidate, Selection, select
from tunesmith.profiles.sections.experience import Mix

REPLAY = MemberRole.REPLAY


def some(num: int, first: int = 0, *, learnt: bool = False, corrected: bool = False, **more: Any) -> list[MixCandidate]:
    fields: dict[str, Any] = {
        "class_name": ExperienceClass.AMBIGUOUS if corrected else ExperienceClass.GOLD,
        "has_correction": corrected,
        "is_consumed": learnt,
        "split": Split.TRAIN,
        **more,
    }
    return [MixCandidate(id=f"{first + n}-{corrected}", seq=first + n, **fields) for n in range(num)]


def chosen(able: list[MixCandidate], most: int, policy: Mix | None = None, kind: Any = "sft") -> Selection:
    return select(able, policy or Mix(), kind, 1000, accumulated=Accumulated(most))


def trained(selection: Selection) -> Counter[MemberRole]:
    return Counter(pick.role for pick in selection.picks if pick.split is Split.TRAIN)


def test_everything_is_in_where_it_fits() -> None:
    able = [*some(700, learnt=True), *some(300, 2000), *some(90, 5000, corrected=True)]
    selection = chosen(able, 2000)
    assert trained(selection) == {REPLAY: 700, MemberRole.GOLD: 300, MemberRole.CORRECTED: 90}
    assert (selection.num_new, selection.num_trained, selection.shortages) == (390, 1090, ())
    assert selection.left_out == {}


@pytest.mark.parametrize(
    ("learnt", "new", "most", "expected"),
    [
        (4000, 100, 2000, 100),  # fewer than an ordinary round takes: all of them
        (4000, 1000, 2000, 400),  # their share
        (20_000, 1000, 2000, 140),  # an ordinary round's places at least
        (20_000, 1000, 100, 100),  # a number so small that nothing else has room
        (0, 3000, 2000, 2000),
    ],
)
def test_over_the_number_new_ones_have_their_share_and_an_ordinary_rounds_places_at_least(
    learnt: int, new: int, most: int, expected: int
) -> None:
    selection = chosen([*some(learnt, learnt=True), *some(new, 100_000)], most)
    assert (selection.num_new, selection.num_trained) == (expected, most)


def test_what_was_learnt_is_drawn_evenly_over_its_age_and_by_the_seed() -> None:
    able = some(10_000, learnt=True)
    picks = {seed: {p.id for p in chosen(able, 500, Mix(seed=seed)).picks} for seed in (1, 2)}
    assert picks[1] != picks[2]
    for ids in picks.values():
        decades = Counter(int(each.split("-")[0]) // 1000 for each in ids)
        assert set(decades.values()) == {50}, "of each tenth of the time, a tenth"


def test_template_that_has_its_share_leaves_its_places_to_others() -> None:
    able = [*some(900, learnt=True, template="a"), *some(900, 1000, learnt=True, template="b")]
    selection = chosen(able, 1000, Mix(max_template_share=0.25))
    templates = {candidate.id: candidate.template for candidate in able}
    assert Counter(templates[pick.id] for pick in selection.picks) == {"a": 250, "b": 250}


def test_pairs_are_made_of_corrections_alone_also_from_base() -> None:
    able = [*some(50, learnt=True, corrected=True), *some(50, 100, learnt=True), *some(50, 200, corrected=True)]
    assert trained(chosen(able, 2000, kind="preference")) == {REPLAY: 50, MemberRole.CORRECTED: 50}


def test_what_was_held_out_before_comes_along_where_nothing_new_is() -> None:
    able = [*some(100, learnt=True), *some(30, 200, learnt=True, split=Split.HELDOUT)]
    held_out = [pick for pick in chosen(able, 2000, Mix(min_eval_examples=0)).picks if pick.split is Split.HELDOUT]
    assert len(held_out) == 1, "without any, nothing could be prepared; the pool has the others"
    assert held_out[0].role is REPLAY


candidates = st.builds(
    MixCandidate,
    id=st.uuids().map(str),
    seq=st.integers(0, 10_000),
    class_name=st.sampled_from(ExperienceClass),
    has_correction=st.booleans(),
    is_consumed=st.booleans(),
    split=st.sampled_from(Split),
    template=st.sampled_from([None, "a", "b"]),
)


@given(st.lists(candidates, max_size=80), st.integers(1, 60), st.integers(0, 3), st.sampled_from(["sft", "preference"]))
def test_any_candidates_in_any_order_make_the_same_choice_within_the_number(
    able: list[MixCandidate], most: int, seed: int, kind: Any
) -> None:
    policy = Mix(seed=seed)
    selection = chosen(able, most, policy, kind)
    shuffled = random.Random(seed).sample(able, len(able))
    assert chosen(shuffled, most, policy, kind).picks == selection.picks
    known = {each.id: each for each in able}
    assert len({pick.id for pick in selection.picks}) == len(selection.picks)
    assert selection.num_trained <= most
    for pick in selection.picks:
        each = known[pick.id]
        assert (pick.role is REPLAY) == each.is_consumed
        assert pick.split is each.split
        assert each.class_name is not ExperienceClass.QUARANTINED
        assert each.class_name is ExperienceClass.GOLD or each.has_correction
    assert len(selection.picks) + sum(selection.left_out.values()) == len(able)
