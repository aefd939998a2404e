"""Incremental detokenization: complete characters only, and nothing of a stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_WINDOW = 16
_MAX_HELD = 16
"""Maximum tokens held back for an incomplete character."""

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """The text of one answer, token by token."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        self._start = self._last = self._done = 0  # start of decoding; ends of the last two deltas
        self._before = ""  # text of the tokens from start to done
        self._held = ""
        self.is_stopped = False
        """A stop sequence was found; no text follows."""

    def add(self, token: int) -> str:
        """Add a token; returns the text that is complete now."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith(_BROKEN) and len(self._ids) - self._done < _MAX_HELD:
            return ""
        new, self._before = text[len(self._before) :], text
        self._last, self._done = self._done, len(self._ids)
        if self._done - self._start > _WINDOW:  # a token may depend on those just before it, not on all
            self._start = self._last
            self._before = self._decode(self._ids[self._start : self._done])
        return self._emit(new)

    def finish(self) -> str:
        """The text that was held back as a possible beginning of a stop sequence."""
        if self.is_stopped:
            return ""
        text = self._emit(self._decode(self._ids[self._start :])[len(self._before) :])
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _emit(self, text: str) -> str:
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_stopped, self._held = True, ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Number of trailing characters of the text that may begin the stop sequence."""
    return next((num for num in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:num])), 0)
