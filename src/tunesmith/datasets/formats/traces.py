"""Takes the calls of models out of traces: each is an example whose prompt was sent and whose answer came back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tunesmith.core.visible_text import says_nothing
from tunesmith.datasets.example import BadRow, Reason
from tunesmith.datasets.formats.formats import Raw, Translated

_SPEAKERS = {"developer": "system", "human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
_MODEL_SPANS = ("CHAT_MODEL", "LLM")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MAX_DEPTH = 32


class NoConversation(Exception):
    """A span that is no call of a model, or none that was answered: nothing is wrong with it."""


def is_langfuse(row: Raw) -> bool:
    """A trace with its observations, or one observation."""
    if type(row.get("observations")) is list:
        return True
    return "type" in row and ("traceId" in row or "trace_id" in row or ("input" in row and "output" in row))


def is_mlflow(row: Raw) -> bool:
    """A trace with its spans, or one span."""
    return bool(_mlflow_spans(row))


def langfuse(row: Raw) -> Sequence[Translated]:
    """The generations of a Langfuse trace, or of one observation."""
    observations = row.get("observations")
    if type(observations) is list:
        places = [f"observations[{number}]." for number in range(len(observations))]
        return _translated(zip(observations, places, strict=True), _langfuse_call)
    return _translated([(row, "")], _langfuse_call)


def mlflow(row: Raw) -> Sequence[Translated]:
    """The spans of an MLflow trace in which a model was called."""
    return _translated(_mlflow_spans(row), _mlflow_call)


def _translated(spans: Any, read: Any) -> Sequence[Translated]:
    found = []
    for span, place in spans:
        if type(span) is dict and (call := read(span, place)) is not None:
            found.append(call)
    if not found:
        raise NoConversation
    return found


def _langfuse_call(observation: Raw, place: str) -> Translated | None:
    if str(observation.get("type", "")).upper() != "GENERATION":
        return None
    return _call(_decoded(observation.get("input")), _decoded(observation.get("output")), place, "input", "output")


def _mlflow_spans(row: Raw) -> list[tuple[Any, str]]:
    for holder, place in ((_decoded(row.get("data")), "data."), (row, "")):
        spans = _decoded(holder.get("spans")) if type(holder) is dict else None
        if type(spans) is list:
            return [(span, f"{place}spans[{number}].") for number, span in enumerate(spans)]
    attributes = row.get("attributes")
    is_span = type(attributes) is dict and "mlflow.spanType" in attributes
    return [(row, "")] if is_span else []


def _mlflow_call(span: Raw, place: str) -> Translated | None:
    attributes = span.get("attributes")
    given: Raw = attributes if type(attributes) is dict else {}
    if _decoded(given.get("mlflow.spanType", span.get("span_type"))) not in _MODEL_SPANS:
        return None
    sent = _decoded(given.get("mlflow.spanInputs", span.get("inputs")))
    answer = _decoded(given.get("mlflow.spanOutputs", span.get("outputs")))
    tools = _decoded(given.get("mlflow.chat.tools"))
    if tools and type(sent) is dict:
        sent = {"tools": tools, **sent}
    names = [f"attributes.{key}" for key in ("mlflow.spanInputs", "mlflow.spanOutputs")]
    call = _call(sent, answer, place, *names)
    whole = _decoded(given.get("mlflow.chat.messages"))
    if call is None and type(whole) is list and len(whole) > 1:
        where = "attributes.mlflow.chat.messages"
        return _call({"messages": whole[:-1], "tools": tools}, whole[-1], place, where, where)
    return call


def _call(sent: Any, answer: Any, place: str, sent_name: str, answer_name: str) -> Translated | None:
    """One call of a model; None where it holds no conversation that was answered."""
    prompt, where = _messages_sent(sent, place + sent_name)
    message = _message_back(answer)
    if prompt is None or message is None:
        return None
    fields: Raw = {
        "prompt": [_message(given, f"{where}[{number}]") for number, given in enumerate(prompt)],
        "completion": [{**_message(message, place + answer_name), "role": "assistant"}],
    }
    tools = sent.get("tools") if type(sent) is dict else None
    if tools:
        fields["tools"] = tools
    places = {"prompt": where, "completion": place + answer_name, "completion[0]": place + answer_name}
    places["tools"] = f"{place}{sent_name}.tools"
    return Translated(fields, places, is_window=True)


def _messages_sent(sent: Any, place: str) -> tuple[list[Any] | None, str]:
    """The messages that were sent, and where they stand."""
    if type(sent) is dict and "messages" in sent:
        sent, place = _decoded(sent["messages"]), f"{place}.messages"
    if type(sent) is str and not says_nothing(sent):
        return [{"role": "user", "content": sent}], place
    while type(sent) is list and len(sent) == 1 and type(sent[0]) is list:
        sent, place = sent[0], f"{place}[0]"
    is_chat = type(sent) is list and sent and all(type(m) is dict and ("role" in m or "type" in m) for m in sent)
    return (sent if is_chat else None), place


def _message_back(answer: Any) -> Any:
    """The message that came back, in any of the wrappings that servers and libraries put around it."""
    for _ in range(_MAX_DEPTH):
        if type(answer) is str:
            return {"content": answer} if not says_nothing(answer) else None
        if type(answer) is list:
            if not answer:
                return None
            answer = answer[-1]
        elif type(answer) is dict:
            inner = next(
                (answer[key] for key in ("choices", "generations", "message", "messages") if answer.get(key)), None
            )
            if inner is None:
                return answer if any(answer.get(key) for key in ("content", "tool_calls", "text")) else None
            answer = inner[0] if type(inner) is list and "messages" not in answer else inner
        else:
            return None
    return None


def _message(given: Raw, place: str) -> Raw:
    """A message with the fields that we read and no other."""
    role = given.get("role") or given.get("type") or "assistant"
    role = _SPEAKERS.get(role, role) if type(role) is str else role
    message: Raw = {"role": role, "content": _text(given.get("content", given.get("text")), place)}
    if role == "tool":
        message |= {key: given[key] for key in ("tool_call_id", "name") if given.get(key)}
    if given.get("tool_calls"):
        message["tool_calls"] = given["tool_calls"]
    return message


def _text(content: Any, place: str) -> Any:
    """The text of a content that comes in parts."""
    if type(content) is not list:
        return content
    texts = []
    for part in content:
        if type(part) is str:
            texts.append(part)
        elif type(part) is dict and part.get("type", "text") in _TEXT_PARTS and type(part.get("text")) is str:
            texts.append(part["text"])
        else:
            fix = "leave this call out of the export: only texts can be trained on"
            raise BadRow(Reason.UNSUPPORTED_FIELD, f"{place}.content", "holds a part that is no text", fix)
    return "".join(texts)


def _decoded(value: Any) -> Any:
    """A value that may come as a text of JSON."""
    if type(value) is str and value[:1] in '{["' and value:
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value
