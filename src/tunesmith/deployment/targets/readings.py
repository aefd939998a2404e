"""An OpenAI-shaped answer as a reading for the parity probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tunesmith.deployment.targets.base import TargetError
from tunesmith.programs.readings import ProbeResult


def chat_reading(
    messages: Sequence[Mapping[str, Any]],
    said: Any,
    url: str,
    *,
    prompt_text: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    answer_ids: Sequence[int] | None = None,
) -> ProbeResult:
    """`said` is a chat completion that was not streamed; raises TargetError where it is not."""
    try:
        choice = said["choices"][0]
        tokens = ((choice.get("logprobs") or {}).get("content")) or None
        if answer_ids is None and tokens is not None and all("id" in token for token in tokens):
            answer_ids = [int(token["id"]) for token in tokens]
        usage = said.get("usage") or {}
        return ProbeResult(
            messages=tuple(dict(message) for message in messages),
            prompt_text=prompt_text,
            prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
            num_prompt=usage.get("prompt_tokens"),
            answer_ids=None if answer_ids is None else tuple(answer_ids),
            answer_text=choice["message"].get("content") or "",
            log_probs=None if tokens is None else tuple(float(token["logprob"]) for token in tokens),
            finish=str(choice["finish_reason"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise TargetError(f"{url}: its answer is no chat completion ({type(error).__name__})") from None
