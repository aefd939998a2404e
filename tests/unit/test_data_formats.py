"""Rows of other tools: each becomes the row that we would have written, or a complaint in the words of its file."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data import a_call, a_tool, an_importer, read_row
from tunesmith.datasets.example import BadRow

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}
DEFINED = {"name": "weather", "description": "Looks it up.", "parameters": {"type": "object"}}


def complaint(row: Any, **rules: Any) -> tuple[str, str]:
    """Reason and field of what is wrong with a row."""
    with pytest.raises(BadRow) as caught:
        an_importer(**rules).read(row if isinstance(row, bytes) else json.dumps(row).encode())
    assert caught.value.fix
    assert caught.value.problem
    return caught.value.reason.value, caught.value.field


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"conversations": [HUMAN, GPT]}, {"messages": [USER, ANSWER]}),
        ({"conversations": [HUMAN, GPT], "system": "Be brief.", "id": 7}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"conversations": [HUMAN, GPT], "system": ""}, {"messages": [USER, ANSWER]}),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, HUMAN, GPT]},
            {"messages": [SYSTEM, USER, ANSWER]},
        ),
        ({"conversations": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        (
            {"conversations": [HUMAN, {**GPT, "weight": 0}, HUMAN, GPT]},
            {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
        ),
        (
            {
                "conversations": [
                    HUMAN,
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
                    {"from": "observation", "value": "20"},
                    GPT,
                ],
                "tools": json.dumps([DEFINED]),
            },
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [a_call(call_id=None)]},
                    {"role": "tool", "content": "20"},
                    ANSWER,
                ],
                "tools": [{"type": "function", "function": DEFINED}],
            },
        ),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
            {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        ),
        ({"instruction": "Why?", "input": "", "output": "Because."}, {"messages": [USER, ANSWER]}),
        ({"instruction": "Why?", "output": "Because.", "system": "Be brief."}, {"messages": [SYSTEM, USER, ANSWER]}),
        (
            {"instruction": "Sum", "input": "1, 2", "output": "3"},
            {"prompt": "Sum\n\n1, 2", "completion": "3"},
        ),
        (
            {"instruction": "Why?", "output": "Because.", "history": [["Why?", "Because."]]},
            {"messages": [USER, ANSWER, USER, ANSWER]},
        ),
        (
            {"instruction": "Why?", "chosen": "Because.", "rejected": "No."},
            {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        ),
        (
            {
                "input": {"messages": [SYSTEM, USER], "tools": [a_tool()], "parallel_tool_calls": True},
                "preferred_output": [ANSWER],
                "non_preferred_output": [{"role": "assistant", "content": "No."}],
            },
            {"prompt": [SYSTEM, USER], "chosen": "Because.", "rejected": "No.", "tools": [a_tool()]},
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No."}]},
            {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        ),
        (
            {"prompt": "Why?", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No."}]},
            {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        ),
        (
            {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, {**ANSWER, "content": "No."}]},
            {"prompt": [USER, ANSWER, USER], "chosen": "Because.", "rejected": "No."},
        ),
    ],
)
def test_row_of_another_tool_becomes_the_row_we_would_have_written(row: Any, same: Any) -> None:
    assert read_row(row) == read_row(same)


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"conversations": "hello"}, "wrong_type", "conversations"),
        ({"conversations": []}, "empty_list", "conversations"),
        ({"conversations": [HUMAN]}, "no_answer", "conversations"),
        ({"conversations": ["Why?"]}, "wrong_type", "conversations[0]"),
        ({"conversations": [{"value": "Why?"}]}, "missing_field", "conversations[0].from"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "missing_field", "conversations[1].value"),
        ({"conversations": [HUMAN, {"from": "wizard", "value": "x"}]}, "bad_role", "conversations[1].from"),
        ({"conversations": [HUMAN, {"from": 7, "value": "x"}]}, "bad_role", "conversations[1].from"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": None}]}, "wrong_type", "conversations[1].value"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": " "}]}, "empty_content", "conversations[1].value"),
        ({"conversations": [GPT, HUMAN, GPT]}, "role_order", "conversations[0].from"),
        ({"conversations": [HUMAN, HUMAN, GPT], "system": "Be brief."}, "role_order", "conversations[1].from"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "hm"}]}, "bad_tools", "conversations[1].value"),
        ({"conversations": [HUMAN, {**GPT, "weight": 5}]}, "bad_weight", "conversations[1].weight"),
        ({"conversations": [HUMAN, GPT], "system": 7}, "wrong_type", "system"),
        ({"conversations": [HUMAN, GPT], "tools": "hm"}, "bad_tools", "tools"),
        ({"conversations": [HUMAN], "chosen": GPT}, "missing_field", "rejected"),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": ""}},
            "empty_content",
            "rejected.value",
        ),
        ({"instruction": "", "output": "x"}, "empty_content", "instruction"),
        ({"instruction": 7, "output": "x"}, "wrong_type", "instruction"),
        ({"instruction": "Why?", "input": [], "output": "x"}, "wrong_type", "input"),
        ({"instruction": "Why?", "output": None}, "wrong_type", "output"),
        ({"instruction": "Why?", "output": " "}, "empty_content", "output"),
        ({"instruction": "Why?", "output": "x", "history": [["a"]]}, "wrong_type", "history[0]"),
        ({"instruction": "Why?", "output": "x", "history": [["a", ""]]}, "empty_content", "history[0][1]"),
        ({"instruction": "Why?", "chosen": "x"}, "missing_field", "rejected"),
        ({"input": {"messages": [USER]}, "preferred_output": [ANSWER]}, "missing_field", "non_preferred_output"),
        (
            {"input": {"messages": [USER, USER]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
            "role_order",
            "input.messages[1].role",
        ),
        (
            {"input": {}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
            "missing_field",
            "input.messages",
        ),
        (
            {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
            "same_answers",
            "non_preferred_output",
        ),
        ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, ANSWER]}, "role_order", "rejected"),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": ""}]},
            "empty_content",
            "rejected[1].content",
        ),
        (
            {"prompt": "How?", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No."}]},
            "ambiguous_form",
            "prompt",
        ),
        (b'{"instruction":"a","output":"b","output":"c"}', "duplicate_key", "output"),
        (
            b'{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b","value":"c"}]}',
            "duplicate_key",
            "value",
        ),
        (
            b'{"conversations":[{"from":"human","value":"\\u0022"},{"from":"gpt","value":"b","value":"c"}]}',
            "duplicate_key",
            "value",
        ),
        (b'{"instruction":"a","output":"b\\u0000"}', "nul", ""),
    ],
)
def test_bad_row_of_another_tool_is_named_by_its_own_field(row: Any, reason: str, field: str) -> None:
    assert complaint(row) == (reason, field)


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("openai", {"conversations": [HUMAN, GPT]}, "messages"),
        ("sharegpt", {"messages": [USER, ANSWER]}, "conversations"),
        ("alpaca", {"messages": [USER, ANSWER]}, "instruction"),
        ("preference", {"prompt": "Why?", "completion": "x"}, "chosen"),
        ("kto", {"prompt": "Why?", "completion": "x"}, "label"),
        ("completion", {"messages": [USER, ANSWER]}, "prompt"),
        ("langfuse", {"messages": [USER, ANSWER]}, ""),
        ("mlflow", {"messages": [USER, ANSWER]}, ""),
    ],
)
def test_row_that_is_not_of_the_asked_format_is_refused(name: str, row: Any, field: str) -> None:
    assert complaint(row, format=name) == ("missing_field", field)


def test_asked_format_decides_where_a_row_has_several() -> None:
    row = {"messages": [USER, ANSWER], "conversations": [HUMAN, {**GPT, "value": "No."}], "completion": "x"}
    line = json.dumps(row).encode()
    assert an_importer(format="sharegpt").read(line)[0][1] == ["Why?", "No."]
    assert an_importer(format="openai").read(line)[0][1] == ["Why?", "Because."]


LONG = {"messages": [SYSTEM, USER, ANSWER, USER, {**ANSWER, "content": "So."}, USER]}


def test_windows_end_with_the_answer_to_learn_and_share_a_group() -> None:
    line = json.dumps(LONG).encode()
    assert complaint(line) == ("no_answer", "messages")
    assert an_importer(windows="last").read(line) == [
        ("sucua", ["Be brief.", "Why?", "Because.", "Why?", "So."], 2),
    ]
    assert an_importer(windows="all").read(line) == [
        ("sua", ["Be brief.", "Why?", "Because."], 2),
        ("sucua", ["Be brief.", "Why?", "Because.", "Why?", "So."], 2),
    ]


def test_windows_of_calls_and_skipped_answers_are_context() -> None:
    row = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [a_call()]},
            {"role": "tool", "tool_call_id": "call_0001", "content": "20"},
            {**ANSWER, "weight": 0},
            USER,
            ANSWER,
        ],
        "tools": [a_tool()],
    }
    found = an_importer(windows="all").read(json.dumps(row).encode())
    assert [(shape, num_group) for shape, _, num_group in found] == [("duA", 2), ("duCrcua", 2)]


def test_windows_leave_pairs_and_labels_as_they_are() -> None:
    row = {"prompt": [USER, ANSWER, USER], "chosen": "Because.", "rejected": "No."}
    line = json.dumps(row).encode()
    assert an_importer(windows="all").read(line) == an_importer().read(line)


@pytest.mark.parametrize(
    ("where", "is_in"),
    [
        (("lang=en",), True),
        (("lang=de",), False),
        (("lang!=de",), True),
        (("meta.stars=5",), True),
        (("meta.stars=4",), False),
        (("meta.is_ok=true",), True),
        (("meta.tags=b",), True),
        (("meta.tags=c",), False),
        (("meta.tags!=c",), True),
        (("meta.none=null",), True),
        (("meta.missing=x",), False),
        (("meta.missing!=x",), True),
        (("lang=en", "meta.stars=5"), True),
        (("lang=en", "meta.stars=1"), False),
    ],
)
def test_condition_decides_which_objects_are_read(where: tuple[str, ...], is_in: bool) -> None:
    meta = {"stars": 5, "is_ok": True, "tags": ["a", "b"], "none": None}
    line = json.dumps({"messages": [USER, ANSWER], "lang": "en", "meta": meta}).encode()
    importer = an_importer(where=where)
    assert bool(importer.read(line)) is is_in
    assert sum(importer.passed_over.values()) == (0 if is_in else 1)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "[]", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "type", "text", "name"]), inner)
    ),
    max_leaves=6,
)
TOOLED = {"messages": [USER], "tools": [a_tool()]}
SPAN = {"attributes": {"mlflow.spanType": "LLM", "mlflow.spanInputs": TOOLED, "mlflow.spanOutputs": ANSWER}}
FOREIGN: list[dict[str, Any]] = [
    {"conversations": [HUMAN, {"from": "function_call", "value": '{"name": "f"}'}], "system": "S", "tools": [DEFINED]},
    {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "No."}},
    {"instruction": "Why?", "input": "x", "output": "y", "system": "S", "history": [["a", "b"]]},
    {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [USER], "tools": [a_tool()]},
    {"prompt": "Why?", "chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, USER]},
    {"type": "GENERATION", "traceId": "t", "input": TOOLED, "output": {"choices": [{"message": ANSWER}]}},
    {"observations": [{"type": "GENERATION", "input": [USER], "output": [ANSWER]}]},
    {
        "info": {},
        "data": {"spans": [SPAN, {"span_type": "LLM", "inputs": [[USER]], "outputs": {"generations": [[1]]}}]},
    },
]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, part in inner for found in ((*path, key), *places_in(part, (*path, key)))]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_foreign_row_with_anything_in_any_place_is_rows_or_a_complaint(data: st.DataObject) -> None:
    row = copy.deepcopy(data.draw(st.sampled_from(FOREIGN)))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places_in(row)))
        holder: Any = row
        for key in path:
            holder = holder[key]
        holder[last] = data.draw(ANYTHING)
    importer = an_importer(windows=data.draw(st.sampled_from(["whole", "last", "all"])))
    try:
        found = importer.read(json.dumps(row).encode())
    except BadRow as bad:
        assert bad.fix  # noqa: PT017 (either way is fine, and each has its own check)
        return
    for shape, contents, num_group in found:
        assert len(shape.replace("|", "")) == len(contents)
        assert num_group <= len(contents)
        assert all(type(text) is str and text for text in contents)
