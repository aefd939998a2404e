"""Teachers' answers in the store: which experiences are entries, what an attempt leaves, what people change."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import exc

from support import tables
from support.rows import ACTOR, PROFILE, a_profile, an_experience, force
from tunesmith.core.ids import new_id
from tunesmith.curriculum.due import curriculum_status
from tunesmith.curriculum.queries import corrections, cycles
from tunesmith.curriculum.queries.corrections import Correction
from tunesmith.curriculum.rules.cycle import not_due
from tunesmith.experience.queries import experiences, reviews
from tunesmith.experience.rate import add_rating
from tunesmith.experience.rules.classes import assess
from tunesmith.experience.rules.experience import (
    Context,
    CorrectionState,
    ExperienceClass,
    ExperienceState,
    ReviewDecision,
)
from tunesmith.experience.rules.feedback import Feedback, Rating
from tunesmith.experience.tables import corrections as table
from tunesmith.profiles.sections.curriculum import CurriculumPolicy
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.store import events
from tunesmith.store.database import Database, Tx
from tunesmith.verifiers.base import Finding

POOR = {"entity_preservation": Finding(0.25, reason="lost two")}


def poor(tx: Tx, *, suspicions: tuple[str, ...] = (), **values: Any) -> str:
    """An experience that needs improvement."""
    a_profile(tx)
    said = assess(POOR, suspicions, Feedback(), Thresholds(), monitors=())
    messages = [{"role": "user", "content": "Send order 17"}, {"role": "assistant", "content": "Done."}]
    context = Context(served_by="support@v1")
    experience_id, _ = experiences.add(
        tx, PROFILE, new_id("key"), messages, actor=ACTOR, context=context, assessment=said
    )
    if values:
        force(tx, tables.experiences, experience_id, **values)
    return experience_id


def attempt(tx: Tx, experience_id: str, state: CorrectionState = CorrectionState.REFUSED, counts: bool = True) -> str:
    said = Correction("big", state, "as the test wants", "Order 17 is sent.", {"length": Finding(1.0)}, counts)
    paid_by = new_id("sp")
    corrections.add(tx, experience_id, PROFILE, said, actor=ACTOR, paid_by=paid_by)
    return paid_by


def ids(tx: Tx) -> list[str]:
    return [entry.id for entry in corrections.entries(tx, PROFILE)]


def test_entry_tells_what_is_known_of_it(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx)
        (entry,) = corrections.entries(tx, PROFILE)
        assert entry.id == experience_id
        assert (entry.findings, entry.served_by, entry.num_attempts) == (POOR, "support@v1", 0)
        attempt(tx, experience_id)
        attempt(tx, experience_id, CorrectionState.FAILED, counts=False)
        entry_now = corrections.entry(tx, PROFILE, experience_id)
        assert entry_now is not None
        assert (entry_now.num_attempts, entry_now.num_counted, entry_now.last_attempt_at) == (2, 1, tx.now)


def test_what_is_corrected_reserved_in_review_or_not_poor_is_no_entry(database: Database) -> None:
    with database.write() as tx:
        wanted = poor(tx)
        an_experience(tx)  # ambiguous
        poor(tx, in_review=True)
        forgotten = poor(tx)
        experiences.move(tx, forgotten, ExperienceState.FORGOTTEN, actor=ACTOR, reason="asked")
        reserved = an_experience(tx, ExperienceState.RESERVED)
        tx.run(
            tables.assessments.update()
            .where(tables.assessments.c.experience_id == reserved)
            .values(class_name=ExperienceClass.NEEDS_IMPROVEMENT)
        )
        corrected = poor(tx)
        add_rating(tx, corrected, Rating("ann", correction="Order 17 is sent."), Thresholds(), actor=ACTOR)
        attempt(tx, poor(tx), CorrectionState.ACCEPTED)
        rejected = poor(tx)
        tx.run(
            tables.assessments.update()
            .where(tables.assessments.c.experience_id == rejected)
            .values(review=ReviewDecision.REJECT)
        )
        a_profile(tx, "other")
        assert ids(tx) == [wanted]
        assert list(corrections.entries(tx, "other")) == []
        assert corrections.entry(tx, PROFILE, corrected) is None


def test_one_answer_is_accepted_at_most(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx)
        attempt(tx, experience_id, CorrectionState.ACCEPTED)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        attempt(tx, experience_id, CorrectionState.ACCEPTED)
    with database.read() as tx:
        (stored,) = corrections.of_experience(tx, experience_id)
        assert (stored.state, stored.answer) == ("accepted", "Order 17 is sent.")


def test_attempt_that_is_stored_again_is_stored_once(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx)
        paid_by = attempt(tx, experience_id)
        again = Correction("big", CorrectionState.ACCEPTED, "", "x", {}, True)
        corrections.add(tx, experience_id, PROFILE, again, actor=ACTOR, paid_by=paid_by)
        (stored,) = corrections.of_experience(tx, experience_id)
        assert (stored.state, stored.number, stored.findings) == ("refused", 1, {"length": Finding(1.0)})
        told = [event.action for event in events.of_entity(tx, "experience", experience_id)]
        assert told == ["captured", "correction_refused"]


def test_accepted_without_an_answer_is_refused_by_the_database(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx)
    said = Correction("big", CorrectionState.ACCEPTED, "", None, {}, True)
    with pytest.raises(exc.IntegrityError), database.write() as tx:
        corrections.add(tx, experience_id, PROFILE, said, actor=ACTOR, paid_by="sp-1")


def test_review_gives_an_entry_that_was_given_up_another_chance(database: Database) -> None:
    policy = CurriculumPolicy(backoff_h=0.0)
    with database.write() as tx:
        experience_id = poor(tx)
        for _ in range(3):
            attempt(tx, experience_id)
        tx.run(table.update().values(created_at=tx.now - timedelta(hours=1)))
        entry = corrections.entry(tx, PROFILE, experience_id)
        assert entry is not None
        assert "given up" in (not_due(entry, policy, tx.now) or "")
        found = curriculum_status(tx, PROFILE, policy, why_off=None)
        assert (found.num_due, sum(found.others.values())) == (0, 1)
        reviews.add(tx, experience_id, ReviewDecision.ACCEPT, reviewer="ann", reason="try again")
        entry = corrections.entry(tx, PROFILE, experience_id)
        assert entry is not None
        assert (entry.num_attempts, entry.num_counted) == (3, 0)
        assert not_due(entry, policy, tx.now) is None


def test_suspect_that_a_person_accepted_is_sent_to_nobody(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx, suspicions=("secret: a key",))
        tx.run(
            tables.assessments.update()
            .where(tables.assessments.c.experience_id == experience_id)
            .values(class_name=ExperienceClass.NEEDS_IMPROVEMENT, review=ReviewDecision.ACCEPT)
        )
        (entry,) = corrections.entries(tx, PROFILE)
        assert "sent to nobody" in (not_due(entry, CurriculumPolicy(), tx.now) or "")


def test_last_cycle_is_under_way_until_it_ends(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
        assert cycles.last(tx, PROFILE) is None
        cycles.begin(tx, PROFILE, "cyc-1", actor=ACTOR)
        cycles.end(tx, PROFILE, "cyc-1", actor=ACTOR, summary="2 accepted", counts={"accepted": 2})
        last = cycles.last(tx, PROFILE)
        assert last is not None
        assert (last.id, last.ended_at, last.summary) == ("cyc-1", tx.now, "2 accepted")
        cycles.begin(tx, PROFILE, "cyc-2", actor=ACTOR)
        last = cycles.last(tx, PROFILE)
        assert last is not None
        assert (last.id, last.ended_at, last.summary) == ("cyc-2", None, "")


def test_correction_that_was_taken_back_makes_it_an_entry_again(database: Database) -> None:
    with database.write() as tx:
        experience_id = poor(tx)
        corrected = Rating("bob", 0.0, correction="Order 17 is on its way.")
        add_rating(tx, experience_id, corrected, Thresholds(), actor=ACTOR)
        assert ids(tx) == []
        add_rating(tx, experience_id, Rating("bob", 0.2), Thresholds(), actor=ACTOR)
        assert ids(tx) == [experience_id]
