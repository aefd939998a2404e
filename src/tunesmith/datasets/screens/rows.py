"""Screens one row: one cheap pass says which screens could find something, and only these look closely.

The pass is a handful of byte translations and substring searches, because nearly every row is innocent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tunesmith.datasets.screens.blobs import blobs
from tunesmith.datasets.screens.characters import CONTROLS, could_hide, hidden_characters, may_hide, undisguised
from tunesmith.datasets.screens.control_tokens import control_tokens
from tunesmith.datasets.screens.detectors import Detector, detector
from tunesmith.datasets.screens.finding import Hit, ScreenFinding
from tunesmith.datasets.screens.injection import WORDS as ORDER_WORDS
from tunesmith.datasets.screens.injection import injection, may_inject
from tunesmith.datasets.screens.links import links
from tunesmith.datasets.screens.pii import emails, network_addresses, numbers
from tunesmith.datasets.screens.secrets import ASSIGNED_MARKS, secrets
from tunesmith.profiles.sections.screens import Screen

_SECRET, _EMAIL, _NUMBER, _ADDRESS, _MARKUP, _HIDDEN, _ORDER, _BLOB, _LINK, _DIGIT = (1 << place for place in range(10))
_ALWAYS = 1 << 10  # for a detector: nobody knows what it looks for
_EVERYTHING = (1 << 11) - 1
_MAX_PER_SCREEN = 5  # findings of one screen in one row; a person needs no more to judge it
_PARTS = "\r"  # between the texts of a row: in no class below, so nothing runs across two texts

_TOKEN_CHARS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/_=.-"
_RUNS = bytes(ord("x" if byte in _TOKEN_CHARS else "!" if byte in CONTROLS else " ") for byte in range(256))
_DIGITS = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))
_NUMBERS = bytes(ord("0") if chr(byte) in "0123456789, []" else ord(" ") for byte in range(256))
_NUMBER_LIST = b"0" * 160
_HEX = bytes(ord("h") if chr(byte) in "0123456789abcdefABCDEF" else ord(" ") for byte in range(256))
_WORDS = bytes(ord(chr(byte).lower()) if chr(byte).isalpha() else ord(" ") for byte in range(128)) + bytes(
    range(128, 256)
)
_ASCII = bytes(range(128))
_TURN = re.compile(rb"\n[ \t]{0,4}(?:[aA]ssistant|AI|[mM]odel|GPT|#{2,3} ?(?:[rR]esponse|[aA]ssistant|[oO]utput)) ?:")
_LONG_RUN, _BLOB_RUN, _DIGIT_RUN, _HEX_RUN = b"x" * 16, b"x" * 56, b"0" * 7, b"h" * 60


@dataclass(frozen=True, slots=True)
class RowScreen:
    """One screen of single rows."""

    name: str
    about: str
    gate: int
    """What the first pass must have seen for this screen to look."""
    find: Callable[[str], Iterator[Hit]]
    undisguised: bool = True
    """Looks at the text as it reads; otherwise as it is written, because the disguise itself is what it looks for."""


ROW_SCREENS: dict[str, RowScreen] = {
    screen.name: screen
    for screen in (
        RowScreen("secret", "keys, tokens, passwords and private keys", _SECRET, secrets),
        RowScreen("email", "e-mail addresses of persons", _EMAIL, emails),
        RowScreen("personal_number", "phone, card and bank numbers, national ids", _NUMBER, numbers),
        RowScreen("ip_address", "public IP addresses", _ADDRESS, network_addresses),
        RowScreen("control_token", "control tokens of any chat template", _MARKUP, control_tokens),
        RowScreen("hidden_text", "invisible, reordering and look-alike characters", _HIDDEN, hidden_characters, False),
        RowScreen("injection", "orders to the model inside a text", _ORDER, injection),
        RowScreen("blob", "long runs of encoded bytes", _BLOB, blobs),
        RowScreen("link", "links that carry data away or hide where they lead", _LINK, links, False),
    )
}


class RowScreens:
    """Some of the screens, ready to look at rows."""

    def __init__(self, names: Sequence[str], detectors: Sequence[str] = ()) -> None:
        self._screens = [ROW_SCREENS[name] for name in names]
        self._screens += [
            RowScreen(Screen.DETECTOR.value, name, _ALWAYS, partial(_detected, detector(name))) for name in detectors
        ]
        self._always = _ALWAYS if detectors else 0
        self._gates = _HIDDEN  # a disguise concerns every screen
        for screen in self._screens:
            self._gates |= screen.gate

    def look(self, texts: Sequence[str]) -> list[ScreenFinding]:
        """What the screens find in the texts of one row, in the order of the screens."""
        if not self._screens:
            return []
        gates = _possible(_PARTS.join(texts), self._gates) | self._always
        return self._closely(texts, gates) if gates else []

    def _closely(self, texts: Sequence[str], gates: int) -> list[ScreenFinding]:
        findings: list[ScreenFinding] = []
        plain = [undisguised(text) if gates & _HIDDEN and may_hide(text) else (text, None) for text in texts]
        if any(places is not None for _, places in plain):
            gates = _EVERYTHING  # what the first pass saw was disguised
        for screen in self._screens:
            if not screen.gate & gates:
                continue
            found: list[ScreenFinding] = []
            for message, (text, (clear, places)) in enumerate(zip(texts, plain, strict=True)):
                for hit in screen.find(clear if screen.undisguised else text):
                    start, end = _original(hit, places if screen.undisguised else None)
                    found.append(ScreenFinding(screen.name, message, start, end, hit.reason, hit.excerpt))
                    if len(found) == _MAX_PER_SCREEN:
                        break
                if len(found) == _MAX_PER_SCREEN:
                    break
            findings += found
        return findings


def _detected(found_by: Detector, text: str) -> Iterator[Hit]:
    return iter(found_by.find(text))


def _original(hit: Hit, places: list[int] | None) -> tuple[int, int]:
    """A hit's span in the text as it was before its disguise was taken off."""
    if places is None or hit.start >= hit.end:
        return hit.start, hit.end
    return places[hit.start], places[hit.end - 1] + 1


