"""Every JSON body that a route of the gateway reads, as a pydantic model. No parameter is silently ignored.

A parameter of a completion is used, accepted without effect, passed on to an upstream server, or unknown. `Told` holds
what a caller is told of a value that does not fit.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from tunesmith.core.errors import quoted
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter
from tunesmith.serving.gateway.bodies import can_be_passed_on
from tunesmith.serving.gateway.messages import check_messages
from tunesmith.serving.gateway.validation import Body, Flag, Told, number, refused, whole
from tunesmith.serving.generation import GenerationRequest

Kind = Literal["chat", "text"]
MAX_CHOICES = 8
_MAX_STOPS = 4
_MAX_TOP_LOGPROBS = 20
_MAX_PROMPTS = 16
_MAX_SEED = 2**63
_MAX_TOKENS = 2**63  # more than serve.max_tokens is accepted: the answer ends there with `length`
_MAX_NAME = 512
_MAX_ID = 200
_MAX_PROBES = 256
_MAX_DRAIN_S = 600
_OLD_MAX_TOKENS = 16  # of /v1/completions, as that old route has always had it

# -- kinds of values


def _without_nul(text: str | None) -> str | None:
    if text is not None and "\0" in text:
        raise ValueError
    return text


def _passable(value: Any) -> Any:
    if not can_be_passed_on(value):
        raise ValueError
    return value


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    try:
        return check_messages(value)
    except ApiError as error:
        raise refused(error) from None


def _metadata(value: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, text in (value or {}).items():
        if len(name) > 64 or not isinstance(text, str) or len(text) > _MAX_NAME or "\0" in name + text:
            told = f"{quoted(name)} must be a string of at most {_MAX_NAME} characters without NUL"
            raise refused(invalid_parameter("metadata", told))
    return value


def _prompts(prompt: Any) -> tuple[str | list[int], ...]:
    """A string, a list of strings, a list of tokens, or a list of such lists."""
    is_many = isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int)
    many: Sequence[Any] = prompt if is_many else [prompt]
    if not 0 < len(many) <= _MAX_PROMPTS or not all(isinstance(one, str) or _is_tokens(one) for one in many):
        told = f"must be a string, a list of tokens, or a list of at most {_MAX_PROMPTS} of either"
        raise refused(invalid_parameter("prompt", told))
    if not all(many):
        raise refused(invalid_parameter("prompt", "is empty"))
    if any(isinstance(one, str) and "\0" in one for one in many):
        raise refused(invalid_parameter("prompt", "must not contain NUL"))
    return tuple(many)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in value)
    )


Stop = Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
PassedOn = Annotated[
    Any, AfterValidator(_passable), Told("is nested too deeply, or holds a number of more than 64 bits")
]
"""The embedded engine does not support it; an upstream server may."""
Messages = Annotated[tuple[dict[str, Any], ...], PlainValidator(_messages)]


# -- completions

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "moderation": (),
}  # fmt: skip
"""Parameters that are passed on, with the values that have no effect, so that every engine accepts them."""


@dataclass(frozen=True)
class CompletionRequest:
    """A validated completion. `extra` holds parameters that only an upstream server may support."""

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


class CompletionBody(Body):
    """What both routes of completions take. A null is as good as nothing."""

    model: Annotated[
        str,
        Field(min_length=1, max_length=_MAX_NAME),
        Told("must name a model: PROFILE, PROFILE@v7 or PROFILE@base", code="invalid_model"),
    ]
    stream: Flag = None
    stream_options: Annotated[dict[str, Any] | None, Told('must be {"include_usage": true} or absent')] = None
    n: Annotated[int | None, *whole(1, MAX_CHOICES)] = None
    max_tokens: Annotated[int | None, *whole(1, _MAX_TOKENS)] = None
    temperature: Annotated[float | None, *number(0.0, 2.0)] = None
    top_p: Annotated[float | None, *number(0.0, 1.0)] = None
    presence_penalty: Annotated[float | None, *number(-2.0, 2.0)] = None
    frequency_penalty: Annotated[float | None, *number(-2.0, 2.0)] = None
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS)] | None,
        Told(f"must be a string, or a list of at most {_MAX_STOPS}, none of them empty"),
    ] = None
    seed: Annotated[int | None, *whole(-_MAX_SEED, _MAX_SEED - 1)] = None
    user: Annotated[
        str | None,
        Field(max_length=_MAX_NAME),
        AfterValidator(_without_nul),
        Told(f"must be a string of at most {_MAX_NAME} characters without NUL"),
    ] = None
    metadata: Annotated[
        dict[str, Any] | None,
        Field(max_length=16),
        AfterValidator(_metadata),
        Told("must be an object of at most 16 strings"),
    ] = None

    tools: PassedOn = None
    tool_choice: PassedOn = None
    functions: PassedOn = None
    function_call: PassedOn = None
    response_format: PassedOn = None
    modalities: PassedOn = None
    logit_bias: PassedOn = None
    echo: PassedOn = None
    suffix: PassedOn = None
    best_of: PassedOn = None
    audio: PassedOn = None
    prediction: PassedOn = None
    reasoning_effort: PassedOn = None
    verbosity: PassedOn = None
    web_search_options: PassedOn = None
    moderation: PassedOn = None

    # about accounts or billing: accepted, without effect on the answer
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    parallel_tool_calls: Any = None

    @field_validator("stream_options", mode="before")
    @classmethod
    def _needs_stream(cls, options: Any, info: ValidationInfo) -> Any:
        if options is not None and not info.data.get("stream"):
            raise refused(invalid_parameter("stream_options", "needs stream: true"))
        return options

    @field_validator("stream_options")
    @classmethod
    def _known_options(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        if not set(options or ()) <= {"include_usage", "include_obfuscation"}:
            raise ValueError
        wanted = (options or {}).get("include_usage")
        if wanted is not None and not isinstance(wanted, bool):
            told = f"is {quoted(str(wanted))}; it must be true or false"
            raise refused(invalid_parameter("include_usage", told))
        return options

    def _request(self, kind: Kind, generation: Mapping[str, Any], **more: Any) -> CompletionRequest:
        extra = {name: getattr(self, name) for name in self.model_fields_set & _NEUTRAL.keys()}
        return CompletionRequest(
            kind=kind,
            model=self.model,
            generation=GenerationRequest(
                id="",
                adapter=None,
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                seed=self.seed,
                **generation,
            ),
            stream=bool(self.stream),
            include_usage=bool((self.stream_options or {}).get("include_usage")),
            num_choices=self.n or 1,
            user=self.user or None,
            metadata=self.metadata or {},
            extra={name: value for name, value in extra.items() if value is not None and value not in _NEUTRAL[name]},
            **more,
        )


class ChatBody(CompletionBody):
    """`POST /v1/chat/completions`."""

    checked_first = ("logprobs", "top_logprobs", "messages", "store", "model", "stream", "stream_options", "n",
                     "max_tokens", "max_completion_tokens")  # fmt: skip

    logprobs: Flag = None
    top_logprobs: Annotated[int | None, *whole(0, _MAX_TOP_LOGPROBS)] = None
    messages: Messages = Field(default=None, validate_default=True)
    store: Flag = None
    max_completion_tokens: Annotated[int | None, *whole(1, _MAX_TOKENS)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, num: int | None, info: ValidationInfo) -> int | None:
        if num is not None and not info.data.get("logprobs"):
            raise refused(invalid_parameter("top_logprobs", "needs logprobs: true"))
        return num

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, num: int | None, info: ValidationInfo) -> int | None:
        if num is not None and info.data.get("max_tokens") is not None:
            told = "and max_completion_tokens are the same parameter; give one of them"
            raise refused(invalid_parameter("max_tokens", told))
        return num

    def request(self) -> CompletionRequest:
        generation = {
            "messages": self.messages,
            "max_tokens": self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            "top_logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        return self._request("chat", generation, store=self.store)


class TextBody(CompletionBody):
    """`POST /v1/completions`."""

    prompt: Annotated[tuple[str | list[int], ...], PlainValidator(_prompts)] = Field(
        default=None, validate_default=True
    )
    logprobs: Annotated[int | None, *whole(0, _MAX_TOP_LOGPROBS)] = None

    def request(self) -> CompletionRequest:
        generation = {"max_tokens": self.max_tokens or _OLD_MAX_TOKENS, "top_logprobs": self.logprobs}
        return self._request("text", generation, prompts=self.prompt)


# -- feedback


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError
    return text


def _without_control(text: str | None) -> str | None:
    if any(unicodedata.category(char) == "Cc" for char in text or ""):
        raise ValueError
    return text


class FeedbackBody(Body):
    """`POST /v1/feedback`: a rating, a comment or a correction of an answer, by the id of its response."""

    response_id: Annotated[
        str,
        Field(min_length=1, max_length=_MAX_ID),
        AfterValidator(_printable),
        Told("must be the id of an answer, such as chatcmpl-…", "must be a string"),
    ] = Field(default="", validate_default=True)
    comment: Annotated[str | None, Told("must be a string")] = None
    correction: Annotated[str | None, Told("must be a string")] = None
    rater: Annotated[
        str | None,
        AfterValidator(_without_control),
        Told("holds a control character; remove it", "must be a string"),
    ] = None
    rating: Annotated[
        str | int | float | None,
        Told("must be helpful, partial, irrelevant, up, down, or a number from 0 to 1"),
    ] = None
    choice: Annotated[
        int, Field(ge=0, lt=MAX_CHOICES * _MAX_PROMPTS), Told("must be the index of a choice, from 0")
    ] = 0

    @classmethod
    def given(cls, said: Mapping[str, Any]) -> Mapping[str, Any]:
        """A null is as good as nothing."""
        return {name: value for name, value in said.items() if value is not None}


# -- control


class ControlBody(Body):
    """Of the `embedded` target, which knows these routes: its errors are for us, not for applications."""

    @classmethod
    def unknown(cls, name: str, path: str) -> ApiError:
        known = ", ".join(cls.model_fields)
        return invalid_parameter(name[:100], f"is unknown; {path} takes {known}", "unknown_parameter")


Text = Annotated[str, Told("must be a str")]


class LoadBody(ControlBody):
    """`POST /control/load`."""

    profile: Text
    name: Text
    path: Text
    digest: Text


class ProbeBody(ControlBody):
    """`POST /control/probe`."""

    profile: Text
    name: Text
    prompts: Annotated[
        list[Messages],
        Field(min_length=1, max_length=_MAX_PROBES),
        Told(f"must be a list of 1 to {_MAX_PROBES} conversations", "must be a list"),
    ]
    max_tokens: Annotated[int, Told("must be a int")]


class FlipBody(ControlBody):
    """`POST /control/flip`."""

    profile: Text


class DrainBody(ControlBody):
    """`POST /control/drain`."""

    name: Text
    timeout_s: Annotated[
        float,
        Field(ge=0, le=_MAX_DRAIN_S),
        Told(f"must be a number from 0 to {_MAX_DRAIN_S}", "must be a float"),
    ]


class UnloadBody(ControlBody):
    """`POST /control/unload`."""

    name: Text
