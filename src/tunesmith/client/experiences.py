"""`client.experiences` and `client.feedback`: add what the model did and what people think of it, list, show, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tunesmith.client.experience_views import (
    AddedView,
    ExperienceDetail,
    ExperienceView,
    ImportView,
    RatedView,
    StatsView,
    view_of,
)
from tunesmith.client.forgetting import Forgetting
from tunesmith.client.reviewing import Reviewing
from tunesmith.client.views import EventView
from tunesmith.core.errors import NotFound, UsageError, did_you_mean, quoted
from tunesmith.curriculum.queries import corrections
from tunesmith.experience import capture, rate
from tunesmith.experience.capture import Capture, Rules
from tunesmith.experience.import_files import ImportOptions, Progress, import_files
from tunesmith.experience.policy import rules_of, thresholds_of
from tunesmith.experience.queries import assessments, experiences, feedback, members
from tunesmith.experience.rules.classes import Judgement, screens_of, value_of
from tunesmith.experience.rules.experience import Context, ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.profiles.sections.experience import ExperiencePolicy
from tunesmith.profiles.sections.screens import DEFAULT_SCREENS
from tunesmith.runs.session import Session
from tunesmith.store import events

_CONTEXT = frozenset(field.name for field in fields(Context))
_MAX_LISTED = 10_000


class About(TypedDict, total=False):
    """What may be said about an interaction beside its messages (`stages.capture.Capture`, `domain.Context`)."""

    key: str | None
    next_turn: str | None
    source: str | None
    session: str | None
    served_by: str | None
    template: str | None
    task_type: str | None
    reference: str | None
    captured_at: datetime | None
    is_cut: bool


class Filters(TypedDict, total=False):
    """What a listing may be narrowed to."""

    profile: str | None
    class_name: str | None
    state: str | None
    source: str | None
    session: str | None
    task_type: str | None


class Experiences(Reviewing, Forgetting):
    def add(self, profile: str, messages: Sequence[Mapping[str, Any]], **about: Unpack[About]) -> AddedView:
        """Store one interaction; when this returns, it is durable. The same key again is the same experience."""
        return self.add_capture(profile, capture_of(messages, about))

    def add_capture(self, profile: str, given: Capture) -> AddedView:
        """Store one interaction as `tunesmith serve` tells it, with the API key that it was served to."""
        session = self._session
        rules = self._rules(profile)
        checked = capture.check(given, rules)
        with session.database.write(bulk=True) as tx:
            kept = capture.store(tx, profile, checked, rules, actor=session.actor)
            now = assessments.get(tx, kept.id)
        return AddedView(kept.id, kept.is_new, now.class_name, now.reasons)

    def import_files(
        self,
        profile: str,
        files: Sequence[str | Path],
        *,
        source: str | None = None,
        on_progress: Progress | None = None,
    ) -> ImportView:
        """Store every answer in the files as an experience; the same content again is the same experience."""
        session = self._session
        options = ImportOptions(profile, self._rules(profile), session.actor, source)
        report = import_files(session.database, [Path(file) for file in files], options, on_progress)
        return ImportView(
            num_rows=report.num_rows,
            num_new=report.num_new,
            num_known=report.num_known,
            num_forgotten=report.num_forgotten,
            num_refused=report.num_refused,
            classes=dict(report.classes),
            problems=tuple(report.problems),
            last_id=report.last_id,
        )

    def stats(self, profile: str | None = None) -> list[StatsView]:
        """How many there are, by profile."""
        profile = self._session.known_profile(profile)
        with self._session.database.read() as tx:
            counted = experiences.tally(tx, profile)
            rated = feedback.tally(tx, profile)
        found = []
        for name in sorted({row[0] for row in counted}):
            classes, states = Counter[str](), Counter[str]()
            for _, state, class_name, num in (row for row in counted if row[0] == name):
                states[state] += num
                classes[class_name] += num if state != ExperienceState.FORGOTTEN else 0
            num_rated, mean = rated.get(name, (0, None))
            found.append(StatsView(name, classes.total(), dict(+classes), dict(states), num_rated, mean))
        return found

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

    def _rules(self, profile: str) -> Rules:
        session = self._session
        return rules_of(session.database, session.workspace, profile, actor=session.actor, environ=session.environ)


class FeedbackNoun:
    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self,
        experience_id: str,
        value: str | float | None = None,
        *,
        rater: str | None = None,
        comment: str | None = None,
        correction: str | None = None,
        key_label: str | None = None,
    ) -> RatedView:
        """Say what an answer was worth; when this returns, it is durable and the class has been decided again.

        `value`: helpful, partial, irrelevant, up, down, or 0 to 1. The last word of each rater counts; the rater is
        whoever uses the client, unless told. `key_label`: the API key it came with, for `tunesmith serve`; all raters
        below one key are one voice.
        """
        session = self._session
        if not isinstance(experience_id, str):
            raise UsageError(f"experience_id is {quoted(repr(experience_id))}; give an id, or PROFILE:KEY, as a str")
        try:
            rating = None if value is None else value_of(str(value))
        except ValueError as error:
            raise UsageError(f"{quoted(str(value))} is no rating; {error}") from None
        said_by = session.actor if rater is None else rater
        judgement = rate.check(Judgement(said_by, rating, comment=comment, correction=correction, key_label=key_label))
        rate.check_person(said_by)
        database = session.database
        with database.read() as tx:
            found = experiences.find(tx, experience_id)
        if correction is not None:
            rate.refuse_suspect(self._suspicions_in(correction, found))
        limits = thresholds_of(database, session.workspace, found.profile, session.environ)
        with database.write() as tx:
            feedback_id, is_new = rate.judge(tx, found.id, judgement, limits, actor=session.actor)
            now = assessments.get(tx, found.id)
        return RatedView(feedback_id, found.id, is_new, now.class_name, now.reasons, now.feedback)

    def _suspicions_in(self, correction: str, found: experiences.Experience) -> list[str]:
        """What an assembly would find in it: what a reviewer has overruled about this experience does not count."""
        session = self._session
        with session.database.read() as tx:
            now = assessments.get(tx, found.id)
        try:
            rules = rules_of(
                session.database, session.workspace, found.profile, actor=session.actor, environ=session.environ
            )
        except NotFound:  # the file of the profile is gone: feedback about it still counts
            rules = Rules(ExperiencePolicy(), screens=DEFAULT_SCREENS)
        overruled = screens_of(now.suspicions) if now.review is ReviewDecision.ACCEPT else ()
        counting = tuple(screen for screen in rules.screens if screen not in overruled)
        return capture.suspicions_in([{"content": correction}], replace(rules, screens=counting))


def capture_of(messages: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> Capture:
    """A capture from what the caller says about it."""
    known = {"key", "next_turn", "is_cut", *_CONTEXT}
    for name in about:
        if name not in known:
            raise UsageError(f"an experience has no {quoted(name)}{did_you_mean(name, known)}")
    context = {"source": "api", **{name: value for name, value in about.items() if name in _CONTEXT}}
    is_cut = about.get("is_cut", False)
    if not isinstance(is_cut, bool):
        raise UsageError(f"is_cut is {quoted(repr(is_cut))}; give True or False")
    return Capture(messages, about.get("key"), about.get("next_turn"), Context(**context), is_cut=is_cut)


def _known(kind: str, name: str | None, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        raise NotFound.named(kind, name, names)
