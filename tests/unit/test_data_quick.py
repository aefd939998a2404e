"""The short ways of preparing say exactly what the long ways say."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.datasets.example import BadRow, Split, identity, num_prompt_of
from tunesmith.datasets.formats.lines import QuickLines
from tunesmith.datasets.row_identity import RowIdentity
from tunesmith.datasets.rows import RowParser
from tunesmith.datasets.scoring import components, quality_score
from tunesmith.datasets.splits import SplitRule, group_of

TEXTS = st.text(
    st.sampled_from("abcXYZ  \t\n\r\x1e\x1f.,'\"\\é ﬁß\u2028😀") | st.characters(exclude_categories=["Cs"]),
    min_size=0,
    max_size=40,
)
SAID = TEXTS.map(lambda text: text.replace("\0", "") or "x")
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "critic"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS | st.none()}, optional={"weight": st.just(1)})
)
SHAPES = st.sampled_from(["ua", "sua", "uaua", "ucua", "sucta", "ua|a", "ua|", "u|a", "dua", "suacua"])


@given(MESSAGES, st.booleans())
def test_quick_line_is_the_row_that_the_long_way_reads_or_none(messages: Any, in_ascii: bool) -> None:
    line = json.dumps({"messages": messages}, ensure_ascii=in_ascii).encode()
    quick = QuickLines().read(line, orjson.loads(line))
    try:
        row = RowParser().own(line, orjson.loads(line))
    except BadRow:
        assert quick is None
        return
    assert quick in (None, row)


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}',
        b'{"messages": [{"role": "user", "content": "a\\u0000"}, {"role": "assistant", "content": "c"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c", "name": 1}]}',
        b'{"messages": {"role": "user"}}',
        b'{"messages": [["role"]]}',
        b'{"messages": []}',
        b'{"messages": [{"role": ["user"], "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
    ],
)
def test_quick_line_leaves_what_is_unusual_to_the_long_way(line: bytes) -> None:
    assert QuickLines().read(line, orjson.loads(line)) is None


def test_quick_line_reads_what_is_usual() -> None:
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    assert QuickLines().read(line, orjson.loads(line)) == ("ua", ["a", "b"])


def plain_split_of(group: str, heldout_share: float, validation_share: float) -> Split:
    """The rule as it was first written down, in numbers."""
    place = int(group[:16], 16)
    if place < heldout_share * 2.0**64:
        return Split.HELDOUT
    return Split.VALIDATION if place >= (1.0 - validation_share) * 2.0**64 else Split.TRAIN


@given(SHAPES, st.data(), st.sampled_from([0.001, 0.1, 0.5]), st.sampled_from([0.0, 0.05, 0.3]))
def test_identified_row_has_the_id_group_split_and_score_of_the_long_way(
    shape: str, data: st.DataObject, heldout: float, validation: float
) -> None:
    num = len(shape.replace("|", ""))
    contents = data.draw(st.lists(SAID, min_size=num, max_size=num))
    num_group = data.draw(st.sampled_from([0, 1]))
    made, group, split, quality, line, num_chars, *_ = RowIdentity(SplitRule(heldout, validation)).identify(
        (shape, contents, num_group), 7
    )
    num_prompt, bar = num_prompt_of(shape), shape.find("|")
    assert made.hex() == identity(shape, contents)
    assert group.hex() == group_of(shape[: num_group or num_prompt], contents)
    assert list(Split)[split] is plain_split_of(group.hex(), heldout, validation)
    assert quality == quality_score(contents[num_prompt - 1], contents[bar - 1 if bar > num_prompt else -1])
    assert (line, num_chars) == (7, sum(map(len, contents)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.05, 0.25, 0.3333333333333333, 0.899, 1.0])
def test_identified_split_at_the_very_edge_of_a_share_is_that_of_the_long_way(share: float) -> None:
    edge = int(share * 2.0**64)
    for place in {max(edge - 1, 0), edge, edge + 1, 2**64 - 1} - {2**64, 2**64 + 1}:
        group = place.to_bytes(8, "big") + hashlib.sha256().digest()[:24]
        for shares in ((share, 0.0), (0.0, 1.0 - share)):
            assert SplitRule(*shares).split_of(group) is plain_split_of(group.hex(), *shares)


@given(TEXTS, TEXTS | st.text("ab ", max_size=200))
def test_score_is_the_product_of_its_components(question: str, answer: str) -> None:
    substance, echo, repetition, length = components(question, answer)
    assert quality_score(question, answer) == round(substance * echo * repetition * length, 4)
