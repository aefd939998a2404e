"""The base's own chat template: conversations to text, and what the template does that nobody wrote down.

Templates differ in what follows the last turn, in whether they know functions at all, and in the form in which they
expect the arguments of a call. Each is found out once, by a tiny conversation.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from tunesmith.core.errors import ConfigError, DataError, TunesmithError
from tunesmith.datasets.example import TOOLS

Message = Mapping[str, Any]
"""role and content, perhaps tool_calls; an answer of weight 0 is context, every other answer is trained.
A first message with the role "tools" defines functions."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "the probe of a template"
_DEFINED, _CALLED, _KEY, _VALUE, _RESULT = "probe_defined", "probe_called", "probe_key", "probe_value", "probe_result"
_NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")
_ALWAYS = date(2026, 1, 1)
_SAID = "what the probe says"
_WITHOUT = "use a base whose template knows tools, or write calls and results as plain text"


@dataclass(frozen=True)
class _ToolSupport:
    """Which parts of a conversation with tools the template renders, and how it takes the arguments of a call."""

    definitions: bool = False
    calls: bool = False
    results: bool = False
    arguments_as_text: bool = False
    error: str = ""
    """What the template raised for a conversation with tools."""


class ChatTemplate:
    """Renders conversations; `control` finds the texts of control tokens."""

    probe: tuple[Sequence[Message], str] = (
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": _SAID}),
        _SAID,
    )
    """A question and its answer, and what the answer says."""

    def __init__(self, tokenizer: Any, control: re.Pattern[str]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the base model has no chat template; add its chat_template.jinja to the base folder, then lock again"
            )
        self._tokenizer = tokenizer
        self._control = control
        self._source = str(tokenizer.chat_template)
        self.marks_answers = _GENERATION.search(self._source) is not None
        self._dated: str | None = None  # what the tokenizer has
        if isinstance(tokenizer.chat_template, str):
            # today's date would make other tokens of the same conversation when a training goes on tomorrow
            self._dated = _NOW.sub(lambda found: repr(_ALWAYS.strftime(found[2])), tokenizer.chat_template)
        self._content_in_parts = self._find_form()

    def render(self, messages: Sequence[Message], what: str, *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation, or the text in front of the answer to it."""
        return str(self._apply(messages, what, tokenize=False, add_generation_prompt=add_generation_prompt))

    def assistant_mask(self, messages: Sequence[Message], what: str) -> list[bool]:
        """Return for each token of the rendered text whether the template marks it as the assistant's."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        return [bool(bit) for bit in self._apply(messages, what, **options)["assistant_masks"]]

    @cached_property
    def suffix_after_last_turn(self) -> str:
        """The text that some templates write after the last turn, for example a token that ends every conversation.

        It follows the last answer but no earlier one. If turns have no end token of their own, that text ends the
        answer: then it is part of the turn, and the suffix is empty.
        """
        asked, answer = self.probe
        more = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "another"}]
        try:
            last, earlier = self.render(asked, _PROBE), self.render([*asked, *more], _PROBE)
        except TunesmithError:
            return ""  # it takes single questions only
        rests = [self._pieces(text.partition(answer)[2]) for text in (last, earlier)]
        same = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*rests, strict=False))]
        suffix = "".join(rests[0][len(same) :])
        has_end = any(map(self._control.fullmatch, same))
        return suffix if has_end and self._control.search(suffix) else ""

    def _find_form(self) -> bool:
        """Whether a content must be given as a list of parts, as in templates of models that see pictures."""
        trouble: TunesmithError | None = None
        messages, said = self.probe
        for self._content_in_parts in (False, True):
            try:
                if said in self.render(messages, _PROBE):
                    return self._content_in_parts
            except TunesmithError as error:
                trouble = trouble or error
        raise trouble or ConfigError(
            "the base's chat template does not write what the assistant says; correct the template"
        )

    def call_probe(self) -> tuple[Sequence[Message], str] | None:
        """A question and a call, and the last thing that the call says; None if the template cannot write calls."""
        if "tool_calls" not in self._source or not self._tool_support.calls:
            return None
        return _probe()[0 if self._tool_support.definitions else 1 : 3], _VALUE

    def _pieces(self, text: str) -> list[str]:
        """The text cut around its control tokens."""
        pieces, place = [], 0
        for found in self._control.finditer(text):
            pieces += [text[place : found.start()], found[0]]
            place = found.end()
        return [*pieces, text[place:]]

    def _apply(self, messages: Sequence[Message], what: str, **options: Any) -> Any:
        as_text = False
        if any(message["role"] in (TOOLS, "tool") or message.get("tool_calls") for message in messages):
            as_text = self._tool_support.arguments_as_text
            self._refuse_unwritten(messages, what)
        try:
            return self._ask(messages, as_text, **options)
        except Exception as error:  # whatever the template raises, it is about this conversation
            raise DataError(
                f"{what}: the base's chat template refuses the conversation ({type(error).__name__}: {error}); "
                "change the conversation, or the template"
            ) from None

    def _ask(self, messages: Sequence[Message], as_text: bool, **options: Any) -> Any:
        tools = None
        if messages and messages[0]["role"] == TOOLS:
            tools, messages = json.loads(messages[0]["content"]), messages[1:]
        plain = [_plain(message, as_text, self._content_in_parts) for message in messages]
        return self._tokenizer.apply_chat_template(plain, tools=tools, chat_template=self._dated, **options)

    @cached_property
    def _tool_support(self) -> _ToolSupport:
        found, trouble = None, ""
        for as_text in (False, True):
            try:
                text = str(self._ask(_probe(), as_text, tokenize=False))
            except Exception as error:  # whatever the template raises: it does not take such a conversation
                trouble = f"{type(error).__name__}: {error}"
                continue
            is_python = f"'{_KEY}'" in text  # not JSON: such a template wants the arguments as a text
            has_call = _CALLED in text and _KEY in text and not is_python
            found = _ToolSupport(_DEFINED in text, has_call, _RESULT in text, as_text)
            if not is_python:
                break
        return found or _ToolSupport(error=trouble)

    def _refuse_unwritten(self, messages: Sequence[Message], what: str) -> None:
        """What the template leaves out in silence would be trained as an empty answer, or asked for out of nowhere."""
        support = self._tool_support
        for is_there, is_written, name in (
            (messages[0]["role"] == TOOLS, support.definitions, "the definitions of functions (tools)"),
            (any(message.get("tool_calls") for message in messages), support.calls, "the calls of functions"),
            (any(message["role"] == "tool" for message in messages), support.results, "the messages of tools"),
        ):
            if not is_there or is_written:
                continue
            if support.error:
                raise ConfigError(f"{what}: the base's chat template knows no functions ({support.error}); {_WITHOUT}")
            raise ConfigError(f"{what}: the base's chat template leaves out {name}; {_WITHOUT}")


def _probe() -> list[Message]:
    """A conversation with a function. Ids of nine letters and digits, because some templates refuse others."""
    definition = {
        "type": "function",
        "function": {"name": _DEFINED, "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": {_KEY: _VALUE}}}
    return [
        {"role": TOOLS, "content": json.dumps([definition])},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": "abcdefghi", "name": _CALLED},
        {"role": "assistant", "content": "b"},
    ]


def _plain(message: Message, as_text: bool, in_parts: bool) -> dict[str, Any]:
    """What a template may see: our weights are not for it."""
    plain = {key: value for key, value in message.items() if key != "weight"}
    if in_parts:
        plain["content"] = [{"type": "text", "text": message["content"]}]
    if as_text and plain.get("tool_calls"):
        plain["tool_calls"] = [_with_text(call) for call in plain["tool_calls"]]
    return plain


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
