"""The base's words: prompts as tokens, tokens as text, and where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.domain.generation import Generation
from tunesmith.engine.rows import EngineRefusal
from tunesmith.errors import TunesmithError
from tunesmith.modeling.chat import ChatFormat
from tunesmith.modeling.generation import stop_ids
from tunesmith.modeling.loading import load_tokenizer


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
                return self._reading.prompt(asked.messages)
            if isinstance(asked.prompt, str):
                return self._reading.raw_prompt(asked.prompt) if asked.prompt else ()
        except TunesmithError as error:
            raise EngineRefusal(str(error), "invalid_prompt", 400) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise EngineRefusal(f"the messages cannot be written down ({reason})", "invalid_prompt", 400) from None
        ids = tuple(asked.prompt or ())
        if any(type(token) is not int or not 0 <= token < self._num_tokens for token in ids):
            raise EngineRefusal(f"a token of the prompt is not in 0 … {self._num_tokens - 1}", "invalid_prompt", 400)
        return ids

    def prompt_text(self, messages: Sequence[Any]) -> str:
        return self._reading.prompt_text(messages)

    def text_of(self, ids: Sequence[int]) -> str:
        return self._writing.text_of(ids)

    def token_text(self, token: int) -> str:
        return self._writing.token_text(token)
