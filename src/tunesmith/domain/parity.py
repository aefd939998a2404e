"""Train/serve parity: what the trainer's stack reads and writes for a prompt, and what a target does with the same."""

from __future__ import annotations

from typing import Any

from tunesmith.domain.section import Section


class Reading(Section):
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
    readings: tuple[Reading, ...]
