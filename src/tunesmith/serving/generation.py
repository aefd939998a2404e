"""One answer that is asked for, and the pieces in which it comes: what gateway and engines say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Generation:
    """What one row of a batch has to write. The version is exact: an alias was resolved before."""

    id: str
    adapter: str | None
    """Name of a loaded adapter version; None asks the bare base."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A conversation, written down by the base's own chat template."""
    prompt: str | Sequence[int] | None = None
    """Instead of messages: text, or tokens, as they are."""
    max_tokens: int | None = None
    """Most tokens to write; None: what the context leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    seed: int | None = None
    """The same seed gives the same answer, whoever else is in the batch."""
    num_top: int | None = None
    """How many likely tokens to tell beside each written one; None: no log-probabilities at all."""


@dataclass(frozen=True)
class TokenReading:
    """One written token and how likely it was, before temperature and top_p."""

    id: int
    text: str
    log_prob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """The likeliest tokens: id, text, log-probability."""


@dataclass(frozen=True)
class Piece:
    """More text of an answer; whole characters only."""

    text: str
    tokens: tuple[TokenReading, ...] = ()


@dataclass(frozen=True)
class Ended:
    """The answer is complete; `adapter` and `digest` are of what wrote all of it."""

    finish: Finish
    num_prompt: int
    num_written: int
    adapter: str | None
    digest: str | None
    by: Literal["model", "text"] = "model"
    """Of `stop`: whether the model ended its answer, or a stop text of the caller cut it."""

    @property
    def is_by_itself(self) -> bool:
        """Nothing cut it: neither a limit nor a stop text."""
        return self.finish == "stop" and self.by == "model"


def was_cut(choice: Mapping[str, Any], *, has_stops: bool) -> bool:
    """Whether a stop text of the caller ended an answer of another server, whose `finish_reason` is `stop`.

    vLLM tells the text in `stop_reason` (a number is a token of the model's own). Who tells nothing may have cut any
    answer to a request with stop texts.
    """
    if "stop_reason" in choice:
        return isinstance(choice["stop_reason"], str)
    return has_stops
