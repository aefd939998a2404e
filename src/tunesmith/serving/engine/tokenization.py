"""Tokenization with the base model's tokenizer and chat template, and its stop tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import TunesmithError
from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import stop_ids
from tunesmith.models.loading import load_tokenizer
from tunesmith.serving.engine.sequence_state import EngineRefusal
from tunesmith.serving.generation import GenerationRequest

_CHARS_PER_TOKEN = 4
"""Estimate; if a prefix has fewer tokens, a longer prefix is tokenized."""
_MAX_PREFIX_RATIO = 2
"""If a prefix already has this many times the context length in tokens, reject the prompt without the rest."""


class PromptTokenizer:
    """Prompts are tokenized in one thread while answers are decoded in another, so each has its own tokenizer."""

    def __init__(self, folder: Path, model: Any, context: int) -> None:
        self._encoder, self._decoder = ChatFormat(load_tokenizer(folder)), ChatFormat(load_tokenizer(folder))
        self.context = context
        self.stop_ids = frozenset(stop_ids(model, self._encoder))
        self.pad_id = self._encoder.pad_id
        self._num_tokens = int(model.get_input_embeddings().weight.shape[0])

    def prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        """The tokens of a prompt; raises EngineRefusal if it is invalid or contains forged special tokens."""
        try:
            if request.messages is not None:
                text = self._encoder.prompt_text(request.messages)
                self._refuse_oversized(text)
                return self._encoder.ids_of(text)
            if isinstance(request.prompt, str):
                self._refuse_oversized(request.prompt)
                return self._encoder.raw_prompt(request.prompt) if request.prompt else ()
        except TunesmithError as error:
            raise EngineRefusal(str(error), "invalid_prompt", 400) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise EngineRefusal(
                f"the chat template cannot format the messages ({reason})", "invalid_prompt", 400
            ) from None
        ids = tuple(request.prompt or ())
        if len(ids) > self.context:
            raise EngineRefusal(f"the prompt has {len(ids)} tokens{self._limit()}", "context_length_exceeded", 400)
        if any(type(token) is not int or not 0 <= token < self._num_tokens for token in ids):
            raise EngineRefusal(f"a token of the prompt is not in 0 … {self._num_tokens - 1}", "invalid_prompt", 400)
        return ids

    def _refuse_oversized(self, text: str) -> None:
        """Tokenizing megabytes takes seconds in which no other prompt is tokenized: decide from a prefix."""
        num_chars = self.context * _CHARS_PER_TOKEN
        while num_chars < len(text):
            num_tokens = len(self._encoder.raw_prompt(text[:num_chars]))
            if num_tokens >= self.context * _MAX_PREFIX_RATIO:
                message = f"the prompt has far more than {num_tokens} tokens{self._limit()}"
                raise EngineRefusal(message, "context_length_exceeded", 400)
            num_chars *= _CHARS_PER_TOKEN

    def _limit(self) -> str:
        return f", and the context length is {self.context} with the answer; shorten it"

    def prompt_text(self, messages: Sequence[Any]) -> str:
        return self._encoder.prompt_text(messages)

    def text_of(self, ids: Sequence[int]) -> str:
        return self._decoder.text_of(ids)

    def token_text(self, token: int) -> str:
        return self._decoder.token_text(token)
