"""Reviews: what waits for a person's decision about an experience, and what they decided; nothing is overwritten."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.core.ids import next_id
from tunesmith.experience.queries import assessments, experiences
from tunesmith.experience.queries.experiences import Experience
from tunesmith.experience.rules.classes import Assessment
from tunesmith.experience.rules.experience import ReviewDecision
from tunesmith.experience.tables import assessments as assessments_table
from tunesmith.experience.tables import experiences as experiences_table
from tunesmith.experience.tables import reviews
from tunesmith.profiles.tables import profiles
from tunesmith.store import events
from tunesmith.store.database import Tx

# spelt out, because a partial index serves only a query that repeats its condition
_SUSPECT = sa.text("assessments.class_name = 'quarantined' AND assessments.review IS NULL")
_IN_REVIEW = sa.text("experiences.in_review")


def add(tx: Tx, experience_id: str, decision: ReviewDecision, *, reviewer: str, reason: str) -> str:
    """Store a decision, and end the wait for it: the counter of rejected runs starts anew."""
    review_id = next_id("rv")
    tx.run(
        reviews.insert().values(
            id=review_id,
            experience_id=experience_id,
            decision=decision,
            reviewer=reviewer,
            reason=reason,
            created_at=tx.now,
        )
    )
    tx.run(
        experiences_table.update()
        .where(experiences_table.c.id == experience_id)
        .values(in_review=False, num_rejections=0)
    )
    detail = {"review": review_id, "decision": decision.value}
    events.record(tx, "experience", experience_id, "reviewed", actor=reviewer, reason=reason, detail=detail)
    return review_id


def profiles_known(tx: Tx) -> list[str]:
    """Every profile that may have experiences."""
    return [row["name"] for row in tx.all(sa.select(profiles.c.name).order_by(profiles.c.name))]


def waiting(tx: Tx, profile: str, limit: int) -> list[tuple[Experience, Assessment]]:
    """What waits for a reviewer, the newest first: suspects nobody has decided about, and what was rejected twice."""
    judged, known = assessments_table, experiences_table
    suspect = sa.select(judged.c.experience_id).where(judged.c.profile == profile, _SUSPECT)
    in_review = sa.select(known.c.id.label("experience_id")).where(known.c.profile == profile, _IN_REVIEW)
    ids = {row["experience_id"] for row in tx.all(suspect.order_by(judged.c.seq.desc()).limit(limit))}
    ids |= {row["experience_id"] for row in tx.all(in_review.order_by(known.c.seq.desc()).limit(limit))}
    found = [(experiences.get(tx, each), assessments.get(tx, each)) for each in ids]
    return sorted(found, key=lambda pair: -pair[0].seq)[:limit]


def suspicions_waiting(tx: Tx, profile: str, limit: int | None = None) -> list[tuple[str, list[str]]]:
    """The ids of suspects that wait, the newest first, with what is suspected."""
    judged = assessments_table
    query = sa.select(judged.c.experience_id, judged.c.suspicions).where(judged.c.profile == profile, _SUSPECT)
    return [(row[0], row[1]) for row in tx.conn.execute(query.order_by(judged.c.seq.desc()).limit(limit))]


def ids_in_review(tx: Tx, profile: str, limit: int | None = None) -> list[str]:
    """The ids of those that wait after rejected runs, the newest first."""
    known = experiences_table
    query = sa.select(known.c.id).where(known.c.profile == profile, _IN_REVIEW).order_by(known.c.seq.desc())
    return [row["id"] for row in tx.all(query.limit(limit))]
