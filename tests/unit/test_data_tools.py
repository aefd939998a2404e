"""Calls of functions: from OpenAI's form to rows and examples and back, or one exact complaint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data import HALF, a_call, a_tool, a_tool_chat, an_importer, encoded, prepared, read_row
from tunesmith.datasets.example import ROLE_OF_CODE, BadRow, Example, Message, Split, decode_message, encode_message
from tunesmith.datasets.reading import read_split, verify
from tunesmith.datasets.splits import group_of

USER = {"role": "user", "content": "How warm is it?"}
ANSWER = {"role": "assistant", "content": "Warm."}
CALL = {"role": "assistant", "content": None, "tool_calls": [a_call()]}
RESULT = {"role": "tool", "tool_call_id": "call_0001", "content": "20 degrees"}


def parsed(row: Any) -> tuple[str, list[str]]:
    found = read_row(row)
    assert found is not None
    return found


def complaint(row: Any) -> BadRow:
    with pytest.raises(BadRow) as caught:
        read_row(row)
    assert caught.value.fix
    return caught.value


def calling(**function: Any) -> dict[str, Any]:
    """A conversation whose call has that function."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}, **function}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def all_examples(folder: Path) -> list[Example]:
    return sorted((e for split in Split for e in read_split(folder, split)), key=lambda example: example.line)


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"messages": [USER, CALL]}, "uA"),
        ({"messages": [USER, CALL, RESULT, ANSWER]}, "uAra"),
        ({"messages": [USER, CALL, RESULT, ANSWER], "tools": [a_tool()]}, "duAra"),
        ({"messages": [USER, CALL, RESULT, ANSWER], "tools": None}, "uAra"),
        ({"messages": [USER, {**CALL, "weight": 0}, RESULT, ANSWER]}, "uCra"),
        ({"messages": [USER, CALL, {"role": "tool", "content": "20"}, ANSWER]}, "uAta"),
        ({"messages": [USER, {**ANSWER, "tool_calls": []}]}, "ua"),
        ({"messages": [USER, {**ANSWER, "tool_calls": None}]}, "ua"),
        ({"messages": [USER, {**CALL, "content": "Let me look."}]}, "uA"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [a_call()]}]}, "uA"),
        ({"prompt": [USER, CALL, RESULT], "completion": "Warm."}, "uCra"),
        ({"prompt": "How?", "completion": [CALL, RESULT, ANSWER], "tools": [a_tool()]}, "duAra"),
        ({"prompt": "How?", "chosen": [CALL], "rejected": "No idea.", "tools": [a_tool()]}, "duA|a"),
        ({"prompt": "How?", "completion": [CALL], "label": False, "tools": [a_tool()]}, "du|A"),
    ],
)
def test_row_with_tools_gets_its_shape(row: Any, shape: str) -> None:
    found, contents = parsed(row)
    assert found == shape
    assert len(contents) == len(shape.replace("|", ""))


def test_arguments_as_text_and_as_object_are_one_row() -> None:
    as_text = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2.5, "ü"]}'}}
    as_object = {"id": "1", "function": {"arguments": {"b": 1, "a": [2.5, "ü"]}, "name": "f"}}
    rows = [{"messages": [USER, {**CALL, "tool_calls": [call]}]} for call in (as_text, as_object)]
    assert parsed(rows[0]) == parsed(rows[1])
    assert '"arguments":{"b":1,"a":[2.5,"ü"]}' in parsed(rows[0])[1][1]  # in the order in which they were written


