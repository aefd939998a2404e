"""Erasure: how a forgotten experience is recognised again without keeping anything of what was said."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORGOTTEN = "it was forgotten"
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_SPOKEN = ("system", "user", "assistant")
_HELD_BACK = ("tool_calls", "tool_call_id", "name")


def tombstone_key(natural_key: str) -> str:
    """What is kept of a natural key: a hash stays as it is, anything else could hold text and is hashed."""
    if _HASH.match(natural_key):
        return natural_key
    return f"sha256:{hashlib.sha256(natural_key.encode()).hexdigest()}"


def talk_hash(messages: Iterable[Mapping[str, Any]]) -> str:
    """The hash of what was said in a conversation, however it is stored: calls and their results left out."""
    said = [
        str(message.get("content") or "")
        for message in messages
        if message["role"] in _SPOKEN and not any(name in message for name in _HELD_BACK)
    ]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


def hashes_of(messages: Sequence[Mapping[str, Any]], other_answers: Iterable[str]) -> list[str]:
    """By what a row made from an experience is known: its conversation, with its own answer or with another one."""
    prompt = messages[:-1]
    talks = [messages, *([*prompt, {"role": "assistant", "content": answer}] for answer in other_answers)]
    return list(dict.fromkeys(map(talk_hash, talks)))
