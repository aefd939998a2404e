"""From tokens to text while they are written: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
_WINDOW = 16
_MAX_HELD = 16
"""Tokens that spell no character after so many never will."""

Decode = Callable[[list[int]], str]


class Writer:
    """The text of one answer, token by token."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        self._start = self._last = self._done = 0  # where we decode from; where the last two pieces ended
        self._before = ""  # what the tokens in between say
        self._held = ""
        self.is_stopped = False
        """A stop text was written; nothing follows."""

    def add(self, token: int) -> str:
        """What can be said now."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith(_BROKEN) and len(self._ids) - self._done < _MAX_HELD:
            return ""
        new, self._before = text[len(self._before) :], text
        self._last, self._done = self._done, len(self._ids)
        if self._done - self._start > _WINDOW:  # a token may depend on those just before it, not on all
            self._start = self._last
            self._before = self._decode(self._ids[self._start : self._done])
        return self._say(new)

    def finish(self) -> str:
        """What was held back and is now part of the answer after all."""
        if self.is_stopped:
            return ""
        said = self._say(self._decode(self._ids[self._start :])[len(self._before) :])
        if not self.is_stopped:
            said, self._held = said + self._held, ""
        return said

    def _say(self, text: str) -> str:
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many last characters of the text may be the beginning of the stop text."""
    return next((num for num in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:num])), 0)
