"""The part of `client.experiences` by which people decide about suspects."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.core.errors import UsageError, did_you_mean, quoted
from tunesmith.experience import review
from tunesmith.experience.policy import thresholds_of
from tunesmith.experience.queries import assessments, experiences
from tunesmith.experience.review import Decided, Suspect
from tunesmith.experience.rules.experience import ReviewDecision
from tunesmith.runs.session import Session

_MAX_LISTED = 10_000


class Reviewing:
    def __init__(self, session: Session) -> None:
        self._session = session

    def in_review(self, profile: str | None = None, *, limit: int = 20) -> list[Suspect]:
        """What waits for a person, the newest first; every text in it is safe to show."""
        if not 1 <= limit <= _MAX_LISTED:
            raise UsageError(f"limit is {limit}; use a number from 1 to {_MAX_LISTED}")
        return review.listing(self._session.database, self._session.known_profile(profile), limit)

    def suspect(self, experience_id: str) -> Suspect:
        """One experience as a reviewer may see it, by its id or the beginning of it."""
        with self._session.database.read() as tx:
            found = experiences.find(tx, experience_id)
            return review.suspect_of(found, assessments.get(tx, found.id))

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


def _decision(text: str) -> ReviewDecision:
    known = [decision.value for decision in ReviewDecision]
    if text not in known:
        raise UsageError(f"{quoted(text)} is no decision{did_you_mean(text, known)}")
    return ReviewDecision(text)
