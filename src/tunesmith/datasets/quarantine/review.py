"""Quarantined rows of a dataset: listed with safe excerpts, and released or dismissed by a person."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import Conflict, DataError, NotFound, UsageError, quoted
from tunesmith.core.files import fsync_folder
from tunesmith.core.ids import new_token
from tunesmith.datasets.example import Example, Message, codes_of, decode_message, num_prompt_of, to_json
from tunesmith.datasets.listings import QUARANTINE_DECIDED
from tunesmith.datasets.quarantine.undecided import FILE_NAME
from tunesmith.datasets.screens.excerpts import escaped, safe_text
from tunesmith.store import events
from tunesmith.store.database import Tx

_Numbered = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class QuarantinedRow:
    """One quarantined row. Every text in it is safe to show."""

    number: int
    """Its line in quarantine.jsonl, from 1."""
    source: str
    line: int
    screens: tuple[str, ...]
    why: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Released:
    """What was written for another preparation."""

    path: Path
    num_rows: int
    screens: tuple[str, ...]
    """The screens to prepare it with: those of the dataset but for the ones that stopped these rows."""
    places: tuple[str, ...] = ()
    """Where the rows came from, which they keep when others are forgotten and the numbers move up."""


def places(folder: Path) -> Iterator[str]:
    """Where each quarantined row came from."""
    return (place for place, _ in _placed(_read(folder)))


def rows(folder: Path, limit: int) -> list[QuarantinedRow]:
    """Return the first quarantined rows, with the reasons."""
    found = []
    for number, row in _read(folder):
        if number > limit:
            break
        messages = [decode_message(message) for message in row["messages"]]
        asked = [message["content"] for message in messages if message["role"] == "user"]
        findings = row["findings"]
        found.append(
            QuarantinedRow(
                number=number,
                source=escaped(str(row["source"])),
                line=row["line"],
                screens=tuple(dict.fromkeys(str(each["screen"]) for each in findings)),
                why=tuple(dict.fromkeys(_told(each) for each in findings)),
                question=safe_text(asked[-1] if asked else ""),
                answer=safe_text(_answer(row, messages)),
            )
        )
    return found


def release(folder: Path, numbers: Sequence[int], target: Path, screens: Sequence[str]) -> Released:
    """Write these rows, all of them or none, as a file that can be prepared; nothing is taken from the dataset."""
    from tunesmith.datasets.export import openai_row

    if target.exists():
        raise Conflict(f"{quoted(str(target), 200)} is there already; choose another name")
    wanted, written, stopped_by, places = set(numbers), [], set(), []
    for place, (number, row) in _placed(_read(folder)):
        if number in wanted:
            wanted.discard(number)
            written.append(to_json(openai_row(_example(row))) + "\n")
            stopped_by |= {str(each["screen"]) for each in row["findings"]}
            places.append(place)
    if wanted:
        raise NotFound(f"no quarantined row {min(wanted)}; `dataset quarantine` lists them with their numbers")
    try:
        _write_privately(target, "".join(written))
    except OSError as error:
        raise DataError(f"cannot write {quoted(str(target), 200)}: {error.strerror}; choose another place") from None
    left = tuple(name for name in screens if name not in stopped_by)
    return Released(target, len(written), left, tuple(places))


def _write_privately(target: Path, text: str) -> None:
    """Whole or not at all, and for its owner only from the first byte: it may hold secrets in full."""
    draft = target.with_name(f".{target.name[:100]}.{new_token()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as sink:
            sink.write(text)
            sink.flush()
            os.fsync(sink.fileno())
        draft.replace(target)
        fsync_folder(target.parent)
    finally:
        draft.unlink(missing_ok=True)


def decide(
    tx: Tx, dataset_id: str, *, actor: str, reason: str, released: tuple[Sequence[int], Released] | None
) -> None:
    """Record a person's decision: these rows were released, or (`released` None) all remaining rows are dismissed."""
    detail = {} if released is None else {"released": list(released[0]), "places": list(released[1].places)}
    events.record(tx, "dataset", dataset_id, QUARANTINE_DECIDED, actor=actor, reason=reason, detail=detail)


def _placed(rows: Iterable[_Numbered]) -> Iterator[tuple[str, _Numbered]]:
    """Each row with its file, its line and how many rows of this line came before: a conversation can be several."""
    seen: Counter[str] = Counter()
    for number, row in rows:
        line = f"{escaped(str(row['source']))}:{row['line']}"
        yield f"{line}:{seen[line]}", (number, row)
        seen[line] += 1


def _read(folder: Path) -> Iterator[_Numbered]:
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError("no row of this dataset is quarantined")
    with path.open(encoding="utf-8") as source:
        for number, line in enumerate(source, start=1):
            yield number, json.loads(line)


def _told(finding: dict[str, Any]) -> str:
    excerpt = f" ({finding['excerpt']})" if finding.get("excerpt") else ""
    return safe_text(f"{finding['screen']}: {finding['reason']}{excerpt}", 320)


def _answer(row: dict[str, Any], messages: Sequence[Message]) -> str:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    return str(last["content"] if last is not None else (row["rejected"] or [{"content": ""}])[-1]["content"])


def _example(row: dict[str, Any]) -> Example:
    stored, rejected = row["messages"], row["rejected"]
    codes = codes_of(stored)
    shape = codes if rejected is None else f"{codes}|{codes_of(rejected)}"
    messages, place = tuple(map(decode_message, stored)), num_prompt_of(shape)
    worse = None if rejected is None else tuple(map(decode_message, rejected))
    return Example("", messages[:place], messages[place:], worse, "", 0.0, 0, row["line"])
