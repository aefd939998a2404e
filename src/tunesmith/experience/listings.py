"""What waits for a reviewer, and whether anything waits to be erased, as plain SQL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tunesmith.store.reader import Reader, instant_of, json_of

# spelt out, because a partial index serves only a query that repeats its condition
_SUSPECT = "FROM assessments a WHERE a.profile = :profile AND a.class_name = 'quarantined' AND a.review IS NULL"
_IN_REVIEW = "FROM experiences x WHERE x.profile = :profile AND x.in_review"


@dataclass(frozen=True)
class Waiting:
    """Experiences of one profile that wait for a reviewer."""

    num: int
    """Counted up to a limit."""
    newest: tuple[str, ...]
    since: datetime
    """When the newest was stored."""
    suspicions: tuple[tuple[str, ...], ...] = ()
    """Of each of the newest."""


def profiles_known(reader: Reader) -> list[str]:
    """Every profile that may have experiences."""
    return [row["name"] for row in reader.rows("SELECT name FROM profiles ORDER BY name")]


def suspects(reader: Reader, profile: str, *, at_most: int, looked_at: int) -> Waiting | None:
    """Suspects that nobody has decided about; None: there are none."""
    num = _num(reader, f"SELECT a.seq {_SUSPECT}", profile, at_most)
    if not num:
        return None
    text = f"SELECT a.experience_id AS id, a.suspicions {_SUSPECT} ORDER BY a.seq DESC LIMIT :limit"
    rows = reader.rows(text, profile=profile, limit=looked_at)
    suspicions = tuple(tuple(json_of(row["suspicions"])) for row in rows)
    return Waiting(num, tuple(row["id"] for row in rows), _created_at(reader, rows[0]["id"]), suspicions)


def after_rejected_runs(reader: Reader, profile: str, *, at_most: int, named: int) -> Waiting | None:
    """Experiences that were in two rejected runs; None: there are none."""
    num = _num(reader, f"SELECT x.seq {_IN_REVIEW}", profile, at_most)
    if not num:
        return None
    text = f"SELECT x.id {_IN_REVIEW} ORDER BY x.seq DESC LIMIT :limit"
    rows = reader.rows(text, profile=profile, limit=named)
    return Waiting(num, tuple(row["id"] for row in rows), _created_at(reader, rows[0]["id"]))


def has_erasures(reader: Reader) -> bool:
    """Whether a dataset still holds the text of something forgotten."""
    return bool(reader.rows("SELECT seq FROM erasures WHERE done_at IS NULL LIMIT 1"))


def _num(reader: Reader, text: str, profile: str, at_most: int) -> int:
    counted = f"SELECT count(*) AS num FROM ({text} LIMIT :limit) AS found"  # noqa: S608 - our own text
    return int(reader.rows(counted, profile=profile, limit=at_most)[0]["num"])


def _created_at(reader: Reader, experience_id: Any) -> datetime:
    (row,) = reader.rows("SELECT created_at FROM experiences WHERE id = :id", id=experience_id)
    return instant_of(row["created_at"])