def test_long_numbers_in_arguments_are_kept_to_the_digit() -> None:
    number = "123456789012345678901234567890"
    for arguments in (f'"{{\\"n\\": {number}}}"', f'{{"n": {number}}}'):
        line = (
            '{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":'
            f'[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}]}}'
        )
        assert f'{{"n":{number}}}' in parsed(line.encode())[1][1]


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        (calling(arguments="not json"), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments=""), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments="[1]"), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments='{"a": NaN}'), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments='{"a": "\\ud800"}'), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments=7), "bad_tools", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments='{"a": 1, "a": 2}'), "duplicate_key", "messages[1].tool_calls[0].function.arguments"),
        (calling(arguments={"a": "x\0y"}), "nul", "messages[1]"),
        (calling(name=""), "bad_tools", "messages[1].tool_calls[0].function.name"),
        (calling(name=None), "missing_field", "messages[1].tool_calls[0].function.name"),
        (calling(mood="good"), "unsupported_field", "messages[1].tool_calls[0].function.mood"),
        ({"messages": [USER, {**CALL, "tool_calls": "x"}]}, "wrong_type", "messages[1].tool_calls"),
        ({"messages": [USER, {**CALL, "tool_calls": [7]}]}, "wrong_type", "messages[1].tool_calls[0]"),
        ({"messages": [USER, {**CALL, "tool_calls": [{}]}]}, "missing_field", "messages[1].tool_calls[0].function"),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{**a_call(), "type": "code"}]}]},
            "bad_tools",
            "messages[1].tool_calls[0].type",
        ),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{**a_call(), "index": 0}]}]},
            "unsupported_field",
            "messages[1].tool_calls[0].index",
        ),
        ({"messages": [USER, {**CALL, "tool_calls": [a_call(), a_call()]}]}, "bad_tools", "messages[1].tool_calls"),
        ({"messages": [USER, {**CALL, "content": 7}]}, "wrong_type", "messages[1].content"),
        ({"messages": [{**USER, "tool_calls": [a_call()]}, ANSWER]}, "bad_tools", "messages[0].tool_calls"),
        ({"messages": [USER, RESULT, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [USER, ANSWER, RESULT, ANSWER]}, "bad_tools", "messages[2].tool_call_id"),
        ({"messages": [USER, CALL, {**RESULT, "tool_call_id": "x"}, ANSWER]}, "bad_tools", "messages[2].tool_call_id"),
        ({"messages": [USER, CALL, RESULT, RESULT, ANSWER]}, "bad_tools", "messages[3].tool_call_id"),
        ({"messages": [USER, CALL, {**RESULT, "name": 7}, ANSWER]}, "wrong_type", "messages[2].name"),
        ({"messages": [USER, CALL, USER, ANSWER]}, "role_order", "messages[2].role"),
        ({"messages": [USER, CALL, RESULT]}, "no_answer", "messages"),
        ({"messages": [USER, {**CALL, "weight": 0}]}, "no_answer", "messages"),
        ({"messages": [USER, ANSWER], "tools": {"weather": {}}}, "wrong_type", "tools"),
        ({"messages": [USER, ANSWER], "tools": [{"name": "weather"}]}, "missing_field", "tools[0].function"),
        ({"messages": [USER, ANSWER], "tools": [{**a_tool(), "extra": 1}]}, "unsupported_field", "tools[0].extra"),
        ({"messages": [USER, ANSWER], "tools": [a_tool(), a_tool()]}, "bad_tools", "tools"),
        (
            {"messages": [USER, ANSWER], "tools": [{"function": {"name": "f", "parameters": "none"}}]},
            "wrong_type",
            "tools[0].function.parameters",
        ),
        (
            b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"function":'
            b'{"name":"f","arguments":{"a":1,"a":2}}}]}]}',
            "duplicate_key",
            "",
        ),
        (
            b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b",'
            b'"tool_calls":[{"function":{"name":"f","arguments":{}}}],"tool_calls":[]}]}',
            "duplicate_key",
            "tool_calls",
        ),
    ],
)
def test_bad_tools_are_refused_with_reason_and_field(row: Any, reason: str, field: str) -> None:
    bad = complaint(row)
    assert (bad.reason.value, bad.field) == (reason, field)


def test_arguments_nested_too_deeply_are_refused() -> None:
    for num in (100, 900, 2000):
        deep = "[" * num + "]" * num
        assert complaint(calling(arguments=f'{{"a": {deep}}}')).reason.value == "bad_tools"
    assert parsed(calling(arguments='{"a": ' + "[" * 50 + "]" * 50 + "}"))[0] == "uA"


def test_fields_nobody_reads_beside_a_call_are_counted_once() -> None:
    parser = an_importer()
    parser.read(json.dumps({"messages": [USER, {**CALL, "refusal": None}], "source": "log"}).encode())
    assert parser.ignored_fields == {"messages.refusal": 1, "source": 1}


def test_complaint_never_holds_what_a_call_says() -> None:
    secret = "sk-THIS-IS-A-SECRET"
    rows = [
        calling(arguments=secret),
        calling(arguments=f'{{"{secret}": 1, "{secret}": 2}}'),
        {"messages": [USER, CALL, {**RESULT, "tool_call_id": secret}, ANSWER]},
        {"messages": [USER, ANSWER], "tools": [a_tool(secret), a_tool(secret)]},
    ]
    for row in rows:
        bad = complaint(row)
        assert secret not in bad.problem + bad.fix + bad.field


