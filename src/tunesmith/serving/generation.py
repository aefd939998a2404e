"""A generation request, and the text deltas and the end that answer it: what gateway and engines exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to generate. `adapter` is an exact version: the gateway has resolved the alias."""

    id: str
    adapter: str | None
    """Name of a loaded adapter version; None: the base model without an adapter."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A conversation, formatted with the base model's chat template."""
    prompt: str | Sequence[int] | None = None
    """Instead of messages: raw text or token ids."""
    max_tokens: int | None = None
    """Maximum number of new tokens; None: what the context length leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop sequences; they are not part of the answer."""
    seed: int | None = None
    """The same seed gives the same answer, whatever else is in the batch."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return with each generated one; None: no log-probabilities."""


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token and its log-probability before temperature and top_p."""

    id: int
    text: str
    log_prob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """The most likely tokens: id, text, log-probability."""


@dataclass(frozen=True)
class TextDelta:
    """More text of an answer; complete characters only."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class GenerationEnd:
    """The end of an answer; `adapter` and `digest` name the version that generated all of it."""

    finish: FinishReason
    num_prompt: int
    num_written: int
    adapter: str | None
    digest: str | None
    stopped_by: Literal["model", "text"] = "model"
    """If `finish` is `stop`: the model ended its answer, or one of the caller's stop sequences did."""


def was_cut(choice: Mapping[str, Any], *, has_stops: bool) -> bool:
    """Whether a stop sequence of the caller ended an answer whose `finish_reason` is `stop`, from another server.

    vLLM returns the sequence in `stop_reason` (a number is one of the model's own tokens). A server that returns no
    reason may have cut any answer to a request with stop sequences.
    """
    if "stop_reason" in choice:
        return isinstance(choice["stop_reason"], str)
    return has_stops
