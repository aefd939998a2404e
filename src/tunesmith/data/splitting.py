"""Which split a prompt belongs to, decided by hash alone: what is held out once is held out in every dataset, for ever.

Nothing here may change: a different answer for an old prompt would train on what an earlier round was judged on.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from tunesmith.domain.dataset import Split

_SALT = "tunesmith split 1 "  # constant, so that every machine and every round agrees
_RANGE = 1 << 64


def normalise(text: str) -> str:
    """NFKC, case folded, white space collapsed: prompts that differ only in looks are one prompt."""
    if text.isascii():  # for ASCII, NFKC changes nothing and folding is lower-casing
        folded = text.lower()
        if folded.isprintable() and "  " not in folded and folded[:1] != " " and folded[-1:] != " ":
            return folded
    else:
        folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split())


def group_of(codes: str, contents: Sequence[str]) -> str:
    """The group key of a prompt: sha256 over its roles and normalised texts.

    The prompt is everything before the *first* trained answer. With everything before the last one, a conversation and
    its own beginning, captured as two examples, could part: one is trained on, answer included, and the other held out.
    Collapsed white space holds no U+001E, so it parts the messages.
    """
    text = "\x1e".join([code + normalise(content) for code, content in zip(codes, contents, strict=False)])
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(group: str, heldout_share: float, validation_share: float) -> Split:
    """The split of a group. Held-out groups come from the low end of the hashes, validation from the high end,
    so that changing one share never moves an example between the other two splits."""
    heldout_below, validation_from = _bounds(heldout_share, validation_share)
    place = int.from_bytes(hashlib.sha256((_SALT + group).encode()).digest()[:8], "big")
    if place < heldout_below:
        return Split.HELDOUT
    return Split.VALIDATION if place >= validation_from else Split.TRAIN


@lru_cache(maxsize=64)
def _bounds(heldout_share: float, validation_share: float) -> tuple[int, int]:
    return int(heldout_share * _RANGE), _RANGE - int(validation_share * _RANGE)
