"""Parameters of a request: used, accepted without effect, not supported, or unknown; none is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.bodies import can_be_passed_on
from tunesmith.serving.gateway.messages import check_messages
from tunesmith.serving.generation import GenerationRequest

Kind = Literal["chat", "text"]
MAX_CHOICES = 8
_MAX_STOPS = 4
_MAX_TOP_LOGPROBS = 20
_MAX_PROMPTS = 16
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
"""About accounts or billing: accepted, without effect on the answer."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "moderation": (),
}  # fmt: skip
"""Parameters that the embedded engine does not support, with the values that have no effect and are accepted."""


@dataclass(frozen=True)
class CompletionRequest:
    """A validated request. `extra` holds parameters that only an upstream server may support."""

    kind: Kind
    model: str
    generation: GenerationRequest
    """What each choice is generated from; its id, adapter, prompt and final limits come with the choice."""
    prompts: tuple[str | list[int], ...] = ()
    stream: bool = False
    include_usage: bool = False
    num_choices: int = 1
    user: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    store: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def read_chat(body: dict[str, Any]) -> CompletionRequest:
    said = _known(body, "chat")
    with_log_probs = _flag(said, "logprobs")
    top_logprobs = _whole(said, "top_logprobs", 0, _MAX_TOP_LOGPROBS)
    if top_logprobs is not None and not with_log_probs:
        raise invalid_parameter("top_logprobs", "needs logprobs: true")
    if said.get("max_tokens") is not None and said.get("max_completion_tokens") is not None:
        raise invalid_parameter("max_tokens", "and max_completion_tokens are the same parameter; give one of them")
    limit = "max_completion_tokens" if said.get("max_completion_tokens") is not None else "max_tokens"
    return CompletionRequest(
        kind="chat",
        generation=_generation(
            said,
            messages=check_messages(said.get("messages")),
            max_tokens=_max_tokens(said, limit),
            top_logprobs=(top_logprobs or 0) if with_log_probs else None,
        ),
        store=_flag(said, "store") if "store" in said else None,
        **_shared(said),
    )


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    said = _known(body, "text")
    shared = _shared(said)
    max_tokens = _max_tokens(said, "max_tokens") or 16  # as this old route has always had it
    prompts, top_logprobs = _prompts(said.get("prompt")), _whole(said, "logprobs", 0, _MAX_TOP_LOGPROBS)
    generation = _generation(said, max_tokens=max_tokens, top_logprobs=top_logprobs)
    return CompletionRequest(kind="text", generation=generation, prompts=prompts, **shared)


def _known(body: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """The body without nulls; raises for an unknown name."""
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


def refuse_extra(completion: CompletionRequest) -> None:
    """Refuse parameters that the embedded engine does not support."""
    for name in completion.extra:
        message = f"{name} is not supported by the embedded engine; leave it out, or serve the profile with vLLM"
        raise ApiError(400, message, code="unsupported_parameter", param=name)


def _generation(said: dict[str, Any], **more: Any) -> GenerationRequest:
    return GenerationRequest(
        id="",
        adapter=None,
        temperature=_number(said, "temperature", 0.0, 2.0, 1.0),
        top_p=_number(said, "top_p", 0.0, 1.0, 1.0),
        presence_penalty=_number(said, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=_number(said, "frequency_penalty", -2.0, 2.0, 0.0),
        stop=_stops(said.get("stop")),
        seed=_whole(said, "seed", -_MAX_SEED, _MAX_SEED - 1),
        **more,
    )


def _shared(said: dict[str, Any]) -> dict[str, Any]:
    model = said.get("model")
    if not isinstance(model, str) or not model or len(model) > _MAX_NAME:
        raise invalid_parameter("model", "must name a model: PROFILE, PROFILE@v7 or PROFILE@base", "invalid_model")
    stream = _flag(said, "stream")
    return {
        "model": model,
        "stream": stream,
        "include_usage": _include_usage(said.get("stream_options"), stream),
        "num_choices": _whole(said, "n", 1, MAX_CHOICES) or 1,
        "user": _text(said, "user"),
        "metadata": _metadata(said.get("metadata")),
        "extra": _extra(said),
    }


def _extra(said: Mapping[str, Any]) -> dict[str, Any]:
    for name in _NEUTRAL:
        if name in said and not can_be_passed_on(said[name]):
            raise invalid_parameter(name, "is nested too deeply, or holds a number of more than 64 bits")
    return {name: value for name, value in said.items() if name in _NEUTRAL and value not in _NEUTRAL[name]}


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise invalid_parameter(name, f"is {quoted(str(value))}; it must be true or false")
    return value


def _whole(said: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid_parameter(name, f"is {quoted(str(value))}; it must be a whole number from {low} to {high}")
    return value


def _max_tokens(said: Mapping[str, Any], name: str) -> int | None:
    """A larger limit than serve.max_tokens is accepted: the answer ends there with `length`."""
    return _whole(said, name, 1, 2**63)


def _number(said: Mapping[str, Any], name: str, low: float, high: float, otherwise: float) -> float:
    value = said.get(name, otherwise)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise invalid_parameter(name, f"is {quoted(str(value))}; it must be a number from {low:g} to {high:g}")
    return float(value)


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is not None and (not isinstance(value, str) or len(value) > _MAX_NAME or "\0" in value):
        raise invalid_parameter(name, f"must be a string of at most {_MAX_NAME} characters without NUL")
    return value or None


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise invalid_parameter("stream_options", "needs stream: true")
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise invalid_parameter("stream_options", 'must be {"include_usage": true} or absent')
    return _flag({key: value for key, value in options.items() if value is not None}, "include_usage")


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    is_list = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not is_list or not all(isinstance(text, str) and 0 < len(text) <= _MAX_NAME for text in stops):
        raise invalid_parameter("stop", f"must be a string, or a list of at most {_MAX_STOPS}, none of them empty")
    return tuple(stops)


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 16:
        raise invalid_parameter("metadata", "must be an object of at most 16 strings")
    for name, text in value.items():
        if len(name) > 64 or not isinstance(text, str) or len(text) > _MAX_NAME or "\0" in name + text:
            raise invalid_parameter(
                "metadata", f"{quoted(name)} must be a string of at most {_MAX_NAME} characters without NUL"
            )
    return value


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    """A string, a list of strings, a list of tokens, or a list of such lists."""
    is_many = isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int)
    many: Sequence[Any] = prompt if is_many else [prompt]
    if not 0 < len(many) <= _MAX_PROMPTS or not all(isinstance(one, str) or _is_tokens(one) for one in many):
        raise invalid_parameter(
            "prompt", f"must be a string, a list of tokens, or a list of at most {_MAX_PROMPTS} of either"
        )
    if not all(many):
        raise invalid_parameter("prompt", "is empty")
    if any(isinstance(one, str) and "\0" in one for one in many):
        raise invalid_parameter("prompt", "must not contain NUL")
    return tuple(many)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value)
    )
