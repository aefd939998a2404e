"""One generated answer; no torch, so that evaluators and simulated models can be imported without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and whether it ended by itself rather than at the limit."""

    text: str
    finished: bool
