"""Datasets, and what was decided about their quarantined rows, as plain SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunesmith.store.reader import Reader, instant_of, json_of

QUARANTINE_DECIDED = "quarantine_decided"
"""The event of a person's decision about quarantined rows."""


@dataclass(frozen=True)
class Dataset:
    id: str
    profile: str
    path: str
    fingerprint: str
    kind: str
    counts: dict[str, int]
    created_at: datetime
    reserved_until: datetime | None


def newest(reader: Reader, *, limit: int, profile: str | None = None) -> list[Dataset]:
    """The newest first."""
    chosen = "" if profile is None else "WHERE profile = :profile"
    text = f"""SELECT id, profile, path, fingerprint, kind, counts, created_at, reserved_until
        FROM datasets {chosen} ORDER BY seq DESC LIMIT :limit"""  # noqa: S608 - our own text
    rows = reader.rows(text, limit=limit, **({} if profile is None else {"profile": profile}))
    return [
        Dataset(
            row["id"], row["profile"], row["path"], row["fingerprint"], row["kind"], json_of(row["counts"]),
            instant_of(row["created_at"]),
            None if row["reserved_until"] is None else instant_of(row["reserved_until"]),
        )
        for row in rows
    ]  # fmt: skip


def decisions(reader: Reader, dataset_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """By dataset, the details of the decisions about its quarantined rows, the oldest first."""
    found: dict[str, list[dict[str, Any]]] = {dataset_id: [] for dataset_id in dataset_ids}
    if not found:
        return found
    names = [f":d{number}" for number in range(len(found))]
    text = f"""SELECT entity_id, detail FROM events
        WHERE entity = 'dataset' AND entity_id IN ({", ".join(names)}) AND action = '{QUARANTINE_DECIDED}'
        ORDER BY seq"""  # noqa: S608 - our own text
    for row in reader.rows(text, **{f"d{number}": each for number, each in enumerate(found)}):
        found[row["entity_id"]].append(json_of(row["detail"]))
    return found
