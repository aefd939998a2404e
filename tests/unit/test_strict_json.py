"""JSON without a key twice in one object, and text that a database can hold."""

from __future__ import annotations

import time

import pytest

from tunesmith.core import strict_json
from tunesmith.core.errors import DataError


class _Twice(Exception):
    pass


def test_loads_keeps_values_and_long_numbers_as_written() -> None:
    text = '{"a": 123456789012345678901234567890, "b": {"a": [1.5, null]}}'
    assert strict_json.loads(text, _Twice) == {"a": 123456789012345678901234567890, "b": {"a": [1.5, None]}}


@pytest.mark.parametrize("text", ['{"x": [{"b": 1, "a": 2, "a": 3, "b": 4}]}', b'{"a": {}, "\\u0061": 1}'])
def test_loads_names_the_first_key_that_comes_again_at_any_depth(text: str | bytes) -> None:
    with pytest.raises(_Twice, match=r"^a$"):
        strict_json.loads(text, _Twice)


def test_loads_refuses_a_constant_when_asked() -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    assert strict_json.loads("[NaN]", _Twice)
    with pytest.raises(ValueError, match="NaN"):
        strict_json.loads("[NaN]", _Twice, parse_constant=refuse)


def test_refuse_repeated_sees_only_the_keys_it_is_told() -> None:
    strict_json.refuse_repeated('{"other": 1, "other": 2, "role": 3}', {"role"}, _Twice)
    with pytest.raises(_Twice, match=r"^role$"):
        strict_json.refuse_repeated('[{"role": 1, "other": 2, "role": 3}]', {"role"}, _Twice)


def test_loads_of_very_many_keys_with_a_repeated_one_at_the_end_takes_linear_time() -> None:
    names = [f'"{number}": 0' for number in range(200_000)]
    started = time.process_time()
    with pytest.raises(_Twice, match=r"^199999$"):
        strict_json.loads("{" + ",".join([*names, '"199999": 1']) + "}", _Twice)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(("text", "kept"), [("a\0b", "a\ufffdb"), ("a\ud800b", "a?b"), ("añ😀", "añ😀")])
def test_storable_marks_what_no_database_stores(text: str, kept: str) -> None:
    assert strict_json.storable(text) == kept
    if text == kept:
        strict_json.check_storable(text, "the reason")
    else:
        with pytest.raises(DataError, match="the reason holds a character that no database can store"):
            strict_json.check_storable(text, "the reason")
