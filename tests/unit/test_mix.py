"""The mix: shares, shortage rules, caps and seed; any candidates have an answer, in whatever order they come."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole, MixKind
from tunesmith.experience.rules.experience import ExperienceClass
from tunesmith.experience.rules.mix import FIRST_ROUND, FULL, LEARNT, WAITS, MixCandidate, Selection, role_of, select
from tunesmith.profiles.sections.experience import Mix

GOLD, CORRECTED, REPLAY = MemberRole.GOLD, MemberRole.CORRECTED, MemberRole.REPLAY
NUM_HELDOUT = 1000


def _some(num: int, what: str, first: int = 0, **changes: Any) -> list[MixCandidate]:
    """Candidates to train on: gold, corrected or replay."""
    fields: dict[str, Any] = {
        "class_name": ExperienceClass.AMBIGUOUS if what == "corrected" else ExperienceClass.GOLD,
        "has_correction": what == "corrected",
        "is_consumed": what == "replay",
        "split": Split.TRAIN,
        **changes,
    }
    return [MixCandidate(id=f"{what}-{n}", seq=n, **fields) for n in range(first, first + num)]


def _many(gold: int = 0, corrected: int = 0, replay: int = 0) -> list[MixCandidate]:
    found = [*_some(gold, "gold"), *_some(corrected, "corrected", 10_000), *_some(replay, "replay", 20_000)]
    random.Random(1).shuffle(found)
    return found


def _roles(selection: Selection) -> tuple[int, int, int]:
    num = Counter(pick.role for pick in selection.picks if pick.split is Split.TRAIN)
    return num[GOLD], num[CORRECTED], num[REPLAY]


@pytest.mark.parametrize(
    ("there", "taken", "shortages"),
    [
        ((500, 500, 500), (100, 40, 60), ()),
        ((500, 10, 500), (130, 10, 60), ("30 corrected missing: gold took 30 of their places",)),
        ((60, 500, 500), (60, 80, 60), ("40 gold missing: corrected ones took 40 of their places",)),
        ((500, 500, 0), (100, 40, 0), ("60 replay missing: their places stay empty",)),
        ((50, 20, 500), (50, 20, 30), None),
        ((0, 0, 500), (0, 0, 0), None),
        ((0, 0, 0), (0, 0, 0), None),
    ],
)
def test_shares_and_shortage_rules(
    there: tuple[int, int, int], taken: tuple[int, int, int], shortages: tuple[str, ...] | None
) -> None:
    selection = select(_many(*there), Mix(), "sft", NUM_HELDOUT)
    assert _roles(selection) == taken
    assert selection.num_new == taken[0] + taken[1]
    if shortages is not None:
        assert selection.shortages == shortages
    assert selection.left_out.get(WAITS, 0) == sum(there[:2]) - sum(taken[:2])
    assert selection.left_out.get(LEARNT, 0) == there[2] - taken[2]  # and never "no place left": it is learnt


@pytest.mark.parametrize(
    ("there", "taken"),
    [((500, 500), (143, 57)), ((0, 186), (0, 186)), ((500, 0), (200, 0)), ((3, 4), (3, 4)), ((0, 0), (0, 0))],
)
def test_places_of_replay_are_for_new_ones_where_nothing_was_ever_learnt(
    there: tuple[int, int], taken: tuple[int, int]
) -> None:
    selection = select(_many(*there), Mix(), "sft", NUM_HELDOUT, is_first_round=True)
    assert _roles(selection) == (*taken, 0)
    assert selection.shortages[0] == FIRST_ROUND
    assert not any("replay missing" in told for told in selection.shortages)
    assert selection.left_out.get(WAITS, 0) == sum(there) - sum(taken)


def test_preference_takes_only_what_has_a_correction() -> None:
    selection = select(_many(500, 90, 50), Mix(), "preference", NUM_HELDOUT)
    assert _roles(selection) == (0, 90, 0)  # what was replayed has no correction either
    assert selection.left_out["without a correction to make a pair of"] == 550


def test_what_is_poor_and_not_corrected_never_is_in() -> None:
    for name in (ExperienceClass.AMBIGUOUS, ExperienceClass.NEEDS_IMPROVEMENT, ExperienceClass.QUARANTINED):
        selection = select(_some(100, "gold", class_name=name), Mix(), "sft", NUM_HELDOUT)
        assert (selection.picks, sum(selection.left_out.values())) == ((), 100)
    poor = _some(100, "corrected", class_name=ExperienceClass.QUARANTINED)
    assert select(poor, Mix(), "sft", NUM_HELDOUT).left_out == {"quarantined": 100}


def _beside(selection: Selection, split: Split) -> list[str]:
    return sorted(pick.id for pick in selection.picks if pick.split is split)


def test_held_out_and_validation_come_along_up_to_the_cap_old_and_new() -> None:
    held = _some(30, "gold", 100, split=Split.HELDOUT)
    new = [*_some(60, "gold"), *held, *_some(9, "gold", 200, split=Split.VALIDATION)]
    selection = select(new, Mix(), "sft", 10)
    assert Counter(pick.split for pick in selection.picks) == {Split.TRAIN: 60, Split.HELDOUT: 10, Split.VALIDATION: 9}
    assert selection.num_new == 60
    assert selection.left_out == {WAITS: 20}
    assert _beside(selection, Split.HELDOUT) == [f"gold-{n}" for n in range(100, 130, 3)]


def test_held_out_are_taken_in_proportion_so_that_later_rounds_have_some_too() -> None:
    able = [*_some(1400, "gold"), *_some(1000, "gold", 2000, split=Split.HELDOUT)]
    assert len(_beside(select(able, Mix(), "sft", 1000), Split.HELDOUT)) == 100  # 140 of 1400 are trained
    assert len(_beside(select(able, Mix(min_eval_examples=300), "sft", 1000), Split.HELDOUT)) == 300


def test_held_out_before_come_along_again_only_where_new_ones_are_too_few() -> None:
    old = _some(40, "replay", 300, split=Split.HELDOUT)
    able = [*_some(60, "gold"), *_some(5, "gold", 100, split=Split.HELDOUT), *old]
    selection = select(able, Mix(min_eval_examples=8), "sft", 1000)
    assert Counter(pick.role for pick in selection.picks if pick.split is Split.HELDOUT) == {GOLD: 5, REPLAY: 3}
    assert selection.left_out == {"its prompt is held out, and was in before": 37}


@pytest.mark.parametrize("what", ["template", "source"])
def test_one_template_or_source_has_its_share_only_where_there_are_two(what: str) -> None:
    policy = Mix.model_validate({f"max_{what}_share": 0.25})
    one = _some(300, "gold", **{what: "a"})
    assert _roles(select(one, policy, "sft", 0))[0] == 140
    two = [*one, *_some(20, "gold", 900, **{what: "b"}), *_some(20, "gold", 1900)]
    selection = select(two, policy, "sft", 0)
    assert _roles(selection)[0] == 50 + 20 + 20
    assert selection.left_out[FULL[what]] == 250


def test_corrected_come_first_then_the_newest() -> None:
    ids = [pick.id for pick in select(_many(3, 3, 3), Mix(min_new=1), "sft", 0).picks]
    assert ids[:6] == [f"corrected-{n}" for n in (10_002, 10_001, 10_000)] + ["gold-2", "gold-1", "gold-0"]


def test_another_seed_takes_others() -> None:
    one, other = ({pick.id for pick in select(_many(gold=400), Mix(seed=seed), "sft", 0).picks} for seed in (1, 2))
    assert len(one) == len(other) == 140
    assert one != other


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gold": 0.0, "corrected": 0.0}, "no place for new"),
        ({"max_examples": 60}, "min_new: 50 is more than the 42 places"),
        ({"min_new": 141}, "141 is more than the 140"),
        ({"max_template_share": 0.0}, "greater than 0"),
    ],
)
def test_policy_that_leaves_no_room_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Mix(**changes)


CANDIDATES = st.lists(
    st.builds(
        MixCandidate,
        id=st.uuids().map(str),
        seq=st.integers(1, 10**9),
        class_name=st.sampled_from(ExperienceClass),
        has_correction=st.booleans(),
        is_consumed=st.booleans(),
        split=st.sampled_from(Split),
        template=st.sampled_from([None, "a", "b", "c"]),
        task_type=st.sampled_from([None, "order", "greeting"]),
    ),
    max_size=60,
    unique_by=lambda candidate: candidate.id,
)
POLICIES = st.builds(
    Mix,
    gold=st.floats(0.1, 1.0),
    corrected=st.floats(0.0, 1.0),
    replay=st.floats(0.0, 1.0),
    min_new=st.just(1),
    max_examples=st.integers(20, 60),
    max_template_share=st.floats(0.01, 1.0),
    seed=st.integers(0, 5),
    task_types=st.sampled_from([(), ("order",)]),
)


@given(CANDIDATES, POLICIES, st.sampled_from(["sft", "preference"]), st.integers(0, 20), st.randoms())
def test_any_candidates_keep_every_rule(
    candidates: list[MixCandidate], policy: Mix, kind: MixKind, max_heldout: int, rng: random.Random
) -> None:
    selection = select(candidates, policy, kind, max_heldout)
    by_id = {candidate.id: candidate for candidate in candidates}
    assert len({pick.id for pick in selection.picks}) == len(selection.picks)
    assert len(selection.picks) + sum(selection.left_out.values()) == len(candidates)  # each is in, or told why not
    trained = [pick for pick in selection.picks if pick.split is Split.TRAIN]
    assert len(trained) <= policy.max_examples
    assert sum(pick.role is REPLAY for pick in trained) <= policy.replay_places
    for split in (Split.HELDOUT, Split.VALIDATION):
        beside = [pick for pick in selection.picks if pick.split is split]
        assert REPLAY not in {pick.role for pick in beside} or len(beside) <= policy.min_eval_examples
    for pick in selection.picks:
        candidate = by_id[pick.id]
        assert (pick.split, pick.role) == (candidate.split, role_of(candidate, policy, kind))
        assert (pick.role is REPLAY) == candidate.is_consumed
        assert kind == "sft" or candidate.has_correction
    able = [c for c in candidates if c.split is Split.TRAIN and isinstance(role_of(c, policy, kind), MemberRole)]
    named = Counter(by_id[pick.id].template for pick in trained if by_id[pick.id].template is not None)
    if len({c.template for c in able} - {None}) > 1:
        assert max(named.values(), default=0) <= max(1, int(policy.max_examples * policy.max_template_share))
    assert sum(pick.split is Split.HELDOUT for pick in selection.picks) <= max_heldout
    shuffled = rng.sample(candidates, len(candidates))
    assert select(shuffled, policy, kind, max_heldout) == selection
