"""Computes the id, group, split and quality score of a valid row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256 as _sha256

from tunesmith.datasets.columns import ParsedRow
from tunesmith.datasets.example import Split, num_prompt_of
from tunesmith.datasets.formats.lines import Found
from tunesmith.datasets.scoring import quality_score
from tunesmith.datasets.splits import FOLD_ASCII, group_of, group_salt

_TRAIN, _VALIDATION, _HELDOUT = map(list(Split).index, (Split.TRAIN, Split.VALIDATION, Split.HELDOUT))
_FOLD_PARTS = b"\x1e" + FOLD_ASCII[1:] + bytes(128)
"""Folds the texts of a prompt that NUL parts, and parts them as a group does."""
_MAX_SHAPES = 4096


class RowIdentity:
    """Computes the same ids and splits as `example.identity` and `splits`, but faster."""

    def __init__(self, heldout_share: float, validation_share: float, kept: Mapping[bytes, int] | None = None) -> None:
        self._below = _share_boundary(heldout_share)
        self._from = _share_boundary(1.0 - validation_share)
        self._kept = kept or {}
        self._shapes: dict[str, tuple[int, int, int, bytes]] = {}

    def identify(self, row: Found, line: int) -> ParsedRow:
        """Return the row with its id, group, split and quality score."""
        shape, contents, num_group = row
        known = self._shapes.get(shape) if not num_group else None
        question, answer, num_group, salt = known or self._learnt(shape, num_group)
        text = "\0".join((shape, *contents))
        data = text.encode()
        group = _quick_group(contents, num_group, salt, data[len(shape) + 1 :]) if salt else b""
        if not group:
            group = bytes.fromhex(group_of(shape[:num_group], contents))
        split = _HELDOUT if group < self._below else _VALIDATION if group >= self._from else _TRAIN
        if self._kept:
            split = self._kept.get(group, split)
        quality = quality_score(contents[question], contents[answer])
        num_chars = len(text) - len(shape) - len(contents)
        return _sha256(data).digest(), group, split, quality, line, num_chars, shape, contents

    def _learnt(self, shape: str, num_group: int) -> tuple[int, int, int, bytes]:
        """What follows from a shape alone: where question and answer are, messages in its group, the group's salt."""
        num_prompt, end = num_prompt_of(shape), shape.find("|")
        size = num_group or num_prompt
        has_calls = "C" in shape[:size] or "r" in shape[:size]  # their ids do not count: work for `group_of`
        salt = b"" if has_calls else group_salt(shape[:size])
        found = num_prompt - 1, end - 1 if end > num_prompt else -1, size, salt
        if not num_group:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = found
        return found


def _quick_group(contents: list[str], num: int, salt: bytes, data: bytes) -> bytes:
    """The group of a prompt in ASCII whose white space is in order; nothing for any other."""
    size = num - 1
    for content in contents[:num]:
        if not content.isascii() or content[0] <= " " or content[-1] <= " ":
            return b""
        size += len(content)
    folded = data[:size].translate(_FOLD_PARTS)
    return b"" if b"  " in folded else _sha256(salt + folded).digest()


def _share_boundary(share: float) -> bytes:
    """Return the smallest group hash outside the first `share` of all hashes, or one above every hash."""
    place = math.ceil(share * 2.0**64)
    return place.to_bytes(8, "big") if place < 1 << 64 else b"\xff" * 33
