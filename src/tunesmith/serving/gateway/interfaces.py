"""Interfaces between the parts of the gateway: sources of answers, engine control, hand-over, shadow traffic.

Each implementation is made by `gateway/server.py` and runs beside the HTTP server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.device.rules import ServerState
from tunesmith.serving.generation import GenerationRequest


@dataclass(frozen=True)
class Exchange:
    """One finished request: the version, the request and the answer that was sent."""

    response_id: str
    """The key of its experience."""
    profile: str
    version: str
    """Exact: support@v7, or support@base."""
    digest: str | None
    is_live: bool
    """Whether the request named the profile, not an exact version."""
    request: GenerationRequest
    """As the engine got it; `adapter` is the version that answered."""
    messages: Sequence[Mapping[str, Any]]
    """The conversation, without the answer."""
    answer: str
    finish: str
    """stop, length, cancelled; or the finish reason of an upstream server."""
    seconds: float


class EngineControl(Protocol):
    """Control over all engines of this server, for hand-over and shadow traffic."""

    @property
    def num_active(self) -> int:
        """Answers under way."""

    async def release_device(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        """Drain (at most `drain_s`), then stop every engine; returns when the device is free.

        `unload`: no engine starts before `reclaim_device`. `cpu`: engines may start again on the CPU.
        """

    async def reclaim_device(self) -> None:
        """Let engines start on their device again; those on the CPU are stopped once they are idle."""

    async def answer(self, name: str, request: GenerationRequest) -> str:
        """The complete answer of one exact version (support@v8); raises EngineError.

        For mirrored traffic: raises at once if live requests are queued.
        """


class HandOver(Protocol):
    """Decides whether this server may use the device now."""

    @property
    def state(self) -> ServerState: ...

    async def admit(self) -> None:
        """Call before using an embedded engine: returns, waits for the device, or raises EngineError (503)."""

    async def run(self) -> None:
        """Poll the store until cancelled."""


class Shadow(Protocol):
    """Mirrors live requests to candidates; their answers are never sent to a client."""

    def answered(self, exchange: Exchange) -> None:
        """After the last byte of an answer was sent. Returns at once and never raises."""

    async def run(self) -> None:
        """Run the mirrored requests until cancelled."""


class AnswerSource(Protocol):
    """Where the answer to one request comes from: the embedded engine, or an upstream server."""

    def bodies(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """What the client is sent: the chunks of a stream, or the whole answer once. At least one.

        Adds to the choices of the request what each body says about them.
        """

    async def close(self) -> None:
        """Cancel what is still being written."""


class Upstream(Protocol):
    """The upstream server of a profile (vLLM, llama.cpp, Ollama)."""

    def ask(
        self, path: str, body: Mapping[str, Any], adapter: ServedAdapter | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """`body` sent to `path` (/v1/chat/completions or /v1/completions) with the name this server has for `adapter`.

        Yields the parsed chunks of a stream (`body["stream"]`), without `[DONE]`; else the whole answer, once. An
        adapter it has lost is loaded again, and asked once more. Raises EngineError with the status and message to
        show; closing the iterator cancels.
        """

    async def close(self) -> None:
        """Close its connections."""
