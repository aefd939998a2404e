"""Splits never change: these values were written once and must hold for ever."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.example import Split, identity
from tunesmith.datasets.splits import group_of, normalise, split_of

GOLDEN_GROUPS = [
    "fc2f4fe018e6141786b2ef0e27569309839ce98eae184d17c2057e6e1c14a9f7",
    "31161e386e3fa114c33447fb53f422fee9452b06cfbe5988ddf0c43afada0292",
    "dbe490a7d40c61c67126f0be705c0d9ca9d39e5fa1287885df4f2b0acb8bd71a",
]
GOLDEN_ID = "774a1649770b3815ace09334f1c63daadbb582539c53c4c4c49b63d049b46553"
GOLDEN_PAIR_ID = "4e8d4d8f27f373b78350182561bcb459629ef228656099cb6dfc013612bf1aba"
GOLDEN_SPLITS = "ttttvvttttttttttvttttttttttvtttttttvtttttttttttttttttttvttht"
GROUPS = st.binary(min_size=32, max_size=32).map(bytes.hex)


def test_group_and_id_of_known_rows_are_what_they_always_were() -> None:
    golden = [
        ("u", ["What is the capital of France?"]),
        ("su", ["Be brief.", "  What\tis\nTHE capital of Fr\u00e4nce?  "]),
        ("ucu", ["Hi", "Hello!", "\uff28\uff45\uff4c\uff4c\uff4f \u212b \ufb01ne"]),
    ]
    assert [group_of(codes, contents) for codes, contents in golden] == GOLDEN_GROUPS
    assert identity("sua", ["Be brief.", "Hi", "Hello!"]) == GOLDEN_ID
    assert identity("ua|a", ["Hi", "Hello!", "Go away."]) == GOLDEN_PAIR_ID


def test_split_of_known_prompts_is_what_it_always_was() -> None:
    splits = [split_of(group_of("u", [f"Question {number}"]), 0.1, 0.05).value[0] for number in range(60)]
    assert "".join(splits) == GOLDEN_SPLITS


@given(st.one_of(st.text(), st.text(st.characters(max_codepoint=127)), st.text(" \t\n\r\v\f\x1c\x1d\x1e\x1fAz_")))
def test_normalised_text_follows_the_plain_definition(text: str) -> None:
    assert normalise(text) == " ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode()


@pytest.mark.parametrize("other", ["what  is\tthis?", " WHAT IS THIS? ", "What\u00a0is this?", "\uff37hat is this?\n"])
def test_prompts_that_differ_in_looks_only_are_one_group(other: str) -> None:
    assert group_of("u", [other]) == group_of("u", ["What is this?"])


@pytest.mark.parametrize(
    ("codes", "contents"),
    [("u", ["What is that?"]), ("su", ["What is", "this?"]), ("t", ["What is this?"]), ("uu", ["What is this?", ""])],
)
def test_other_words_or_roles_are_another_group(codes: str, contents: list[str]) -> None:
    assert group_of(codes, contents) != group_of("u", ["What is this?"])


@given(GROUPS, st.floats(0.01, 0.4), st.floats(0.0, 0.4), st.floats(0.0, 0.4))
def test_raising_the_held_out_share_never_frees_a_held_out_group(
    group: str, low: float, more: float, validation: float
) -> None:
    if split_of(group, low, validation) is Split.HELDOUT:
        assert split_of(group, low + more / 2, validation) is Split.HELDOUT


@given(GROUPS, st.floats(0.01, 0.4), st.floats(0.0, 0.4), st.floats(0.0, 0.4))
def test_changing_one_share_never_moves_a_group_between_the_other_splits(
    group: str, heldout: float, validation: float, other: float
) -> None:
    before = split_of(group, heldout, validation)
    after = split_of(group, heldout, other)
    assert (before is Split.HELDOUT) == (after is Split.HELDOUT)
    other_heldout = split_of(group, other, validation)
    assert (before is Split.VALIDATION) == (other_heldout is Split.VALIDATION)


def test_shares_of_many_prompts_are_what_was_asked_for() -> None:
    splits = [split_of(group_of("u", [f"prompt {number}"]), 0.1, 0.05) for number in range(20_000)]
    assert splits.count(Split.HELDOUT) == pytest.approx(2000, rel=0.1)
    assert splits.count(Split.VALIDATION) == pytest.approx(1000, rel=0.15)
