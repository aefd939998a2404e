"""The protocol between gateway and engine: one JSON object per line over a private socket pair.

To the engine: ``{"op": "generate" | "cancel" | "load" | "unload" | "probe" | "state", "id": …, …}``,
and ``{"op": "ping", "number": …}`` every second.
From it: ``{"ready": {…}}`` once, then for an id any number of ``delta``, and at last ``ended``, ``done`` or ``error``;
``{"heartbeat": {"ping": …, "stages": {NAME: [STILL_S, BUSY_S]}}}`` for a ping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import orjson

from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta, TokenLogprob

MAX_LINE = 64 << 20
"""Maximum length of a line, in bytes."""


def line(message: Mapping[str, Any]) -> bytes:
    return orjson.dumps(message) + b"\n"


def encode_request(request: GenerationRequest) -> bytes:
    """The line of a `generate` message; raises TypeError for text that is not valid Unicode."""
    seed = None if request.seed is None else request.seed % (1 << 64)
    values = {
        field.name: getattr(request, field.name) for field in fields(request)
    }  # copying a million tokens takes seconds
    return line({"op": "generate", **values, "seed": seed})


def decode_request(message: Mapping[str, Any]) -> GenerationRequest:
    values = {key: value for key, value in message.items() if key != "op"}
    values["stop"] = tuple(values.get("stop") or ())
    return GenerationRequest(**values)


def encode_delta(text: str, tokens: tuple[TokenLogprob, ...]) -> list[Any]:
    return [text, [[token.id, token.text, token.log_prob, token.top] for token in tokens]]


def decode_delta(raw: list[Any]) -> TextDelta:
    text, tokens = raw
    return TextDelta(
        text,
        tuple(
            TokenLogprob(
                number, token_text, log_prob, tuple((top_id, top_text, value) for top_id, top_text, value in top)
            )
            for number, token_text, log_prob, top in tokens
        ),
    )


def decode_end(raw: Mapping[str, Any]) -> GenerationEnd:
    return GenerationEnd(**raw)