def test_prepared_conversation_with_tools_comes_back_whole(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*(a_tool_chat(number) for number in range(30))))
    verify(dataset.path, dataset.fingerprint)
    example = all_examples(dataset.path)[3]
    tools, question, call, result, answer = example.messages
    assert tools["role"] == "tools"
    assert json.loads(tools["content"]) == [a_tool()]
    assert question == {"role": "user", "content": "How warm is it in town 3?", "weight": 0}
    function = {"name": "weather", "arguments": {"city": "town 3"}}
    wanted = [{"id": "call_0001", "type": "function", "function": function}]
    assert call == {"role": "assistant", "content": "", "weight": 1, "tool_calls": wanted}
    assert result == {"role": "tool", "content": "3 degrees", "weight": 0, "tool_call_id": "call_0001"}
    assert answer == {"role": "assistant", "content": "It has 3 degrees.", "weight": 1}
    assert [message["role"] for message in example.prompt] == ["tools", "user"]


def test_calls_results_and_definitions_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    rows = [a_tool_chat(number) for number in range(30)]
    first = prepared(tmp_path, encoded(*rows), name="ds-0").fingerprint
    other_call = json.loads(json.dumps(rows))
    other_call[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome"}
    other_tools = json.loads(json.dumps(rows))
    other_tools[0]["tools"][0]["function"]["description"] = "Guesses."
    other_name = json.loads(json.dumps(rows))
    other_name[0]["messages"][2]["name"] = "weather"
    found = {prepared(tmp_path, encoded(*changed), name=f"ds-{number}").fingerprint
             for number, changed in enumerate((other_call, other_tools, other_name), start=1)}  # fmt: skip
    assert len(found | {first}) == 4


def test_control_token_in_arguments_or_definitions_is_refused(tmp_path: Path) -> None:
    rows = [a_tool_chat(number) for number in range(30)]
    rows[1]["messages"][1]["tool_calls"] = [a_call("<|end|>")]
    rows[2]["tools"][0]["function"]["description"] = "ends <|end|>"
    rows[3]["messages"][2]["content"] = "<|end|>"
    options = HALF.model_copy(update={"control_tokens": ("<|end|>",)})
    drops = prepared(tmp_path, encoded(*rows), options).report.drops
    assert [(drop.reason.value, [bad.line for bad in drop.first]) for drop in drops] == [("control_token", [2, 3, 4])]


def test_prompts_that_differ_in_the_ids_of_calls_are_one_group() -> None:
    groups = set()
    for call_id in ("call_0001", "call_0002"):
        row = a_tool_chat(call_id=call_id)
        shape, contents = parsed({"prompt": row["messages"][:3], "completion": "Warm."})
        assert shape == "uCra"
        groups.add(group_of(shape[:3], contents))
    assert len(groups) == 1


@pytest.mark.parametrize("text", ["{}", "[]", "7", "not json", '{"content":"x"}', '{"content":"x","tool_calls":7}'])
def test_stored_text_that_no_message_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own error is one too)
        decode_message(Message(role="calls", content=text, weight=1))


def test_packed_message_comes_back() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"z": 1, "a": 1e300}}}]
    for message in (
        Message(role="assistant", content="x", weight=0, tool_calls=calls),
        Message(role="tool", content="x", weight=0, name="f"),
        Message(role="user", content="x", weight=0),
    ):
        assert decode_message(encode_message(message)) == message


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_row_with_anything_in_place_of_tools_is_a_row_or_a_complaint(data: st.DataObject) -> None:
    row = json.loads(json.dumps(a_tool_chat()))
    call = row["messages"][1]["tool_calls"][0]
    places = [
        (row, "tools"),
        (row["tools"][0], "function"),
        (row["messages"][1], "tool_calls"),
        (row["messages"][1], "content"),
        (call, "function"),
        (call["function"], "arguments"),
        (call["function"], data.draw(st.text(max_size=6))),
        (call, "id"),
        (row["messages"][2], "tool_call_id"),
        (row["messages"][2], "name"),
        (row, "label"),
    ]
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(ANYTHING)
    try:
        found = read_row(row)
    except BadRow as bad:
        assert bad.fix  # noqa: PT017 (either way is fine, and each has its own check)
        return
    assert found is not None
    for code, text in zip(found[0], found[1], strict=True):
        stored = Message(role=ROLE_OF_CODE[code][0], content=text, weight=ROLE_OF_CODE[code][1])
        assert encode_message(decode_message(stored)) == stored
        text.encode()
