"""What else looks at requests: who may take the device away, who mirrors traffic, and servers that others run.

The gateway calls these and nothing more of them; each is made by `gateway/server.py` and runs beside the HTTP server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.device.rules import ServerState
from tunesmith.serving.generation import GenerationRequest


@dataclass(frozen=True)
class Exchange:
    """One finished request: what was asked of which version, and the answer that was shown."""

    response_id: str
    """By which its experience is found."""
    profile: str
    version: str
    """Exact: support@v7, or support@base."""
    digest: str | None
    is_live: bool
    """Whether the profile's own name was asked for, not an exact version."""
    asked: GenerationRequest
    """As the engine was told; `adapter` is what answered."""
    messages: Sequence[Mapping[str, Any]]
    """The conversation, without the answer."""
    answer: str
    finish: str
    """stop, length, cancelled; or whatever a server that others run has said."""
    seconds: float


class Engines(Protocol):
    """What a hand-over needs of the engines of this server; all of them together."""

    @property
    def num_active(self) -> int:
        """Answers under way."""

    async def step_aside(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        """Let answers under way end (at most `drain_s`), then give the device back; returns when it is free.

        `unload` stops every engine, and none starts before `come_back`; `cpu` lets them start again on the CPU.
        """

    async def come_back(self) -> None:
        """Engines may be started on their device again; those that serve on the CPU are stopped when they are idle."""

    async def answer(self, name: str, asked: GenerationRequest) -> str:
        """The whole answer of one exact version (support@v8) of the embedded engine; raises EngineError.

        For mirrored traffic: takes a place only where nobody waits, else it raises at once.
        """


class HandOver(Protocol):
    """Who decides whether the device is ours now."""

    @property
    def state(self) -> ServerState: ...

    async def admit(self) -> None:
        """Before an embedded engine is asked: return, wait until the device is back, or raise EngineError (503)."""

    async def run(self) -> None:
        """Follow the store until cancelled."""


class Shadow(Protocol):
    """Mirrors live requests to candidates; nobody ever sees those answers."""

    def answered(self, exchange: Exchange) -> None:
        """After the last byte of an answer was sent. Returns at once and never raises."""

    async def run(self) -> None:
        """Ask the candidates until cancelled."""


class Upstream(Protocol):
    """A server that somebody else runs (vLLM, llama.cpp, Ollama), asked for one profile."""

    def ask(self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None) -> AsyncIterator[dict[str, Any]]:
        """`body` sent to `path` (/v1/chat/completions or /v1/completions) with the name this server has for `adapter`.

        Yields the parsed chunks of a stream (`body["stream"]`), without `[DONE]`; else the whole answer, once. An
        adapter it has lost is loaded again, and asked once more. Raises EngineError with the status and message to
        show; closing the iterator cancels.
        """

    async def close(self) -> None:
        """Let its connections go."""
