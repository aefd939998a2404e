"""`client.experiences` and `client.feedback`: add what the model did and what people think of it, list, show, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tunesmith.client.experience_views import ExperienceDetail, ExperienceView, ImportView, StatsView, view_of
from tunesmith.client.forgetting import Forgetting
from tunesmith.client.reviewing import Reviewing
from tunesmith.client.views import EventView
from tunesmith.core.errors import NotFound, UsageError, did_you_mean, quoted
from tunesmith.curriculum.queries import corrections
from tunesmith.experience.capture import About, AddedView, Capture, CaptureRules, capture_of
from tunesmith.experience.capture_queue import store_now
from tunesmith.experience.feedback import RatedView, Said, add_feedback
from tunesmith.experience.import_files import ImportOptions, Progress, import_files
from tunesmith.experience.policy import rules_of
from tunesmith.experience.queries import assessments, experiences, feedback, members
from tunesmith.experience.rules.experience import ExperienceClass, ExperienceState
from tunesmith.runs.session import Session
from tunesmith.store import events

_MAX_LISTED = 10_000


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
        return store_now(self._session, profile, given)

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

    def _rules(self, profile: str) -> CaptureRules:
        session = self._session
        return rules_of(session, profile)


class FeedbackNoun:
    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, experience_id: str, value: str | float | None = None, **said: Unpack[Said]) -> RatedView:
        """Say what an answer was worth; when this returns, it is durable and the class has been decided again.

        `value`: helpful, partial, irrelevant, up, down, or 0 to 1. The last word of each rater counts; the rater is
        whoever uses the client, unless told. `key_label`: the API key it came with, for `tunesmith serve`; all raters
        below one key are one voice.
        """
        return add_feedback(self._session, experience_id, value, **said)


def _known(kind: str, name: str | None, names: Sequence[str]) -> None:
    if name is not None and name not in names:
        raise NotFound.named(kind, name, names)
