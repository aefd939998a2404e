"""The contract of an engine: one base model that answers, with adapters beside it. The gateway knows nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from tunesmith.core.errors import TunesmithError
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.programs.readings import ProbeResult
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta


class EngineError(TunesmithError):
    """An engine could not answer. Nothing of the answer counts."""

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
        """`public`: what strangers are told instead, where the message speaks of this machine."""
        super().__init__(message)
        self.code = code
        self.http_status = http_status
        self.retry_after_s = retry_after_s
        self.public = public


class Engine(Protocol):
    """Started when it is first asked, never before."""

    async def start(self) -> None:
        """Be ready to answer; returns at once where it is. Raises EngineError."""

    async def stop(self, grace_s: float = 0.0) -> None:
        """End for good, and give all memory back; answers under way get `grace_s` to be written to their end."""

    def generate(self, asked: GenerationRequest) -> AsyncGenerator[TextDelta | GenerationEnd, None]:
        """The answer in pieces, `GenerationEnd` last; closing the iterator cancels it. Raises EngineError."""

    async def load(self, adapter: ServedAdapter) -> int:
        """Put an adapter beside the others, ready to be asked for; returns the bytes it takes. Twice is once."""

    async def unload(self, name: str) -> None:
        """Let an adapter go that nobody asks any more. An unknown name is no error."""

    async def read(
        self, adapter: str | None, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult]:
        """What it makes of prompts, for the parity probe: greedy answers with their tokens."""
