"""One sequence being generated: its request, the tokens so far, and who listens. A request may have several."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunesmith.serving.engine.detokenizer import IncrementalDetokenizer
from tunesmith.serving.engine.sampling import SampledToken, SamplingParams
from tunesmith.serving.generation import FinishReason, GenerationRequest, TokenLogprob


class EngineRefusal(Exception):
    """One request failed; the others continue."""

    def __init__(self, message: str, code: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.status, self.retry_after_s = message, code, status, retry_after_s

    def as_json(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "code": self.code,
            "status": self.status,
            "retry_after_s": self.retry_after_s,
        }


class Listener(Protocol):
    """Receives the text of a sequence."""

    def delta(self, sequence: SequenceState, text: str, tokens: tuple[TokenLogprob, ...]) -> None: ...

    def ended(self, sequence: SequenceState, finish: FinishReason) -> None: ...

    def failed(self, sequence: SequenceState, refusal: EngineRefusal) -> None: ...


class TokenDecoder(Protocol):
    """Decodes tokens to text."""

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of the tokens, without special tokens."""

    def token_text(self, token: int) -> str:
        """One token as text, special tokens included."""


@dataclass(eq=False)
class SequenceState:
    """A sequence that waits, is prefilled, or is decoded."""

    id: str
    adapter: str | None
    prompt: tuple[int, ...]
    max_new: int
    stop_ids: frozenset[int]
    sampling: SamplingParams
    tokenizer: TokenDecoder
    detokenizer: IncrementalDetokenizer
    listener: Listener
    arrived_s: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    _pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def of(
        cls, request: GenerationRequest, prompt: Sequence[int], context: int, tokenizer: Any, listener: Listener
    ) -> SequenceState:
        """Raises EngineRefusal if the prompt is empty or leaves no space for an answer."""
        if not prompt:
            raise EngineRefusal("the prompt is empty", "empty_prompt", 400)
        num_left = context - len(prompt)
        if num_left < 1:
            raise EngineRefusal(
                f"the prompt has {len(prompt)} tokens, and the context length is {context} with the answer; shorten it",
                "context_length_exceeded",
                400,
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise EngineRefusal("max_tokens must be at least 1", "invalid_value", 400)
        return cls(
            id=request.id,
            adapter=request.adapter,
            prompt=tuple(prompt),
            max_new=num_left if request.max_tokens is None else min(num_left, request.max_tokens),
            stop_ids=tokenizer.stop_ids,
            sampling=SamplingParams.of(request),
            tokenizer=tokenizer,
            detokenizer=IncrementalDetokenizer(tokenizer.text_of, request.stop),
            listener=listener,
        )

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The prompt and the tokens generated so far."""
        return (*self.prompt, *self.ids) if self.ids else self.prompt

    @property
    def last(self) -> int:
        return self.ids[-1]

    def append_token(self, sampled: SampledToken) -> bool:
        """Add a token and pass its text to the listener; False once the answer is complete."""
        self.ids.append(sampled.token)
        if sampled.log_prob is not None:
            self.log_probs.append(sampled.log_prob)
        if sampled.token in self.stop_ids:
            self._end("stop")
            return False
        if sampled.log_prob is not None:
            self._pending_logprobs.append(self._logprob_of(sampled))
        text = self.detokenizer.add(sampled.token)
        if self.detokenizer.is_stopped:
            self._drop_pending_logprobs(len(text))
            self._emit(text)
            self.listener.ended(self, "stop")
            return False
        if text:
            self._emit(text)
        if len(self.ids) >= self.max_new:
            self._end("length")
            return False
        return True

    def _logprob_of(self, sampled: SampledToken) -> TokenLogprob:
        top = tuple((token, self.tokenizer.token_text(token), value) for token, value in sampled.top)
        return TokenLogprob(sampled.token, self.tokenizer.token_text(sampled.token), sampled.log_prob or 0.0, top)

    def _end(self, finish: FinishReason) -> None:
        text = self.detokenizer.finish()
        if text or self._pending_logprobs:
            self._emit(text)
        self.listener.ended(self, "stop" if self.detokenizer.is_stopped else finish)

    def _drop_pending_logprobs(self, num: int) -> None:
        """Drop the log-probabilities of tokens that begin after `num` characters: they belong to the stop sequence."""
        ends = list(itertools.accumulate((len(token.text) for token in self._pending_logprobs), initial=0))
        self._pending_logprobs = [
            token for token, start in zip(self._pending_logprobs, ends, strict=False) if start < num
        ]

    def _emit(self, text: str) -> None:
        tokens, self._pending_logprobs = tuple(self._pending_logprobs), []
        self.listener.delta(self, text, tokens)
