"""What gateway and engine say to each other: one JSON object per line over a socket that only the two of them hold.

To the engine: ``{"do": "generate" | "cancel" | "load" | "unload" | "read" | "state", "id": …, …}``,
and ``{"do": "ping", "number": …}`` every second.
From it: ``{"ready": {…}}`` once, then for an id any number of ``piece``, and at last ``ended``, ``done`` or ``error``;
``{"alive": {"ping": …, "stages": {NAME: [STILL_S, BUSY_S]}}}`` for a ping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from tunesmith.serving.generation import Ended, Generation, Piece, TokenReading

MAX_LINE = 64 << 20
"""The longest line either side takes."""


def line(message: Mapping[str, Any]) -> bytes:
    return orjson.dumps(message) + b"\n"


def asked_line(asked: Generation) -> bytes:
    """Raises TypeError for text that is no Unicode."""
    seed = None if asked.seed is None else asked.seed % (1 << 64)
    said = {one.name: getattr(asked, one.name) for one in fields(asked)}  # copying a million tokens takes seconds
    return line({"do": "generate", **said, "seed": seed})


def asked_from(message: Mapping[str, Any]) -> Generation:
    said = {key: value for key, value in message.items() if key != "do"}
    said["stop"] = tuple(said.get("stop") or ())
    return Generation(**said)


def piece_of(text: str, tokens: tuple[TokenReading, ...]) -> list[Any]:
    return [text, [[token.id, token.text, token.log_prob, token.top] for token in tokens]]


def piece_from(raw: list[Any]) -> Piece:
    text, tokens = raw
    return Piece(
        text,
        tuple(
            TokenReading(number, said, log_prob, tuple((one, its, value) for one, its, value in top))
            for number, said, log_prob, top in tokens
        ),
    )


def ended_from(raw: Mapping[str, Any]) -> Ended:
    return Ended(**raw)