def _possible(text: str, wanted: int) -> int:
    """Which of the wanted screens could find something: may say yes for nothing, never no for something."""
    data = text.encode("utf-8", "surrogatepass")
    gates = _by_runs(data)
    if b"@" in data or (b"]" in data and b"at]" in data) or (b")" in data and b"at)" in data):
        gates |= _EMAIL
    if b"](" in data:
        gates |= _LINK
    if b":" in data and b"://" in data:
        gates |= _LINK | (_SECRET if b"@" in data else 0)
    if wanted & _ADDRESS and (data.count(b".") > 2 or data.count(b":") > 2):
        gates |= _ADDRESS
    if b"<" in data or b"[" in data or b"|&gt;" in data or (b"\n" in data and _TURN.search(data)):
        gates |= _MARKUP
    words = data.translate(_WORDS)
    if not ORDER_WORDS.isdisjoint(words.split()):
        gates |= _ORDER
    if gates & _DIGIT and not gates & _SECRET and any(mark in words for mark in ASSIGNED_MARKS):
        gates |= _SECRET
    if not text.isascii():
        beyond = data.translate(None, _ASCII).decode("utf-8", "surrogatepass")
        if not gates & _ORDER and may_inject(text, beyond):
            gates |= _ORDER
        if could_hide(beyond) and may_hide(text):
            gates |= _HIDDEN
    return gates & wanted


def _by_runs(data: bytes) -> int:
    """What runs of one kind of bytes tell: keys, blobs and numbers are long runs, whatever they hold."""
    gates = 0
    runs = data.translate(_RUNS)
    if _LONG_RUN in runs:
        gates |= _SECRET | _NUMBER
        if _BLOB_RUN in runs:
            gates |= _BLOB
    if b"!" in runs:
        gates |= _HIDDEN
    digits = data.translate(_DIGITS, b" -.()/")
    if b"0" in digits:
        gates |= _DIGIT
        if _DIGIT_RUN in digits:
            gates |= _NUMBER
        if _NUMBER_LIST in data.translate(_NUMBERS):
            gates |= _BLOB
        if _HEX_RUN in data.translate(_HEX, b" :\\x"):
            gates |= _BLOB
    if b"K" in data and (b"PRIVATE KEY" in data or b"PuTTY-User" in data):
        gates |= _SECRET
    return gates
