"""One answer on its way: what was asked, what is written so far, and whom to tell."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tunesmith.serving.engine.detokenizer import Writer
from tunesmith.serving.engine.sampling import Picked, Taste
from tunesmith.serving.generation import Finish, Generation, TokenReading


class EngineRefusal(Exception):
    """One request cannot be answered; the others go on."""

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
    """Who hears of a row's answer."""

    def piece(self, row: Row, text: str, tokens: tuple[TokenReading, ...]) -> None: ...

    def ended(self, row: Row, finish: Finish) -> None: ...

    def failed(self, row: Row, refusal: EngineRefusal) -> None: ...


class Speech(Protocol):
    """How tokens become text."""

    def text_of(self, ids: Sequence[int]) -> str:
        """Without special tokens."""

    def token_text(self, token: int) -> str:
        """One token as it may be shown, special ones too."""


@dataclass(eq=False)
class Row:
    """One row of a batch, or one that waits to become one."""

    id: str
    adapter: str | None
    prompt: tuple[int, ...]
    max_new: int
    stop_ids: frozenset[int]
    taste: Taste
    speech: Speech
    writer: Writer
    listener: Listener
    since_s: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    _untold: list[TokenReading] = field(default_factory=list)

    @classmethod
    def of(cls, asked: Generation, prompt: Sequence[int], context: int, speech: Any, listener: Listener) -> Row:
        """Raises EngineRefusal where the prompt leaves no room for an answer."""
        if not prompt:
            raise EngineRefusal("the prompt is empty; write something to answer to", "empty_prompt", 400)
        room = context - len(prompt)
        if room < 1:
            raise EngineRefusal(
                f"the prompt has {len(prompt)} tokens, and the model takes {context} with the answer; shorten it",
                "context_length_exceeded",
                400,
            )
        if asked.max_tokens is not None and asked.max_tokens < 1:
            raise EngineRefusal("max_tokens must be at least 1", "invalid_value", 400)
        return cls(
            id=asked.id,
            adapter=asked.adapter,
            prompt=tuple(prompt),
            max_new=room if asked.max_tokens is None else min(room, asked.max_tokens),
            stop_ids=speech.stop_ids,
            taste=Taste.of(asked),
            speech=speech,
            writer=Writer(speech.text_of, asked.stop),
            listener=listener,
        )

    @property
    def seen(self) -> tuple[int, ...]:
        """What the model has to read before it writes on."""
        return (*self.prompt, *self.ids) if self.ids else self.prompt

    @property
    def last(self) -> int:
        return self.ids[-1]

    def take(self, picked: Picked) -> bool:
        """Write a token down and tell of it; False once the answer is complete."""
        self.ids.append(picked.token)
        if picked.log_prob is not None:
            self.log_probs.append(picked.log_prob)
        if picked.token in self.stop_ids:
            self._end("stop")
            return False
        if picked.log_prob is not None:
            self._untold.append(self._reading(picked))
        text = self.writer.add(picked.token)
        if self.writer.is_stopped:
            self._drop_untold(len(text))
            self._tell(text)
            self.listener.ended(self, "stop")
            return False
        if text:
            self._tell(text)
        if len(self.ids) >= self.max_new:
            self._end("length")
            return False
        return True

    def _reading(self, picked: Picked) -> TokenReading:
        top = tuple((token, self.speech.token_text(token), value) for token, value in picked.top)
        return TokenReading(picked.token, self.speech.token_text(picked.token), picked.log_prob or 0.0, top)

    def _end(self, finish: Finish) -> None:
        text = self.writer.finish()
        if text or self._untold:
            self._tell(text)
        self.listener.ended(self, "stop" if self.writer.is_stopped else finish)

    def _drop_untold(self, num: int) -> None:
        """Forget the readings of tokens that begin after so many characters: they are of the stop text."""
        ends = list(itertools.accumulate((len(token.text) for token in self._untold), initial=0))
        self._untold = [token for token, start in zip(self._untold, ends, strict=False) if start < num]

    def _tell(self, text: str) -> None:
        tokens, self._untold = tuple(self._untold), []
        self.listener.piece(self, text, tokens)
