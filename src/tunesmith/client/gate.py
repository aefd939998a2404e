"""`client.gate`: what another policy would have decided about past runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.client.views import MAX_LISTED
from tunesmith.core.errors import ConfigError, UsageError, quoted
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.profiles.layers import Entries
    from tunesmith.profiles.sections.evaluation import GateSettings
    from tunesmith.runs.queries.runs import Run

_SECTION = "gate"


@dataclass(frozen=True)
class ReplayedRun:
    """One past run under another policy."""

    run_id: str
    version: str | None
    then: str | None
    """The verdict that was given; None where there was none."""
    now: str | None
    """The verdict under the new policy; None where it cannot be known."""
    changed: tuple[str, ...]
    """Checks that pass under one of the two policies only."""
    reasons: tuple[str, ...]
    """The reasons of the new verdict."""
    problem: str | None
    """Why the run cannot be replayed."""

    @property
    def is_other(self) -> bool:
        return self.now is not None and self.now != self.then


@dataclass(frozen=True)
class Replay:
    """Past runs of a profile under another policy. Nothing was changed."""

    profile: str
    policy: dict[str, Any]
    """The gate section that was tried, whole."""
    runs: tuple[ReplayedRun, ...]
    totals: dict[str, int]
    """How many: replayed, other (another verdict), not_replayable, and `then -> now` for each pair that came up."""
    num_older: int
    """Older runs that the limit left out."""


class Gate:
    def __init__(self, session: Session) -> None:
        self._session = session

    def replay(
        self,
        profile: str,
        policy: str | Path | Mapping[str, Any] | None = None,
        *,
        overrides: Sequence[str] = (),
        limit: int = 100,
    ) -> Replay:
        """Judge the stored reports of past runs again, by the profile's gate of now with the changes given.

        `policy` is a YAML file or a mapping with a `gate` section; `overrides` are like `--set gate.min_gain=0.05`.
        """
        from tunesmith.evaluation import queries as evaluations
        from tunesmith.models import listings
        from tunesmith.runs.queries import runs

        if not 1 <= limit <= MAX_LISTED:
            raise UsageError(f"limit must be between 1 and {MAX_LISTED}")
        gate = self._policy(profile, policy, overrides)
        with self._session.database.read() as tx:
            found = [run for run in runs.listing(tx, profile=profile, limit=limit) if not run.spec.dry_run]
            stored = evaluations.stored_judged(tx, [run.id for run in found])
            listed = listings.runs(tx, profile=profile, limit=limit)
            num_older = listings.num_runs(tx, profile=profile) - len(listed)
        versions = {run.id: run.adapter for run in listed}
        replayed = tuple(_replayed(run, versions.get(run.id), stored.get(run.id), gate) for run in found)
        return Replay(profile, gate.model_dump(mode="json"), replayed, _totals(replayed), num_older)

    def _policy(
        self, profile: str, policy: str | Path | Mapping[str, Any] | None, overrides: Sequence[str]
    ) -> GateSettings:
        from tunesmith.profiles.resolve import resolve_now

        for override in overrides:
            if override.partition("=")[0].split(".")[0] != _SECTION:
                raise UsageError(f"--set {quoted(override)}: a replay changes the gate only, e.g. gate.min_gain=0.05")
        session = self._session
        resolved, _ = resolve_now(
            session.database,
            session.workspace,
            profile,
            overrides=overrides,
            environ=session.environ,
            kept=None if policy is None else _entries(policy),
        )
        return resolved.profile.gate


def _entries(policy: str | Path | Mapping[str, Any]) -> Entries:
    """What a policy says, checked key by key; a file's problems name its lines."""
    from tunesmith.profiles.layers import Layer, Problems, document_layer, mapping_layer
    from tunesmith.profiles.yaml_files import parse_yaml, read_text

    problems = Problems()
    if isinstance(policy, Mapping):
        tops = {str(key).split(".")[0] for key in policy}
        entries, shown = mapping_layer(Layer.OVERRIDE, "policy", policy, problems), "policy"
    else:
        path, shown = Path(policy), str(policy)
        if not path.is_file():
            raise UsageError(f"--policy {quoted(shown)}: there is no such file")
        document = parse_yaml(read_text(path, shown), shown)
        tops, entries = set(map(str, document.tree)), document_layer(Layer.OVERRIDE, document, problems)
    if tops != {_SECTION}:
        others = ", ".join(sorted(tops - {_SECTION})) or "nothing"
        raise ConfigError(f"{shown}: a policy holds a `gate:` section and nothing else; found: {others}")
    problems.raise_any()
    return entries


def _replayed(run: Run, version: str | None, stored: dict[str, Any] | None, gate: GateSettings) -> ReplayedRun:
    from pydantic import ValidationError

    from tunesmith.evaluation.rules.gate import Judged
    from tunesmith.evaluation.rules.replay import replay, why_not_replayable

    if stored is None:
        return ReplayedRun(run.id, version, None, None, (), (), f"it has no report: the run is {run.state}")
    then = (stored.get("verdict") or {}).get("decision")
    try:
        report = Judged.model_validate(stored).report
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        return ReplayedRun(run.id, version, then, None, (), (), f"its report is of an older schema ({field})")
    problem = why_not_replayable(report, gate)
    if problem is not None:
        return ReplayedRun(run.id, version, then, None, (), (), problem)
    made = replay(report, run.spec.gate, gate, run.spec.evaluation.metrics)
    return ReplayedRun(run.id, version, then, made.decision, made.changed, made.reasons, None)


def _totals(runs: Sequence[ReplayedRun]) -> dict[str, int]:
    replayed = [run for run in runs if run.problem is None]
    return {
        "replayed": len(replayed),
        "other": sum(run.is_other for run in replayed),
        "not_replayable": len(runs) - len(replayed),
        **Counter(f"{run.then} -> {run.now}" for run in replayed),
    }
