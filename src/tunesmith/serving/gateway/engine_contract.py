"""The contract of an engine: one base model with adapters. The gateway depends on nothing else of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from tunesmith.core.errors import TunesmithError
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta


class EngineError(TunesmithError):
    """An engine could not answer; a partial answer is discarded."""

    code = "engine"

    def __init__(
        self,
        message: str,
        *,
        code: str = "engine",
        http_status: int = 500,
        retry_after_s: float | None = None,
        public: str | None = None,
    ) -> None:
        """`public`: the message for clients, if the message itself contains local details."""
        super().__init__(message)
        self.code = code
        self.http_status = http_status
        self.retry_after_s = retry_after_s
        self.public = public


class Engine(Protocol):
    """One engine, started on first use."""

    async def start(self) -> None:
        """Start it unless it runs. Raises EngineError."""

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop for good and free all memory; running requests get `grace_s` to finish."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """The answer as deltas, then a `GenerationEnd`; closing the iterator cancels it. Raises EngineError."""

    async def load(self, adapter: ServedAdapter) -> int:
        """Load an adapter; returns its size in bytes. Idempotent."""

    async def unload(self, name: str) -> None:
        """Unload an adapter that no request uses. An unknown name is not an error."""

    async def probe(
        self, adapter: str | None, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        """Greedy answers with their tokens, for the parity probe."""
