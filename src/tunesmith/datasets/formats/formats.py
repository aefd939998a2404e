"""Translates the rows of other tools into our forms; what is wrong with one is told in the words of its own file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tunesmith.core.errors import quoted
from tunesmith.datasets.example import BadRow, Reason, named

_SPEAKERS = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool"}
_SPEAKERS |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model", "ai"), "assistant")
_SPEAKERS |= dict.fromkeys(("function", "function_response", "ipython"), "tool")
_CALL = "function_call"

FIELDS = frozenset(
    {"messages", "prompt", "completion", "label", "chosen", "rejected", "tools", "conversations", "system"}
)
FIELDS |= {"instruction", "input", "output", "history", "preferred_output", "non_preferred_output"}
FIELDS |= {"observations", "type", "traceId", "trace_id", "info", "data", "spans", "attributes"}
"""Every field at the top of a row that some format reads."""

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Translated:
    """A row in one of our forms, and where its parts stand in the row it came from."""

    fields: Raw
    places: dict[str, str] = field(default_factory=dict)
    """By field of ours, with or without an index: how it is called in the file."""
    tails: dict[str, str] | None = None
    """What `content` and `role` of a message are called there; None: the same."""
    is_window: bool = False
    """It ends with the answer to learn, and the answers before it are context."""

    def place(self, name: str) -> str:
        """How the file calls a field of ours."""
        head, dot, rest = name.partition(".")
        base, bracket, index = head.partition("[")
        known = self.places.get(head)
        if known is None:
            known = self.places.get(base, base) + bracket + index
        if self.tails is None:
            return known + dot + rest
        return known + self.tails.get(rest.split(".")[0].split("[")[0], "")


Translator = Callable[[Raw], Sequence[Translated]]


def openai_pair(row: Raw) -> Sequence[Translated]:
    """OpenAI's preference fine-tuning: input, preferred_output, non_preferred_output."""
    given = _needed(row, "input", dict, '{"messages": […]}')
    if "messages" not in given:
        raise BadRow(Reason.MISSING_FIELD, "input.messages", "is missing", "add the messages of the prompt")
    fields = {
        "prompt": given["messages"],
        "chosen": _needed(row, "preferred_output", list, "a list of messages"),
        "rejected": _needed(row, "non_preferred_output", list, "a list of messages"),
    }
    places = {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    return [Translated(fields | _tools(given), places)]


def shared_pair(row: Raw) -> Sequence[Translated]:
    """A preference whose two answers each begin with the whole prompt."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    num = 0
    most = min(len(chosen), len(rejected)) - 1
    while num < most and chosen[num] == rejected[num] and type(chosen[num]) is dict:
        num += 1
    while num and chosen[num - 1].get("role") not in ("user", "tool"):
        num -= 1
    if not num:
        fix = "begin both with the same messages, or write these as prompt"
        raise BadRow(Reason.ROLE_ORDER, "rejected", "does not begin with the prompt that chosen begins with", fix)
    begin = [{key: value for key, value in message.items() if key != "weight"} for message in chosen[:num]]
    if type(prompt) is str and all(message.get("content") != prompt for message in begin):
        fix = "remove prompt, or the messages in front of the two answers"
        raise BadRow(Reason.AMBIGUOUS_FORM, "prompt", "is not what chosen begins with", fix)
    fields = {"prompt": begin, "chosen": chosen[num:], "rejected": rejected[num:]}
    places = {"prompt": "chosen"}
    for name in ("chosen", "rejected"):
        places |= {f"{name}[{place}]": f"{name}[{place + num}]" for place in range(len(fields[name]))}
    return [Translated(fields | _tools(row), places)]


def has_shared_pair(row: Raw) -> bool:
    """Whether both answers of a preference begin with somebody who asks."""
    return (
        all(
            type(row.get(name)) is list
            and row[name]
            and type(row[name][0]) is dict
            and row[name][0].get("role") in ("system", "user")
            for name in ("chosen", "rejected")
        )
        and type(row.get("prompt", "")) is str
    )


def sharegpt(row: Raw) -> Sequence[Translated]:
    """ShareGPT: conversations of from and value; with chosen and rejected, as LLaMA-Factory writes preferences."""
    given = _needed(row, "conversations", list, "a list of messages")
    messages = [_shared_message(message, f"conversations[{place}]") for place, message in enumerate(given)]
    shift = 0
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _needed(row, "system", str, "a string")})
        shift = 1
    name = "prompt" if "chosen" in row or "rejected" in row else "messages"
    places = {f"{name}[{place + shift}]": f"conversations[{place}]" for place in range(len(given))}
    places |= {f"{name}[0]": "system"} if shift else {}
    fields: Raw = {name: messages}
    if name == "prompt":
        for answer in ("chosen", "rejected"):
            fields[answer] = [_shared_message(_needed(row, answer, dict, '{"from": …, "value": …}'), answer)]
            places[f"{answer}[0]"] = answer
    tails = {"role": ".from", "content": ".value", "weight": ".weight"}
    if given and "role" in given[0]:
        tails = {"role": ".role", "content": ".content", "weight": ".weight"}
    return [Translated(fields | _tools(row), places | {name: "conversations"}, tails)]


def _shared_message(message: Any, where: str) -> Raw:
    if type(message) is not dict:
        raise BadRow(Reason.WRONG_TYPE, where, f"is {named(message)}, not a message", 'write {"from": …, "value": …}')
    speaker, text = ("role", "content") if "role" in message and "from" not in message else ("from", "value")
    for key in (speaker, text):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise BadRow(Reason.MISSING_FIELD, f"{where}.{key}", "is missing", f"add '{key}' to the message")
    who, said = message[speaker], message.get(text)
    rest = {key: value for key, value in message.items() if key not in {speaker, text}}
    if who == _CALL:
        return {**rest, "role": "assistant", "tool_calls": _calls(said, f"{where}.{text}")}
    if type(who) is not str or who.strip().lower() not in _SPEAKERS:
        what = quoted(who, 30) if type(who) is str else named(who)
        fix = "use human, gpt, system, function_call or observation"
        raise BadRow(Reason.BAD_ROLE, f"{where}.{speaker}", f"{what} is not a speaker", fix)
    if type(said) is not str and not rest.get("tool_calls"):
        raise BadRow(Reason.WRONG_TYPE, f"{where}.{text}", f"is {named(said)}, not a string", "write a string")
    return {**rest, "role": _SPEAKERS[who.strip().lower()], "content": said}


def _calls(text: Any, where: str) -> list[Raw]:
    """The calls that a text of JSON makes."""
    try:
        found = orjson.loads(text) if type(text) is str else text
    except orjson.JSONDecodeError:
        found = None
    calls = found if type(found) is list else [found]
    if not calls or not all(type(call) is dict and "name" in call for call in calls):
        fix = 'write {"name": …, "arguments": {…}} as JSON'
        raise BadRow(Reason.BAD_TOOLS, where, "is no call of a function", fix)
    return [{"type": "function", "function": call} for call in calls]


def alpaca(row: Raw) -> Sequence[Translated]:
    """Alpaca: instruction, input, output, system, history; with chosen and rejected for output, a preference."""
    places: list[str] = []
    messages: list[Raw] = []

    def add(role: str, content: Any, place: str) -> None:
        messages.append({"role": role, "content": content})
        places.append(place)

    if row.get("system"):
        add("system", _needed(row, "system", str, "a string"), "system")
    for number, turn in enumerate(_optional(row, "history", list, "a list of pairs")):
        if type(turn) is not list or len(turn) != 2:
            fix = "write each earlier turn as [question, answer]"
            raise BadRow(Reason.WRONG_TYPE, f"history[{number}]", "is not a question and an answer", fix)
        add("user", turn[0], f"history[{number}][0]")
        add("assistant", turn[1], f"history[{number}][1]")
    asked = [_needed(row, "instruction", str, "a string"), _optional(row, "input", str, "a string")]
    add("user", "\n\n".join(part for part in asked if part), "instruction")
    if "chosen" in row or "rejected" in row:
        fields = {"prompt": messages} | {key: _needed(row, key, str, "a string") for key in ("chosen", "rejected")}
        named_places = {f"prompt[{place}]": origin for place, origin in enumerate(places)}
    else:
        add("assistant", _needed(row, "output", str, "a string"), "output")
        fields = {"messages": messages}
        named_places = {f"messages[{place}]": origin for place, origin in enumerate(places)} | {"messages": "output"}
    return [Translated(fields | _tools(row), named_places, {})]


def _needed(row: Raw, name: str, kind: type, wanted: str) -> Any:
    if name not in row:
        raise BadRow(Reason.MISSING_FIELD, name, "is missing", f"add '{name}': {wanted}")
    if type(row[name]) is not kind:
        raise BadRow(Reason.WRONG_TYPE, name, f"is {named(row[name])}, not {wanted}", f"write {wanted}")
    return row[name]


def _optional(row: Raw, name: str, kind: type, wanted: str) -> Any:
    return kind() if row.get(name) is None else _needed(row, name, kind, wanted)


def _tools(row: Raw) -> Raw:
    """Definitions of functions beside a row, where there are some: a list, or a text of JSON; flat ones are wrapped."""
    tools = row.get("tools")
    if type(tools) is str and tools.strip():
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError:
            raise BadRow(Reason.BAD_TOOLS, "tools", "is a text that is not JSON", "write a list of functions") from None
    if not tools:
        return {}
    if type(tools) is not list:
        return {"tools": tools}
    is_flat = [type(tool) is dict and "function" not in tool and "name" in tool for tool in tools]
    return {
        "tools": [
            {"type": "function", "function": tool} if flat else tool for tool, flat in zip(tools, is_flat, strict=True)
        ]
    }
