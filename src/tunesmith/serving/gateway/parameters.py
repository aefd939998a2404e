"""What a request may say: a parameter is used, accepted without effect, not supported, or unknown; none is ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.serving.gateway.api_errors import ApiError, wrong
from tunesmith.serving.gateway.bodies import can_be_passed_on
from tunesmith.serving.gateway.messages import check_messages

Kind = Literal["chat", "text"]
MOST_CHOICES = 8
_MOST_STOPS = 4
_MOST_TOP = 20
_MOST_PROMPTS = 16
_MAX_SEED = 2**63
_MAX_NAME = 512

_SHARED = {"model", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p", "max_tokens",
           "presence_penalty", "frequency_penalty", "logprobs", "user", "metadata"}  # fmt: skip
_USED: dict[Kind, set[str]] = {
    "chat": _SHARED | {"messages", "max_completion_tokens", "top_logprobs", "store"},
    "text": _SHARED | {"prompt"},
}
_WITHOUT_EFFECT = {
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "parallel_tool_calls",
}
"""About somebody's account or bill: whatever they say, the answer is the same."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "moderation": (),
}  # fmt: skip
"""What we know but the embedded engine cannot do; these values ask for nothing, so they are let through."""


@dataclass(frozen=True)
class Asked:
    """A checked request. `extra` is what the embedded engine cannot do and a server that others run may."""

    kind: Kind
    model: str
    messages: tuple[dict[str, Any], ...] = ()
    prompts: tuple[str | list[int], ...] = ()
    stream: bool = False
    include_usage: bool = False
    num_choices: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    store: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.num_choices * max(1, len(self.prompts))


def read_chat(body: dict[str, Any]) -> Asked:
    said = _known(body, "chat")
    with_log_probs = _flag(said, "logprobs")
    top_logprobs = _whole(said, "top_logprobs", 0, _MOST_TOP)
    if top_logprobs is not None and not with_log_probs:
        raise wrong("top_logprobs", "needs logprobs: true")
    if said.get("max_tokens") is not None and said.get("max_completion_tokens") is not None:
        raise wrong("max_tokens", "and max_completion_tokens say the same thing; give one of them")
    limit = "max_completion_tokens" if said.get("max_completion_tokens") is not None else "max_tokens"
    return Asked(
        kind="chat",
        messages=check_messages(said.get("messages")),
        top_logprobs=(top_logprobs or 0) if with_log_probs else None,
        store=_flag(said, "store") if "store" in said else None,
        **_shared(said, limit),
    )


def read_completion(body: dict[str, Any]) -> Asked:
    said = _known(body, "text")
    shared = _shared(said, "max_tokens")
    if shared["max_tokens"] is None:
        shared["max_tokens"] = 16  # as this old route has always had it
    return Asked(
        kind="text", prompts=_prompts(said.get("prompt")), top_logprobs=_whole(said, "logprobs", 0, _MOST_TOP), **shared
    )


def _known(body: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """What is said, without nulls; raises for a name that nobody knows, so that no setting is silently ignored."""
    known = _USED[kind] | _WITHOUT_EFFECT | set(_NEUTRAL)
    for name in body:
        if name not in known:
            raise ApiError(
                400,
                f"unknown parameter {quoted(name)}{did_you_mean(name, known)}",
                code="unknown_parameter",
                param=name[:100],
            )
    return {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}


def refuse_extra(asked: Asked) -> None:
    """What the embedded engine cannot do is said, not left out."""
    for name in asked.extra:
        message = f"{name} is not supported by the embedded engine; leave it out, or serve the profile with vLLM"
        raise ApiError(400, message, code="unsupported_parameter", param=name)


def _shared(said: dict[str, Any], limit: str) -> dict[str, Any]:
    model = said.get("model")
    if not isinstance(model, str) or not model or len(model) > _MAX_NAME:
        raise wrong("model", "must name a model: PROFILE, PROFILE@v7 or PROFILE@base", "invalid_model")
    stream = _flag(said, "stream")
    return {
        "model": model,
        "stream": stream,
        "include_usage": _include_usage(said.get("stream_options"), stream),
        "num_choices": _whole(said, "n", 1, MOST_CHOICES) or 1,
        "max_tokens": _max_tokens(said, limit),
        "temperature": _number(said, "temperature", 0.0, 2.0, 1.0),
        "top_p": _number(said, "top_p", 0.0, 1.0, 1.0),
        "presence_penalty": _number(said, "presence_penalty", -2.0, 2.0, 0.0),
        "frequency_penalty": _number(said, "frequency_penalty", -2.0, 2.0, 0.0),
        "stop": _stops(said.get("stop")),
        "seed": _whole(said, "seed", -_MAX_SEED, _MAX_SEED - 1),
        "user": _text(said, "user"),
        "metadata": _metadata(said.get("metadata")),
        "extra": _extra(said),
    }


def _extra(said: Mapping[str, Any]) -> dict[str, Any]:
    for name in _NEUTRAL:
        if name in said and not can_be_passed_on(said[name]):
            raise wrong(name, "is nested too deeply, or holds a number of more than 64 bits")
    return {name: value for name, value in said.items() if name in _NEUTRAL and value not in _NEUTRAL[name]}


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise wrong(name, f"is {quoted(str(value))}; it is true or false")
    return value


def _whole(said: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, f"is {quoted(str(value))}; it is a whole number from {low} to {high}")
    return value


def _max_tokens(said: Mapping[str, Any], name: str) -> int | None:
    """More than the server writes is no mistake: the answer ends at serve.max_tokens and says `length`."""
    return _whole(said, name, 1, 2**63)


def _number(said: Mapping[str, Any], name: str, low: float, high: float, otherwise: float) -> float:
    value = said.get(name, otherwise)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise wrong(name, f"is {quoted(str(value))}; it is a number from {low:g} to {high:g}")
    return float(value)


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_NAME or "\0" in value):
        raise wrong(name, f"is no text of at most {_MAX_NAME} characters, none of them NUL")
    return value or None


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise wrong("stream_options", "needs stream: true")
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise wrong("stream_options", 'is {"include_usage": true} or left out')
    return _flag({key: value for key, value in options.items() if value is not None}, "include_usage")


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    is_list = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not is_list or not all(isinstance(text, str) and 0 < len(text) <= _MAX_NAME for text in stops):
        raise wrong("stop", f"is a text, or a list of at most {_MOST_STOPS}, none of them empty")
    return tuple(stops)


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 16:
        raise wrong("metadata", "is an object of at most 16 texts")
    for name, text in value.items():
        if len(name) > 64 or not isinstance(text, str) or len(text) > _MAX_NAME or "\0" in name + text:
            raise wrong("metadata", f"{quoted(name)} is no text of at most {_MAX_NAME} characters, none of them NUL")
    return value


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    """A text, a list of texts, a list of tokens, or a list of such lists."""
    is_many = isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int)
    many: Sequence[Any] = prompt if is_many else [prompt]
    if not 0 < len(many) <= _MOST_PROMPTS or not all(isinstance(one, str) or _is_tokens(one) for one in many):
        raise wrong("prompt", f"is a text, a list of tokens, or a list of at most {_MOST_PROMPTS} of either")
    if not all(many):
        raise wrong("prompt", "is empty")
    if any(isinstance(one, str) and "\0" in one for one in many):
        raise wrong("prompt", "holds a character that no text should (NUL); remove it")
    return tuple(many)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value)
    )
