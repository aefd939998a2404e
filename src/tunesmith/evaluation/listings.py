"""Held runs as the inbox shows them, as plain SQL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from tunesmith.evaluation.rules.evidence import find_unusable
from tunesmith.models.listings import ADAPTERS_OF_RUNS
from tunesmith.models.rules import AdapterState, version_name
from tunesmith.store.reader import Reader, instant_of, json_of

_HELD = f"""
SELECT r.id, r.profile, r.moved_at, r.reason, {{gate}} AS gate, {{metrics}} AS metrics, {{deploys}} AS deploys,
    COALESCE(made.profile, again.profile) AS adapter_profile, COALESCE(made.version, again.version) AS adapter_version,
    COALESCE(made.state, again.state) AS adapter_state,
    (SELECT e.judged FROM evaluations e WHERE e.run_id = r.id ORDER BY e.seq DESC LIMIT 1) AS judged
FROM runs r{ADAPTERS_OF_RUNS}
WHERE r.state = 'held' {{chosen}} ORDER BY r.seq DESC LIMIT :limit"""  # noqa: S608 - our own text


@dataclass(frozen=True)
class HeldRun:
    """A run that waits for a person's decision, and what the decision depends on."""

    id: str
    profile: str
    since: datetime
    reason: str
    adapter: str | None
    """The version that it made, or deploys again."""
    adapter_state: AdapterState | None
    deploys_again: bool
    lacks_evidence: bool
    """There are no numbers to decide by."""


def held(reader: Reader, *, limit: int, run_id: str | None = None) -> list[HeldRun]:
    """The newest first; or one of them."""
    text = _HELD.format(
        gate=reader.json_text("r.spec", "gate"),
        metrics=reader.json_text("r.spec", "evaluation", "metrics"),
        deploys=reader.json_text("r.spec", "deploys", "id"),
        chosen="" if run_id is None else "AND r.id = :run_id",
    )
    rows = reader.rows(text, limit=limit, **({} if run_id is None else {"run_id": run_id}))
    return [_held(row) for row in rows]


def _held(row: Any) -> HeldRun:
    version = row["adapter_version"]
    return HeldRun(
        id=row["id"],
        profile=row["profile"],
        since=instant_of(row["moved_at"]),
        reason=row["reason"],
        adapter=None if version is None else version_name(row["adapter_profile"], version),
        adapter_state=None if version is None else AdapterState(row["adapter_state"]),
        deploys_again=row["deploys"] is not None,
        lacks_evidence=row["judged"] is not None
        and _lacks_evidence(json_of(row["judged"]), json_of(row["gate"]), json_of(row["metrics"])),
    )


def _lacks_evidence(judged: dict[str, Any], gate: dict[str, Any], metrics: list[str]) -> bool:
    """As `gate.missing_evidence` finds it."""
    report = judged["report"]
    if judged["verdict"]["decision"] != "hold":
        return False
    measured = SimpleNamespace(
        num_cases=report["num_cases"],
        confidence=report["confidence"],
        comparisons=[_comparison(each) for each in report["comparisons"]],
        established=None if report.get("established") is None else _comparison(report["established"]),
    )
    needed = (*metrics, gate["primary"], *gate["floors"])
    unusable = find_unusable(
        measured,
        needed,
        decisive=(gate["primary"], *gate["floors"]),
        confidence=gate["confidence"],
        min_cases=0,
        min_cases_of={},
    )
    return unusable is not None


_DEFAULTS = {"problem": None, "at_fault": None, "num_left_out": 0, "shown_only": False}
"""What reports from before a field was stored mean."""


def _comparison(stored: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**_DEFAULTS, **stored})
