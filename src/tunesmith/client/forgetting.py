"""The part of `client.experiences` by which experiences are forgotten: shown first, then gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tunesmith.core.errors import NotFound, Refused, UsageError, quoted
from tunesmith.experience.forgetting import forget
from tunesmith.experience.forgetting.forget import RewriteResult
from tunesmith.experience.forgetting.queries import erasure_impact as contained
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries.erasure_impact import AffectedDataset, HoldingAdapter
from tunesmith.experience.queries import experiences
from tunesmith.experience.review import check_reason
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.session import Session
from tunesmith.store.database import Tx

ON_REQUEST = "forgotten on request"
_COLUMNS = {"session": "session", "source": "source", "key": "natural_key"}


@dataclass(frozen=True)
class ForgetView:
    """What forgetting touches, or has touched."""

    ids: tuple[str, ...]
    states: dict[str, int]
    """How many are collected, reserved, consumed, or were forgotten before."""
    datasets: tuple[AffectedDataset, ...]
    adapters: tuple[HoldingAdapter, ...]
    ends: tuple[str, ...]
    """Unfinished runs that learn from them: forgetting ends these, and `run retry` trains on what is left."""
    num_going_on: int
    """Other experiences of the same sessions, which may repeat what was said."""
    outcomes: tuple[RewriteResult, ...] = ()
    """What became of the datasets; empty where nothing was done yet."""
    num_new: int = 0
    """How many were forgotten by this call."""
    store_waits: str = ""
    """Why the file of an SQLite store could not be rewritten now; until a worker does it, it may hold copies."""


class Forgetting:
    def __init__(self, session: Session) -> None:
        self._session = session

    def preview_forget(
        self, experience_ids: Sequence[str] = (), *, profile: str | None = None, **by: str
    ) -> ForgetView:
        """What forgetting these would touch; changes nothing. Others than ids: `session`, `source` or `key`."""
        with self._session.database.read() as tx:
            return _look(tx, self._chosen(tx, experience_ids, profile, by))

    def forget(
        self,
        experience_ids: Sequence[str] = (),
        *,
        reason: str = ON_REQUEST,
        profile: str | None = None,
        stop_runs: bool = False,
        **by: str,
    ) -> ForgetView:
        """Leave tombstones: when this returns, no table holds anything of what was said, and it is never learnt again.

        Unfinished runs that learn from them end, and what they made never goes live. Datasets that hold it are
        rewritten now, or when the runs that still read them have ended; `stop_runs` cancels those.
        """
        session, said = self._session, check_reason(reason)
        with session.database.read() as tx:
            ids = self._chosen(tx, experience_ids, profile, by)
            touched = _look(tx, ids)
        new = forget.forget(session.database, ids, actor=session.actor, reason=said)
        ended = self._end(touched)
        if stop_runs:
            self._cancel({run_id for dataset in touched.datasets for run_id in dataset.runs})
        outcomes = forget.finish(session.database, session.workspace, actor=session.actor, wait=True)
        waits = erasures.vacuum(session.database)
        return ForgetView(
            **{**vars(touched), "ends": ended, "outcomes": tuple(outcomes), "num_new": len(new), "store_waits": waits},
        )

    def _end(self, touched: ForgetView) -> tuple[str, ...]:
        from tunesmith.orchestration import control

        holding = [dataset.id for dataset in touched.datasets]
        return tuple(control.end_forgotten(self._session.database, actor=self._session.actor, dataset_ids=holding))

    def _chosen(self, tx: Tx, given: Sequence[str], profile: str | None, by: dict[str, str]) -> list[str]:
        for name in by:
            if name not in _COLUMNS:
                raise UsageError(f"experiences are not forgotten by {quoted(name)}; use ids, session, source or key")
        if isinstance(given, str) or bool(given) == bool(by) or len(by) > 1:
            raise UsageError("name experiences by a list of ids, or by one of session, source and key")
        if given:
            return list(dict.fromkeys(experiences.find(tx, each).id for each in given))
        if profile is None:
            raise UsageError("a session, a source and a key mean something in one profile only; name the profile")
        self._session.known_profile(profile)
        ((name, value),) = by.items()
        found = contained.matching(tx, profile, _COLUMNS[name], value)
        if not found:
            raise NotFound(f"no experience of {profile} has the {name} {quoted(value)}; `experience list` shows them")
        return found

    def _cancel(self, run_ids: set[str]) -> None:
        """Ask for the end of the runs; one that ends by itself at this moment is as good."""
        from tunesmith.orchestration import control

        for run_id in sorted(run_ids):
            with suppress(Refused), self._session.database.write() as tx:
                control.wish(tx, run_id, RequestKind.CANCEL, actor=self._session.actor)


def _look(tx: Tx, ids: list[str]) -> ForgetView:
    found = contained.brief(tx, ids)
    held = contained.datasets_with(tx, found)
    live = [each for each in found if each.state is not ExperienceState.FORGOTTEN]
    return ForgetView(
        ids=tuple(ids),
        states=dict(Counter(each.state.value for each in found)),
        datasets=tuple(held),
        adapters=tuple(contained.adapters_with(tx, held)),
        ends=tuple(run_id for dataset in held for run_id in dataset.learning),
        num_going_on=contained.num_going_on(tx, live),
    )
