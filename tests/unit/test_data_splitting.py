"""Splits never change: these values were written once and must hold for ever."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.example import Split, identity
from tunesmith.datasets.row_identity import RowIdentity
from tunesmith.datasets.splits import SplitRule, group_of, normalise, read_kept, write_kept

GOLDEN_GROUPS = [
    "fc2f4fe018e6141786b2ef0e27569309839ce98eae184d17c2057e6e1c14a9f7",
    "31161e386e3fa114c33447fb53f422fee9452b06cfbe5988ddf0c43afada0292",
    "dbe490a7d40c61c67126f0be705c0d9ca9d39e5fa1287885df4f2b0acb8bd71a",
]
GOLDEN_ID = "774a1649770b3815ace09334f1c63daadbb582539c53c4c4c49b63d049b46553"
GOLDEN_PAIR_ID = "4e8d4d8f27f373b78350182561bcb459629ef228656099cb6dfc013612bf1aba"
GOLDEN_SPLITS = "ttttvvttttttttttvttttttttttvtttttttvtttttttttttttttttttvttht"
GROUPS = st.binary(min_size=32, max_size=32).map(bytes.hex)

SHAPES = ("ua", "sua", "uaua", "ucua", "sucta", "ua|a", "ua|", "u|a", "dua", "suacua", "uCra")
PIECES = ("a", "Zebra", " ", "  ", "\t", "\n", "\x1e", "é", "ß", "\ufb01", "\u212b", "\u00a0", "\uff11\uff12", "😀")
PIECES += ("?", "capital of", "\u2028")
RECORDED = {  # ids, groups and splits of 20,000 rows by held-out and validation share
    (0.1, 0.05): "198dd96c7928b0b2662b0f010a01b0942bea27a0be7ca3c747cdb473982be714",
    (0.001, 0.0): "ba843183004ae3f6fe4f5bdd37fd053d519d3f8fa47881d5e0deff2c0e611862",
    (0.5, 0.3): "4136363f1ae9575b256fe7e566c9bfe8c441d4f9732ed93a241c6a27f17bc4f9",
    (1 / 3, 0.1): "4b27f86513f4918a08bec2953f91718b57f484fc41227b919b199a15db654d3a",
    (0.2, 0.899 - 0.2): "f90c4d4c93247e2792178186df4a5807d5584b7b655f0e206d266bd3a3764cd8",
}


def split_of(group: str, heldout_share: float, validation_share: float) -> Split:
    return SplitRule(heldout_share, validation_share).split_of(bytes.fromhex(group))


def many_rows() -> Iterator[tuple[str, list[str], int]]:
    """20,000 rows of every shape, with white space, other scripts and calls; in every seventh, one message groups."""
    dice = random.Random(20)
    for number in range(20_000):
        shape = SHAPES[number % len(SHAPES)]
        contents = []
        for code in shape.replace("|", ""):
            text = "x" + "".join(dice.choices(PIECES, k=dice.randrange(8))) + str(dice.randrange(1000))
            stored = {"role": "assistant" if code == "C" else "tool", "content": text, "weight": 0}
            if code == "C":
                call = {"id": str(number), "type": "function", "function": {"name": "f", "arguments": {"n": text}}}
                text = json.dumps({**stored, "tool_calls": [call]})
            elif code == "r":
                text = json.dumps({**stored, "tool_call_id": str(number)})
            contents.append(text)
        yield shape, contents, int(number % 7 == 0)


@pytest.mark.parametrize("shares", RECORDED)
def test_ids_groups_and_splits_of_many_rows_are_what_they_always_were(shares: tuple[float, float]) -> None:
    identity_of, digest = RowIdentity(SplitRule(*shares)).identify, hashlib.sha256()
    for row in many_rows():
        made, group, split, *_ = identity_of(row, 1)
        digest.update(made + group + bytes([split]))
    assert digest.hexdigest() == RECORDED[shares]


def test_group_that_keeps_its_split_keeps_it_through_the_file_whatever_the_shares(tmp_path: Path) -> None:
    group = group_of("u", ["What is this?"])
    write_kept(tmp_path / "kept.json", {group: Split.HELDOUT})
    rule = SplitRule(0.0, 1.0, read_kept(str(tmp_path / "kept.json")))
    assert rule.split_of(bytes.fromhex(group)) is Split.HELDOUT
    assert rule.split_of(bytes.fromhex(group_of("u", ["And that?"]))) is Split.VALIDATION


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
