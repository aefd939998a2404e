"""Finds long runs of encoded bytes: nobody can read what they teach, and they can carry anything."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, entropy

_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/_=-])(?:[A-Za-z0-9+/_-]{100,}|(?:[A-Za-z0-9+/_-]{56,76}[ \t]*\r?\n[ \t]*)+[A-Za-z0-9+/_-]{16,})={0,2}"
)
_HEX = re.compile(
    r"(?<![0-9A-Za-z])(?:0x)?(?:[0-9a-fA-F]{100,}|(?:[0-9a-fA-F]{2}[ :]){40,}[0-9a-fA-F]{2}|(?:\\x[0-9a-fA-F]{2}){30,})(?![0-9A-Za-z])"
)
_BASE32 = re.compile(r"(?<![A-Z0-9])[A-Z2-7]{100,}={0,6}(?![A-Z0-9])")
_BYTE_LIST = re.compile(r"\d{1,3}(?:,? \d{1,3}){60,}(?![\d.])")
_GENETIC = re.compile(r"[ACGTUN]+|[ACDEFGHIKLMNPQRSTVWY]+|[acgtun]+")
_HASH_SIZES = frozenset({32, 40, 56, 64, 96, 128})  # hex digits of the usual hashes


def blobs(text: str) -> Iterator[Hit]:
    """Runs of base64, base32 or hex that are longer than any hash or key id."""
    for found in _BYTE_LIST.finditer(text):
        values = [int(value) for value in re.findall(r"\d+", found[0])]
        if max(values) <= 255 and len(set(values)) > 30 and sorted(values) != values:
            yield Hit(*found.span(), "a long list of bytes", f"{len(values)} numbers")
    last = -1
    for form, what in ((_HEX, "hex"), (_BASE32, "base32"), (_BASE64, "base64")):
        for found in form.finditer(text):
            value = "".join(found[0].split())
            if found.start() < last or not _is_blob(value, what):
                continue
            last = found.end()
            yield Hit(*found.span(), f"a long run of encoded bytes ({what})", f"{what}, {len(value)} characters")


def _is_blob(value: str, what: str) -> bool:
    if what == "hex":
        return len(value) not in _HASH_SIZES and len(set(value.lower()) - set("x0\\: ")) > 6
    if _GENETIC.fullmatch(value) or len(set(value)) < 12:
        return False  # DNA and proteins are written like this
    if what == "base32":
        return any(map(str.isdigit, value)) and entropy(value) >= 4.0
    kinds = sum(any(map(is_kind, value)) for is_kind in (str.isupper, str.islower, str.isdigit))
    longest_word = max(map(len, re.split(r"[/_+-]", value)))
    return kinds == 3 and entropy(value) >= 4.5 and longest_word >= 24  # paths and slugs are made of short words
