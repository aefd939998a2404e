"""The base's words: prompts as tokens, tokens as text, and where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import TunesmithError
from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import stop_ids
from tunesmith.models.loading import load_tokenizer
from tunesmith.serving.engine.sequence_state import EngineRefusal
from tunesmith.serving.generation import Generation

_CHARS_OF_TOKEN = 4
"""About so many characters make a token; where they do not, more of a text is looked at."""
_FAR_TOO_LONG = 2
"""A beginning with so many times the tokens that fit needs no look at the rest: how it is cut changes a few."""


class Words:
    """Reads prompts in one thread while answers are written down in another: each has a tokenizer of its own."""

    def __init__(self, folder: Path, model: Any, context: int) -> None:
        self._reading, self._writing = ChatFormat(load_tokenizer(folder)), ChatFormat(load_tokenizer(folder))
        self.context = context
        self.stop_ids = frozenset(stop_ids(model, self._reading))
        self.pad_id = self._reading.pad_id
        self._num_tokens = int(model.get_input_embeddings().weight.shape[0])

    def prompt_of(self, asked: Generation) -> tuple[int, ...]:
        """Raises EngineRefusal where the prompt is forged, or nothing a model can read."""
        try:
            if asked.messages is not None:
                text = self._reading.prompt_text(asked.messages)
                self._refuse_endless(text)
                return self._reading.ids_of(text)
            if isinstance(asked.prompt, str):
                self._refuse_endless(asked.prompt)
                return self._reading.raw_prompt(asked.prompt) if asked.prompt else ()
        except TunesmithError as error:
            raise EngineRefusal(str(error), "invalid_prompt", 400) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise EngineRefusal(f"the messages cannot be written down ({reason})", "invalid_prompt", 400) from None
        ids = tuple(asked.prompt or ())
        if len(ids) > self.context:
            raise EngineRefusal(f"the prompt has {len(ids)} tokens{self._most()}", "context_length_exceeded", 400)
        if any(type(token) is not int or not 0 <= token < self._num_tokens for token in ids):
            raise EngineRefusal(f"a token of the prompt is not in 0 … {self._num_tokens - 1}", "invalid_prompt", 400)
        return ids

    def _refuse_endless(self, text: str) -> None:
        """Turning megabytes into tokens takes seconds in which nobody else is heard: a beginning says enough."""
        num_chars = self.context * _CHARS_OF_TOKEN
        while num_chars < len(text):
            num_tokens = len(self._reading.raw_prompt(text[:num_chars]))
            if num_tokens >= self.context * _FAR_TOO_LONG:
                told = f"the prompt has far more than {num_tokens} tokens{self._most()}"
                raise EngineRefusal(told, "context_length_exceeded", 400)
            num_chars *= _CHARS_OF_TOKEN

    def _most(self) -> str:
        return f", and the model takes {self.context} with the answer; shorten it"

    def prompt_text(self, messages: Sequence[Any]) -> str:
        return self._reading.prompt_text(messages)

    def text_of(self, ids: Sequence[int]) -> str:
        return self._writing.text_of(ids)

    def token_text(self, token: int) -> str:
        return self._writing.token_text(token)
