"""`client.experiences` and `client.feedback`: add what the model did and what people think of it, list, show, count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tunesmith.client.experience_views import ExperienceDetail, ExperienceView, StatsView, view_of
from tunesmith.client.views import EventView
from tunesmith.core.errors import NotFound, Refused, UsageError, did_you_mean, quoted
from tunesmith.curriculum.queries import corrections
from tunesmith.experience import review
from tunesmith.experience.capture import About, AddedView, Capture, CaptureRules, capture_of
from tunesmith.experience.capture_queue import store_now
from tunesmith.experience.feedback import RatedView, Said, add_feedback
from tunesmith.experience.forgetting import forget
from tunesmith.experience.forgetting.forget import RewriteResult
from tunesmith.experience.forgetting.queries import erasure_impact as contained
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries.erasure_impact import AffectedDataset, HoldingAdapter
from tunesmith.experience.import_files import ImportOptions, ImportReport, Progress, import_files
from tunesmith.experience.policy import rules_of, thresholds_of
from tunesmith.experience.queries import assessments, candidates, experiences, feedback, members
from tunesmith.experience.review import Decided, Suspect, check_reason
from tunesmith.experience.rules.experience import ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.session import Session
from tunesmith.store import events
from tunesmith.store.database import Tx

_MAX_LISTED = 10_000
ON_REQUEST = "forgotten on request"
_COLUMNS = {"session": "session", "source": "source", "key": "natural_key"}
_FRESH_S = 3.0
"""How long an answer that was just given may be on its way into the store."""
_POLL_INTERVAL_S = 0.05


class Filters(TypedDict, total=False):
    """What a listing may be narrowed to."""

    profile: str | None
    class_name: str | None
    state: str | None
    source: str | None
    session: str | None
    task_type: str | None


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


class Experiences:
    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, profile: str, messages: Sequence[Mapping[str, Any]], **about: Unpack[About]) -> AddedView:
        """Store one interaction; when this returns, it is durable. The same key again is the same experience."""
        return self.add_capture(profile, capture_of(messages, about))

    def add_capture(self, profile: str, given: Capture) -> AddedView:
        """Store one interaction as `tunesmith serve` tells it, with the API key that it was served to."""
        return store_now(self._session, profile, given)

    def import_files(
        self,
        profile: str,
        files: Sequence[str | Path],
        *,
        source: str | None = None,
        on_progress: Progress | None = None,
    ) -> ImportReport:
        """Store every answer in the files as an experience; the same content again is the same experience."""
        session = self._session
        options = ImportOptions(profile, self._rules(profile), session.actor, source)
        return import_files(session.database, [Path(file) for file in files], options, on_progress)

    def stats(self, profile: str | None = None) -> list[StatsView]:
        """How many there are, by profile."""
        profile = self._session.known_profile(profile)
        with self._session.database.read() as tx:
            counted = assessments.tally(tx, profile)
            rated = feedback.tally(tx, profile)
            corrected = assessments.num_corrected(tx, profile)
        found = []
        for name in sorted({row[0] for row in counted}):
            classes, states = Counter[str](), Counter[str]()
            for _, state, class_name, num in (row for row in counted if row[0] == name):
                states[state] += num
                classes[class_name] += num if state != ExperienceState.FORGOTTEN else 0
            num_rated, mean = rated.get(name, (0, None))
            figures = (num_rated, mean, corrected.get(name, 0))
            found.append(StatsView(name, classes.total(), dict(+classes), dict(states), *figures))
        return found

    def in_review(self, profile: str | None = None, *, limit: int = 20) -> list[Suspect]:
        """What waits for a person, the newest first; every text in it is safe to show."""
        if not 1 <= limit <= _MAX_LISTED:
            raise UsageError(f"limit is {limit}; use a number from 1 to {_MAX_LISTED}")
        return review.listing(self._session.database, self._session.known_profile(profile), limit)

    def suspect(self, experience_id: str) -> Suspect:
        """One experience as a reviewer may see it, by its id or the beginning of it."""
        with self._session.database.read() as tx:
            found = experiences.find(tx, experience_id)
            better = candidates.corrections_of(tx, [found.id]).get(found.id)
            return review.suspect_of(found, assessments.get(tx, found.id), better)

    def review(self, experience_ids: Sequence[str], decision: str, *, reason: str) -> list[Decided]:
        """Accept: what is suspected is overruled. Reject: it stays out for good. The last word counts."""
        chosen = _decision(decision)
        if isinstance(experience_ids, str) or not experience_ids:
            raise UsageError("name the experiences to decide about, as a list of ids")
        with self._session.database.read() as tx:
            ids = [experiences.find(tx, each).id for each in experience_ids]
        return self._decide(list(dict.fromkeys(ids)), chosen, reason)

    def review_all_with(self, screen: str, decision: str, *, reason: str, profile: str | None = None) -> list[Decided]:
        """Decide about everything that waits because of one screen, or `rejected_runs`.

        Accepted is only what nothing else speaks against.
        """
        chosen = _decision(decision)
        ids = review.ids_with(self._session.database, self._session.known_profile(profile), screen, chosen)
        return self._decide(ids, chosen, reason)

    def _decide(self, ids: list[str], decision: ReviewDecision, reason: str) -> list[Decided]:
        session, said = self._session, review.check_reason(reason)
        with session.database.read() as tx:
            names = {experiences.get(tx, each).profile for each in ids}
        limits = {name: thresholds_of(session.database, session.workspace, name, session.environ) for name in names}
        return review.decide_all(session.database, ids, decision, limits, reviewer=session.actor, reason=said)

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
                control.request_action(tx, run_id, RequestKind.CANCEL, actor=self._session.actor)

    def list(self, *, limit: int = 50, **filters: Unpack[Filters]) -> list[ExperienceView]:
        """The newest first."""
        if not 1 <= limit <= _MAX_LISTED:
            raise UsageError(f"limit is {limit}; use a number from 1 to {_MAX_LISTED}")
        for name in filters:
            if name not in Filters.__annotations__:
                raise UsageError(
                    f"experiences are not listed by {quoted(name)}{did_you_mean(name, Filters.__annotations__)}"
                )
        self._session.known_profile(filters.get("profile"))
        _known("class", filters.get("class_name"), [member.value for member in ExperienceClass])
        _known("state", filters.get("state"), [member.value for member in ExperienceState])
        wanted = {name: str(value) for name, value in filters.items() if value is not None}
        with self._session.database.read() as tx:
            return [view_of(*found) for found in experiences.listing(tx, wanted, limit)]

    def show(self, experience_id: str) -> ExperienceDetail:
        """Everything about one experience, by its id or the beginning of it."""
        with self._session.database.read() as tx:
            found = experiences.find(tx, experience_id)
            assessment = assessments.get(tx, found.id)
            said = feedback.of_experience(tx, found.id)
            taught = corrections.of_experience(tx, found.id)
            history = events.of_entity(tx, "experience", found.id)
            inside = members.of_experience(tx, found.id)
        return ExperienceDetail(
            experience=view_of(found, assessment),
            messages=found.messages,
            reference=found.reference,
            findings=dict(assessment.findings),
            suspicions=assessment.suspicions,
            dataset_id=found.dataset_id,
            run_id=found.run_id,
            adapter_id=found.adapter_id,
            num_rejections=found.num_rejections,
            in_review=found.in_review,
            feedback=tuple(said),
            corrections=tuple(taught),
            events=tuple(
                EventView(event.at, event.action, event.actor, event.old_state, event.new_state, event.reason)
                for event in history
            ),
            datasets=tuple(inside),
        )

    def _rules(self, profile: str) -> CaptureRules:
        session = self._session
        return rules_of(session, profile)


class FeedbackApi:
    def __init__(self, session: Session, flush: Callable[[float], object]) -> None:
        self._session = session
        self._flush = flush
        """Waits for what this client has captured itself."""

    def add(self, experience_id: str, value: str | float | None = None, **said: Unpack[Said]) -> RatedView:
        """Say what an answer was worth; when this returns, it is durable and the class has been decided again.

        `value`: helpful, partial, irrelevant, up, down, or 0 to 1. The last word of each rater counts; the rater is
        whoever uses the client, unless told. `key_label`: the API key it came with, for `tunesmith serve`; all raters
        below one key are one voice. An answer that was given a moment ago, named by PROFILE:KEY, may still be on its
        way into the store: it is waited for, at most three seconds.
        """
        try:
            return add_feedback(self._session, experience_id, value, **said)
        except NotFound:
            if not self._comes(experience_id):
                raise
        return add_feedback(self._session, experience_id, value, **said)

    def _comes(self, name: str) -> bool:
        """Whether an answer comes into the store within three seconds, from this client's queue or another process."""
        profile, colon, _ = name.partition(":")
        if not colon:
            return False  # only what is stored has an id
        try:
            self._session.known_profile(profile)
        except NotFound:
            return False
        deadline = time.monotonic() + _FRESH_S
        self._flush(_FRESH_S)
        while True:
            with suppress(NotFound), self._session.database.read() as tx:
                experiences.find(tx, name)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)


def _known(kind: str, name: str | None, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        raise NotFound.named(kind, name, names)


def _decision(text: str) -> ReviewDecision:
    known = [decision.value for decision in ReviewDecision]
    if text not in known:
        raise UsageError(f"{quoted(text)} is no decision{did_you_mean(text, known)}")
    return ReviewDecision(text)


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
