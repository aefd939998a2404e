"""One message has the same rules at every edge: what no file may hold, no request may hold either."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.datasets.example import BadRow
from tunesmith.datasets.messages import MessageChecker, MessageFault, content_fault, role_fault
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.messages import check_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


def fault_of(message: Any) -> MessageFault | None:
    return role_fault(message) or content_fault(message)


@pytest.mark.parametrize(
    ("message", "fault", "field"),
    [
        ("hello", MessageFault.NOT_OBJECT, ""),
        ({"content": "hello"}, MessageFault.NO_ROLE, ".role"),
        ({"role": ["user"], "content": "hello"}, MessageFault.ROLE_NOT_TEXT, ".role"),
        ({"role": "bot", "content": "hello"}, MessageFault.UNKNOWN_ROLE, ".role"),
        ({"role": "user"}, MessageFault.NO_CONTENT, ".content"),
        ({"role": "user", "tool_calls": [CALL]}, MessageFault.NO_CONTENT, ".content"),
        ({"role": "user", "content": 7}, MessageFault.CONTENT_NOT_TEXT, ".content"),
        ({"role": "user", "content": []}, MessageFault.CONTENT_NOT_TEXT, ".content"),
    ],
)
def test_faulty_message_is_refused_at_its_field_by_both_edges(message: Any, fault: MessageFault, field: str) -> None:
    assert fault_of(message) is fault
    with pytest.raises(BadRow) as bad:
        MessageChecker().check([message], "messages", "", [])
    assert bad.value.field == f"messages[0]{field}"
    with pytest.raises(ApiError) as refused:
        check_messages([message])
    assert refused.value.param == f"messages[0]{field}"


def test_answer_with_calls_does_without_a_content_and_others_do_not() -> None:
    answer = {"role": "assistant", "tool_calls": [CALL]}
    assert fault_of(answer) is None
    asked = {"role": "user", "content": "Where is order 17?"}
    assert MessageChecker().check([asked, answer], "messages", "", []) == "uA"
    assert check_messages([asked, answer])[1]["content"] == ""
