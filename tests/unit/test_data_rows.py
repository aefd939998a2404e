"""One line in, one canonical row or one exact complaint out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.data import a_chat, a_pair, an_importer, read_row
from tunesmith.datasets.example import BadRow

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"role": "tool", "content": "42"}


_CALLED, _CONTENT = "messages[1].function_call", "messages[1].content"


def parsed(row: Any) -> tuple[str, list[str]] | None:
    return read_row(row)


def complaint(row: Any, *, is_unterminated: bool = False) -> BadRow:
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    with pytest.raises(BadRow) as caught:
        an_importer().read(line, is_unterminated=is_unterminated)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("row", "shape", "contents"),
    [
        ({"messages": [USER, ANSWER]}, "ua", ["Why?", "Because."]),
        ({"messages": [SYSTEM, USER, ANSWER]}, "sua", ["Be brief.", "Why?", "Because."]),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, "uaua", ["Why?", "Because.", "Why?", "Because."]),
        ({"messages": [USER, ANSWER, TOOL, TOOL, ANSWER]}, "uatta", ["Why?", "Because.", "42", "42", "Because."]),
        (
            {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]},
            "ucua",
            ["Why?", "Because.", "Why?", "Because."],
        ),
        ({"prompt": "Why?", "completion": "Because."}, "ua", ["Why?", "Because."]),
        ({"prompt": [SYSTEM, USER], "completion": "Because."}, "sua", ["Be brief.", "Why?", "Because."]),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "ucua", ["Why?", "Because.", "Why?", "Because."]),
        ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, "ua|a", ["Why?", "Because.", "No."]),
        (
            {"prompt": [USER], "chosen": [ANSWER, USER, ANSWER], "rejected": [ANSWER]},
            "uaua|a",
            ["Why?", "Because.", "Why?", "Because.", "Because."],
        ),
        ({"prompt": "Why?", "completion": "Because.", "label": True}, "ua|", ["Why?", "Because."]),
        ({"prompt": "Why?", "completion": "Because.", "label": False}, "u|a", ["Why?", "Because."]),
        (
            {"prompt": [SYSTEM, USER, ANSWER, USER], "completion": [ANSWER], "label": False},
            "sucu|a",
            ["Be brief.", "Why?", "Because.", "Why?", "Because."],
        ),
    ],
)
def test_row_in_each_form_becomes_shape_and_texts(row: Any, shape: str, contents: list[str]) -> None:
    assert parsed(row) == (shape, contents)


def test_forms_of_one_conversation_become_one_row() -> None:
    whole = parsed({"messages": [USER, ANSWER]})
    assert whole == parsed({"prompt": "Why?", "completion": "Because."})
    assert whole == parsed({"prompt": [USER], "completion": [ANSWER]})


@pytest.mark.parametrize("line", [b"", b"   ", b"\t\r"])
def test_blank_line_is_no_row(line: bytes) -> None:
    assert parsed(line) is None


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ([], "not_object", ""),
        ([a_chat()], "not_object", ""),
        (7, "not_object", ""),
        (None, "not_object", ""),
        ("text", "not_object", ""),
        (True, "not_object", ""),
        ({}, "missing_field", ""),
        ({"text": "hello"}, "missing_field", ""),
        ({"prompt": "Why?"}, "missing_field", "completion"),
        ({"completion": "x"}, "missing_field", "prompt"),
        ({"prompt": "Why?", "chosen": "x"}, "missing_field", "rejected"),
        ({"messages": [USER, ANSWER], "completion": "x"}, "ambiguous_form", ""),
        ({"messages": [USER, ANSWER], "chosen": "x"}, "ambiguous_form", ""),
        ({"prompt": "Why?", "completion": "x", "rejected": "y"}, "ambiguous_form", ""),
        ({"messages": "hello"}, "wrong_type", "messages"),
        ({"messages": None}, "wrong_type", "messages"),
        ({"messages": {"role": "user"}}, "wrong_type", "messages"),
        ({"messages": []}, "empty_list", "messages"),
        ({"messages": [USER, "Because."]}, "wrong_type", "messages[1]"),
        ({"messages": [USER, None]}, "wrong_type", "messages[1]"),
        ({"messages": [USER, []]}, "wrong_type", "messages[1]"),
        ({"messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
        ({"messages": [USER, {"role": "assistant"}]}, "missing_field", "messages[1].content"),
        ({"messages": [{**USER, "role": 1}]}, "wrong_type", "messages[0].role"),
        ({"messages": [{**USER, "role": ["user"]}]}, "wrong_type", "messages[0].role"),
        ({"messages": [{**USER, "role": "wizard"}]}, "bad_role", "messages[0].role"),
        ({"messages": [{**USER, "role": "User"}]}, "bad_role", "messages[0].role"),
        ({"messages": [ANSWER]}, "role_order", "messages[0].role"),
        ({"messages": [USER, USER, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [USER, ANSWER, ANSWER]}, "role_order", "messages[2].role"),
        ({"messages": [USER, SYSTEM, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [SYSTEM, SYSTEM, USER, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [SYSTEM, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [TOOL, ANSWER]}, "role_order", "messages[0].role"),
        ({"messages": [USER, TOOL, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [USER, ANSWER, TOOL, USER, ANSWER]}, "role_order", "messages[3].role"),
        ({"messages": [{**USER, "content": ""}, ANSWER]}, "empty_content", "messages[0].content"),
        ({"messages": [USER, {**ANSWER, "content": " \n\t\u00a0"}]}, "empty_content", "messages[1].content"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, "wrong_type", "messages[1].content"),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "text"}]}]}, "wrong_type", "messages[1].content"),
        ({"messages": [USER]}, "no_answer", "messages"),
        ({"messages": [USER, ANSWER, USER]}, "no_answer", "messages"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no_answer", "messages"),
        ({"messages": [USER, {**ANSWER, "weight": 2}]}, "bad_weight", "messages[1].weight"),
        ({"messages": [USER, {**ANSWER, "weight": True}]}, "bad_weight", "messages[1].weight"),
        ({"messages": [USER, {**ANSWER, "weight": "1"}]}, "bad_weight", "messages[1].weight"),
        ({"messages": [{**USER, "weight": 1}, ANSWER]}, "bad_weight", "messages[0].weight"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, "unsupported_field", _CALLED),
        ({"messages": [USER, {**ANSWER, "content": None, "audio": {"id": "1"}}]}, "unsupported_field", _CONTENT),
        ({"prompt": 7, "completion": "x"}, "wrong_type", "prompt"),
        ({"prompt": " ", "completion": "x"}, "empty_content", "prompt"),
        ({"prompt": "Why?", "completion": ""}, "empty_content", "completion"),
        ({"prompt": [USER, ANSWER], "completion": "x"}, "role_order", "prompt"),
        ({"prompt": [SYSTEM], "completion": "x"}, "role_order", "prompt"),
        ({"prompt": [], "completion": "x"}, "empty_list", "prompt"),
        ({"prompt": "Why?", "completion": [USER]}, "role_order", "completion[0].role"),
        ({"prompt": "Why?", "completion": [ANSWER, USER]}, "no_answer", "completion"),
        ({"prompt": [USER, {**ANSWER, "weight": 1}, USER], "completion": "x"}, "bad_weight", "prompt[1].weight"),
        ({"prompt": "Why?", "chosen": "x", "rejected": "x"}, "same_answers", "rejected"),
        ({"prompt": "Why?", "chosen": [ANSWER], "rejected": "Because."}, "same_answers", "rejected"),
        ({"prompt": "Why?", "chosen": [USER, ANSWER], "rejected": [ANSWER]}, "role_order", "chosen[0].role"),
        (
            {"prompt": "Why?", "chosen": [{**ANSWER, "weight": 0}, USER, ANSWER], "rejected": "x"},
            "bad_weight",
            "chosen",
        ),
    ],
)
def test_bad_row_is_refused_with_reason_and_field(row: Any, reason: str, field: str) -> None:
    bad = complaint(row)
    assert (bad.reason.value, bad.field) == (reason, field)


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"prompt": "Why?", "completion": "x", "label": "yes"}, "bad_label", "label"),
        ({"prompt": "Why?", "completion": "x", "label": 1}, "bad_label", "label"),
        ({"prompt": "Why?", "completion": "x", "label": None}, "bad_label", "label"),
        ({"prompt": "Why?", "label": True}, "missing_field", "completion"),
        ({"messages": [USER, ANSWER], "label": False}, "bad_label", "label"),
        ({"prompt": "Why?", "chosen": "x", "rejected": "y", "label": True}, "bad_label", "label"),
        (
            {"prompt": "Why?", "completion": [{**ANSWER, "weight": 0}, USER, ANSWER], "label": True},
            "bad_weight",
            "completion",
        ),
        (b'{"prompt":"a","completion":"b","label":false,"label":true}', "duplicate_key", "label"),
    ],
)
def test_bad_label_is_refused_with_reason_and_field(row: Any, reason: str, field: str) -> None:
    bad = complaint(row)
    assert (bad.reason.value, bad.field) == (reason, field)


def test_label_of_another_meaning_beside_messages_is_only_counted() -> None:
    parser = an_importer()
    parser.read(json.dumps({"messages": [USER, ANSWER], "label": "maths"}).encode())
    assert parser.ignored_fields == {"label": 1}


def test_second_of_two_equal_messages_is_named() -> None:
    assert complaint({"messages": [USER, ANSWER, USER, USER]}).field == "messages[3].role"


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"mesages": [USER, ANSWER]}, "rename 'mesages' to 'messages'"),
        ({"conversation": [USER, ANSWER]}, "rename 'conversation' to 'messages'"),
        ({"instruction": "Why?", "answer": "x"}, "rename 'instruction' to 'prompt'"),
        ({"prompt": "Why?", "response": "x"}, "rename 'response' to 'completion'"),
        ({"prompt": "Why?", "chosen": "x", "rejcted": "y"}, "rename 'rejcted' to 'rejected'"),
        ({"messages": [{"from": "human", "value": "x"}]}, "rename 'from' to 'role'"),
        ({"messages": [{"role": "human", "content": "x"}]}, "use 'user'"),
        ({"messages": [{"role": "user", "text": "x"}]}, "rename 'text' to 'content'"),
        ({"messages": [USER, {"role": "gpt", "content": "x"}]}, "use 'assistant'"),
    ],
)
def test_near_miss_suggests_the_name_that_was_meant(row: Any, fix: str) -> None:
    assert complaint(row).fix == fix


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"messages":[]}',
        b'{"messages":[],"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
        b'{"messages":[{"role":"system","role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
        b'{"messages":[{"role":"user","content":"x","content":"a"},{"role":"assistant","content":"b"}]}',
        b'{"messages":[{"role":"user","content":"\\"q\\"","content":"a"},{"role":"assistant","content":"b"}]}',
        b'{"messages":[{"r\\u006fle":"system","role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
        b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","weight":0,"weight":1}]}',
        b'{"prompt":"a","prompt":"b","completion":"c"}',
        b'{"prompt":"a","completion":"c","completion":"d"}',
        b'{"prompt":"a","chosen":"c","rejected":"d","rejected":"e"}',
    ],
)
def test_duplicate_key_is_refused(line: bytes) -> None:
    assert complaint(line).reason.value == "duplicate_key"


@pytest.mark.parametrize(
    "text", ['say "role" and "content"', '"messages"', "role", "content", "\\", "a\\u0000b", "\\u006f"]
)
def test_text_that_looks_like_a_key_or_escape_is_no_duplicate(text: str) -> None:
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    assert parsed(row) == ("ua", [text, text])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello", "not_json"),
        (b'{"messages": [}', "not_json"),
        (b'{"a": 1} {"b": 2}', "not_json"),
        (b'{"a": 1}\r{"b": 2}', "not_json"),
        (b"{'prompt': 'x'}", "not_json"),
        (b"[" * 5000, "not_json"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not_json"),
        (b'{"prompt": "a\x01b"}', "not_json"),
        (b'{"prompt": NaN}', "non_finite"),
        (b'{"prompt": -Infinity}', "non_finite"),
        (b'{"prompt": 1e999}', "non_finite"),
        (b'{"prompt": "\\ud800"}', "bad_escape"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_utf8"),
        (b'{"prompt": "a\x00b"}', "nul"),
        (b"\x00\x00\x00", "nul"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "byte_order_mark"),
        (b'{"prompt": "a\\u0000", "completion": "b"}', "nul"),
        (b'{"prompt": "a", "completion": "b\\u0000"}', "nul"),
    ],
)
def test_line_that_is_not_json_says_why(line: bytes, reason: str) -> None:
    assert complaint(line).reason.value == reason


def test_line_cut_anywhere_at_the_end_of_the_file_is_cut_off() -> None:
    line = json.dumps(a_chat(), ensure_ascii=False).replace("plus", "plüs").encode()
    reasons = {complaint(line[:end], is_unterminated=True).reason.value for end in range(1, len(line))}
    assert reasons == {"cut_off"}
    assert parsed(line) is not None


def test_wrong_last_line_that_is_not_cut_keeps_its_reason() -> None:
    assert complaint(b"hello", is_unterminated=True).reason.value == "not_json"
    assert complaint(b'{"prompt": NaN}', is_unterminated=True).reason.value == "non_finite"
    assert complaint(b'{"prompt": "\xff", "completion": "x"}', is_unterminated=True).reason.value == "invalid_utf8"


def test_unknown_fields_are_counted_and_left_out() -> None:
    parser = an_importer()
    named = {"messages": [{**USER, "name": "Ann"}, ANSWER], "source": "forum", "prompt": "kept by another tool"}
    assert parser.read(json.dumps(named).encode()) == (("ua", ["Why?", "Because."], 0),)
    assert parser.ignored_fields == {"messages.name": 1, "source": 1, "prompt": 1}


def test_names_of_unknown_fields_are_bounded() -> None:
    parser = an_importer()
    for number in range(1000):
        parser.read(json.dumps({**a_pair(), f"field-{number}": 1}).encode())
    assert len(parser.ignored_fields) == 51
    assert parser.ignored_fields["(others)"] == 950


def test_complaint_never_holds_the_content() -> None:
    secret = "sk-THIS-IS-A-SECRET"
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": secret}]},
        {"messages": [{"role": "user", "content": {"k": secret}}]},
        {"prompt": secret, "chosen": secret, "rejected": secret},
        f'{{"prompt": "{secret}'.encode(),
    ]
    for row in rows:
        bad = complaint(row)
        assert secret not in bad.problem + bad.fix + bad.field
