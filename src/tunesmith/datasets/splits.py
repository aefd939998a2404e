"""Which split a prompt belongs to, decided by hash alone: what is held out once is held out in every dataset, for ever.

Nothing here may change: a different answer for an old prompt would train on what an earlier round was judged on.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence

from tunesmith.datasets.example import Split, to_json

_SALT = b"tunesmith split 1"  # constant, so that every machine and every round agrees
_RANGE = 2.0**64
FOLD_ASCII = bytes(ord(" ") if chr(byte).isspace() else ord(chr(byte).lower()) for byte in range(128))
_FOLD = FOLD_ASCII + bytes(128)


def normalise(text: str) -> bytes:
    """NFKC, case folded, white space collapsed: prompts that differ only in looks are one prompt."""
    if not text.isascii():
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode()
    folded = text.encode().translate(_FOLD)  # for ASCII, NFKC changes nothing and folding is lower-casing
    if b"  " in folded or folded[:1] == b" " or folded[-1:] == b" ":
        return b" ".join(folded.split())
    return folded


def group_of(codes: str, contents: Sequence[str]) -> str:
    """The group key of a prompt: sha256 over its roles, one letter each, and its normalised texts.

    The prompt is everything before the *first* trained answer. With everything before the last one, a conversation and
    its own beginning, captured as two examples, could part: one is trained on, answer included, and the other held out.
    Collapsed white space holds no U+001E, so it parts the messages. `contents` are as stored; the ids of calls in them
    are chance, so they do not count.
    """
    if "C" in codes or "r" in codes:
        contents = [_without_ids(text) if code in "Cr" else text for code, text in zip(codes, contents, strict=False)]
    parts = b"\x1e".join(map(normalise, contents[: len(codes)]))
    return hashlib.sha256(group_salt(codes) + parts).hexdigest()


def group_salt(codes: str) -> bytes:
    """What is hashed before the texts of a prompt with these roles."""
    return b"\x1e".join((_SALT, codes.encode(), b""))


def _without_ids(stored: str) -> str:
    """A stored call, or its result, without the id that ties the two together."""
    fields = json.loads(stored)
    fields.pop("tool_call_id", None)
    for call in fields.get("tool_calls", ()):
        call.pop("id", None)
    return to_json(fields)


def split_of(group: str, heldout_share: float, validation_share: float) -> Split:
    """The split of a group, which is a sha256 in hex. Held-out groups come from the low end of the hashes, validation
    from the high end, so that changing one share never moves an example between the other two splits."""
    place = int(group[:16], 16)
    if place < heldout_share * _RANGE:
        return Split.HELDOUT
    return Split.VALIDATION if place >= (1.0 - validation_share) * _RANGE else Split.TRAIN
