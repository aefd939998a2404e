"""Format-blind match: the same answer in another format counts, another answer never does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.evaluation.evaluators.format_blind import is_same

SAME = [
    ("Paris", "Paris"),
    ("  paris.\n", "Paris"),
    ("The capital is Paris.", "Paris"),
    ("Answer: **Paris**", "Paris"),
    ("x = 42", "42"),
    ("Let me think.\nParis\nI hope this helps!", "Paris"),
    ("```\nParis\n```", "paris"),
    ("Sure:\n```python\nprint( 1 )\n```\nDone.", "print( 1 )"),
    ("1,200", "1200"),
    ("New   York", "new york"),
    ('{"a": 1, "b": "X"}', '{"b":"x","a":1.0}'),
    ('Here you are:\n```json\n{"a": [1, 2]}\n```\nAnything else?', '{"a":[1,2]}'),
    ('{} no, I meant {"a": null}', '{"a": null}'),
    ("", ""),
]
OTHER = [
    ("London", "Paris"),
    ("Paris, London, Rome", "Paris"),
    ("not Paris", "Paris"),
    ("14", "4"),
    ("", "Paris"),
    ('{"a": 2}', '{"a": 1}'),
    ('{"a": true}', '{"a": 1}'),
    ('{"a": 1}, but cut: {"a": 1', '{"a": 1, "b": 2}'),
    ('"a": 1', '{"a": 1}'),
    ("[" * 200_000, "[1]"),
    ("{" + '"a":{' * 100, '{"a": 1}'),
]


@pytest.mark.parametrize(("answer", "reference"), SAME)
def test_same_answer_in_another_format_counts(answer: str, reference: str) -> None:
    assert is_same(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), OTHER)
def test_another_answer_never_counts(answer: str, reference: str) -> None:
    assert not is_same(answer, reference)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("abc XY", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), values, min_size=1), st.sampled_from([None, 2]))
def test_layout_of_json_and_prose_around_it_never_matter(value: dict[str, Any], indent: int | None) -> None:
    written = json.dumps(dict(reversed(value.items())), indent=indent)
    assert is_same(f"Of course! Here it is:\n{written}\nBye.", json.dumps(value))
