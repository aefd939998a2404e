"""What an engine answers to a few fixed prompts: readings, and the references that evaluation writes down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from tunesmith.core.section import Section

MAX_TOKENS = 16
"""Length of the greedy answers that are compared."""
NUM_PROMPTS = 6


class ProbeResult(Section):
    """One prompt as one stack sees it. What a server does not tell is None, and is not compared."""

    messages: tuple[dict[str, Any], ...]
    prompt_text: str | None = None
    """What the chat template wrote."""
    prompt_ids: tuple[int, ...] | None = None
    """Its tokens, a token that begins the sequence included."""
    num_prompt: int | None = None
    answer_ids: tuple[int, ...] | None = None
    """The greedy answer, the token that ends it included where it ended by itself."""
    answer_text: str
    log_probs: tuple[float, ...] | None = None
    """Of each token of the answer."""
    margins: tuple[float, ...] | None = None
    """By how much the log-probability of each token was above that of the second likeliest; references have it."""
    starts: tuple[int, ...] | None = None
    """How many characters of the answer stand in front of each token; references have it."""
    finish: str
    """stop or length."""


class References(Section):
    """What the trainer's stack said about one adapter version; made while it was evaluated."""

    adapter: str
    """Digest of the adapter."""
    base: str
    """Digest of the base."""
    dtype: str
    """In which numbers it was computed, e.g. float32."""
    max_tokens: int
    readings: tuple[ProbeResult, ...]
    tokens: dict[int, str] = Field(default_factory=dict)
    """How the tokens of the readings are written, for people; BOS and EOS are named."""


def choose_prompts(
    conversations: Sequence[Sequence[Mapping[str, Any]]], num: int = NUM_PROMPTS
) -> list[tuple[dict[str, Any], ...]]:
    """Some prompts of varied length, one with a system message or several turns among them if there is one.

    Plain ones where there are any: role and text are what every server takes.
    """
    every = [tuple(dict(message) for message in messages) for messages in conversations]
    plain = [
        tuple({"role": message["role"], "content": message["content"]} for message in messages)
        for messages in every
        if all(_is_plain(message) for message in messages)
    ]
    ordered = sorted(plain or every, key=lambda messages: (sum(len(str(each)) for each in messages), str(messages)))
    if len(ordered) <= num:
        return ordered
    chosen = [ordered[place * (len(ordered) - 1) // (num - 1)] for place in range(num)]
    if not any(len(messages) > 1 for messages in chosen):
        longer = next((messages for messages in ordered if len(messages) > 1), None)
        chosen[num // 2] = longer or chosen[num // 2]
    return chosen


def _is_plain(message: Mapping[str, Any]) -> bool:
    return (
        set(message) <= {"role", "content", "weight"}
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )
