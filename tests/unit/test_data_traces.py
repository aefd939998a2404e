"""Traces: each answered call of a model is an example; spans of other things are left aside and counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.data import a_call, a_tool, an_importer
from tunesmith.datasets.example import BadRow

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
ROW = ("ua", ["Why?", "Because."], 1)


def rows_of(item: Any) -> Any:
    return list(an_importer().read(json.dumps(item).encode()))


def an_observation(given: Any, output: Any, **changes: Any) -> dict[str, Any]:
    """As Langfuse's public API returns it."""
    return {"id": "o1", "traceId": "t1", "type": "GENERATION", "input": given, "output": output, **changes}


def a_span(given: Any, output: Any, kind: str = "CHAT_MODEL", **attributes: Any) -> dict[str, Any]:
    """As MLflow writes it: every attribute is a text of JSON."""
    held = {"mlflow.spanType": kind, "mlflow.spanInputs": given, "mlflow.spanOutputs": output, **attributes}
    return {"name": "chat", "span_id": "s1", "attributes": {key: json.dumps(value) for key, value in held.items()}}


def an_mlflow_trace(*spans: Any) -> dict[str, Any]:
    return {"info": {"trace_id": "tr-1"}, "data": {"spans": list(spans)}}


@pytest.mark.parametrize(
    "output", [ANSWER, "Because.", [ANSWER], {"content": "Because."}, {"choices": [{"message": ANSWER}]}]
)
@pytest.mark.parametrize("given", [[USER], {"messages": [USER]}, "Why?"])
def test_generation_becomes_an_example(given: Any, output: Any) -> None:
    assert rows_of(an_observation(given, output)) == [ROW]


def test_generation_of_a_blob_export_holds_texts_of_json() -> None:
    row = {"id": "o", "trace_id": "t", "type": "GENERATION", "input": json.dumps([USER]), "output": json.dumps(ANSWER)}
    assert rows_of(row) == [ROW]


def test_every_generation_of_a_trace_is_an_example_of_the_same_group() -> None:
    later = an_observation([USER, ANSWER, USER], "So.")
    trace = {"id": "t1", "input": "x", "observations": [{"type": "SPAN"}, an_observation([USER], ANSWER), later]}
    assert rows_of(trace) == [ROW, ("ucua", ["Why?", "Because.", "Why?", "So."], 1)]


def test_calls_parts_and_other_names_of_roles_are_understood() -> None:
    given = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]},
            {"role": "assistant", "content": None, "tool_calls": [a_call()], "refusal": None},
            {"role": "tool", "tool_call_id": "call_0001", "content": "20"},
        ],
        "tools": [a_tool()],
    }
    ((shape, contents, num_group),) = rows_of(an_observation(given, ANSWER))
    assert (shape, contents[1:3], num_group) == ("dsuCra", ["Be brief.", "Why?"], 3)


@pytest.mark.parametrize(
    "item",
    [
        an_observation([USER], ANSWER, type="SPAN"),
        an_observation([USER], None, level="ERROR"),
        an_observation([USER], ""),
        an_observation({"query": "Why?"}, ANSWER),
        an_observation(None, ANSWER),
        an_observation([], ANSWER),
        {"id": "t1", "observations": []},
        an_mlflow_trace(a_span({"messages": [USER]}, ANSWER, kind="TOOL")),
        an_mlflow_trace({"name": "chat"}, "hm", None),
    ],
)
def test_span_without_an_answered_conversation_is_left_aside(item: Any) -> None:
    importer = an_importer()
    assert importer.read(json.dumps(item).encode()) == ()
    assert importer.passed_over == {"no answered call of a model": 1}


@pytest.mark.parametrize(
    "span",
    [
        a_span({"messages": [USER], "model": "m"}, {"choices": [{"message": ANSWER, "finish_reason": "stop"}]}),
        a_span({"messages": [USER]}, {"role": "assistant", "content": [{"type": "text", "text": "Because."}]}),
        a_span([[{"type": "human", "content": "Why?"}]], {"generations": [[{"message": {"content": "Because."}}]]}),
        a_span({"query": 1}, None, **{"mlflow.chat.messages": [USER, ANSWER]}),
        {"span_type": "LLM", "inputs": {"messages": [USER]}, "outputs": "Because."},
    ],
)
def test_span_of_a_model_becomes_an_example(span: Any) -> None:
    assert rows_of(an_mlflow_trace(span, a_span("x", "y", kind="CHAIN"))) == [ROW]


def test_mlflow_data_may_be_a_text_of_json() -> None:
    trace = an_mlflow_trace(a_span({"messages": [USER]}, ANSWER))
    assert rows_of({**trace, "data": json.dumps(trace["data"])}) == [ROW]


@pytest.mark.parametrize(
    ("item", "reason", "field"),
    [
        (an_observation([USER, USER], ANSWER), "role_order", "input[1].role"),
        (an_observation({"messages": [{**USER, "content": ""}]}, ANSWER), "empty_content", "input.messages[0].content"),
        (
            an_observation([{**USER, "content": [{"type": "image_url"}]}], ANSWER),
            "unsupported_field",
            "input[0].content",
        ),
        (
            {"observations": [{"type": "EVENT"}, an_observation([ANSWER], ANSWER)]},
            "role_order",
            "observations[1].input[0].role",
        ),
        (
            an_mlflow_trace(a_span({"messages": [USER, ANSWER]}, ANSWER)),
            "role_order",
            "data.spans[0].attributes.mlflow.spanInputs.messages",
        ),
    ],
)
def test_bad_conversation_in_a_trace_is_named_by_its_place(item: Any, reason: str, field: str) -> None:
    with pytest.raises(BadRow) as caught:
        rows_of(item)
    assert (caught.value.reason.value, caught.value.field) == (reason, field)
