"""Which split a prompt belongs to, decided by hash alone: what is held out once is held out in every dataset, for ever.

Nothing here may change: a different answer for an old prompt would train on what an earlier round was judged on.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from tunesmith.datasets.example import Split, to_json

_SALT = b"tunesmith split 1"  # constant, so that every machine and every round agrees
_TRAIN, _VALIDATION, _HELDOUT = Split.TRAIN, Split.VALIDATION, Split.HELDOUT  # a member is slow to look up
_RANGE = 2.0**64  # a group's first eight bytes decide
_FOLD_ASCII = bytes(ord(" ") if chr(byte).isspace() else ord(chr(byte).lower()) for byte in range(128))
_FOLD = _FOLD_ASCII + bytes(128)
_FOLD_PARTS = b"\x1e" + _FOLD_ASCII[1:] + bytes(128)
"""Folds the texts of a prompt that NUL parts, and parts them as a group does."""


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
    return sha256(_salt(codes) + parts).hexdigest()


def _salt(codes: str) -> bytes:
    """What is hashed before the texts of a prompt with these roles."""
    return b"\x1e".join((_SALT, codes.encode(), b""))


def quick_salt(codes: str) -> bytes:
    """For `quick_group`: what is hashed before the texts; nothing if it cannot group a prompt with these roles."""
    return b"" if "C" in codes or "r" in codes else _salt(codes)  # ids of calls do not count: work for `group_of`


def quick_group(contents: Sequence[str], num: int, salt: bytes, data: bytes) -> bytes:
    """The same group as `group_of`, raw and faster, of a prompt in ASCII whose white space is in order; else nothing.

    The prompt is the first `num` contents; `data` begins with them, parted by NUL.
    """
    size = num - 1
    for content in contents[:num]:
        if not content.isascii() or content[0] <= " " or content[-1] <= " ":
            return b""
        size += len(content)
    folded = data[:size].translate(_FOLD_PARTS)
    return b"" if b"  " in folded else sha256(salt + folded).digest()


def _without_ids(stored: str) -> str:
    """A stored call, or its result, without the id that ties the two together."""
    fields = json.loads(stored)
    fields.pop("tool_call_id", None)
    for call in fields.get("tool_calls", ()):
        call.pop("id", None)
    return to_json(fields)


class SplitRule:
    """The split of each group, by the two shares; a group in `kept` stays where it was before shares were changed.

    Held-out groups come from the low end of the hashes, validation from the high end, so that changing one share never
    moves an example between the other two splits.
    """

    def __init__(self, heldout_share: float, validation_share: float, kept: Mapping[str, Split] | None = None) -> None:
        self._heldout_end = _boundary(heldout_share)
        self._validation_start = _boundary(1.0 - validation_share)
        self._kept = {bytes.fromhex(group): split for group, split in (kept or {}).items()}

    def split_of(self, group: bytes) -> Split:
        if self._kept and group in self._kept:
            return self._kept[group]
        if group < self._heldout_end:
            return _HELDOUT
        return _VALIDATION if group >= self._validation_start else _TRAIN


def _boundary(share: float) -> bytes:
    """The smallest group outside the first `share` of all hashes, or one above every hash."""
    place = math.ceil(share * _RANGE)
    return place.to_bytes(8, "big") if place < 1 << 64 else b"\xff" * 33


def held_out_from(groups: Collection[str]) -> float:
    """The share above which prompts of these groups, all together, are held out."""
    return max(int(group[:16], 16) for group in groups) / _RANGE


def write_kept(path: Path, kept: Mapping[str, Split]) -> None:
    """Groups that keep their split, as a file for every parser."""
    path.write_text(json.dumps(kept), encoding="utf-8")


def read_kept(path: str) -> dict[str, Split]:
    """What `write_kept` wrote."""
    return {group: Split(name) for group, name in json.loads(Path(path).read_text(encoding="utf-8")).items()}


def groups_in(folder: Path) -> Iterator[tuple[str, Split]]:
    """Every group of a published dataset, with the split it is in."""
    import pyarrow.parquet as pq

    for split in Split:
        with pq.ParquetFile(folder / f"{split.value}.parquet") as source:
            for batch in source.iter_batches(65_536, columns=["group"]):
                for group in batch.column(0).unique().to_pylist():
                    yield group, split
