"""Computes the id, group, split and quality score of a valid row."""

from __future__ import annotations

from hashlib import sha256 as _sha256

from tunesmith.datasets.columns import ParsedRow
from tunesmith.datasets.example import Split, num_prompt_of
from tunesmith.datasets.formats.lines import Found
from tunesmith.datasets.scoring import quality_score
from tunesmith.datasets.splits import SplitRule, group_of, quick_group, quick_salt

_PLACES = {split: place for place, split in enumerate(Split)}
_MAX_SHAPES = 4096


class RowIdentity:
    """Computes the same ids as `example.identity`, but faster; caches what follows from a shape alone."""

    def __init__(self, rule: SplitRule) -> None:
        self._split_of = rule.split_of
        self._shapes: dict[str, tuple[int, int, int, bytes]] = {}

    def identify(self, row: Found, line: int) -> ParsedRow:
        """Return the row with its id, group, split and quality score."""
        shape, contents, num_group = row
        known = self._shapes.get(shape) if not num_group else None
        question, answer, num_group, salt = known or self._learnt(shape, num_group)
        text = "\0".join((shape, *contents))
        data = text.encode()
        group = quick_group(contents, num_group, salt, data[len(shape) + 1 :]) if salt else b""
        if not group:
            group = bytes.fromhex(group_of(shape[:num_group], contents))
        split = _PLACES[self._split_of(group)]
        quality = quality_score(contents[question], contents[answer])
        num_chars = len(text) - len(shape) - len(contents)
        return _sha256(data).digest(), group, split, quality, line, num_chars, shape, contents

    def _learnt(self, shape: str, num_group: int) -> tuple[int, int, int, bytes]:
        """What follows from a shape alone: where question and answer are, messages in its group, the group's salt."""
        num_prompt, end = num_prompt_of(shape), shape.find("|")
        size = num_group or num_prompt
        found = num_prompt - 1, end - 1 if end > num_prompt else -1, size, quick_salt(shape[:size])
        if not num_group:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = found
        return found
