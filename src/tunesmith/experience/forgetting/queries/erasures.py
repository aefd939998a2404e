"""Erasures: what was said in a forgotten experience leaves the store, and the datasets that hold it wait their turn."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunesmith.core.errors import Refused
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.tables import datasets as datasets_table
from tunesmith.datasets.tables import heldout_cases
from tunesmith.datasets.tables import members as members_table
from tunesmith.experience.forgetting.rules import FORGOTTEN, hashes_of, tombstone_key
from tunesmith.experience.queries import experiences, members
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.experience.queries.experiences import Experience
from tunesmith.experience.rules.experience import ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.experience.tables import assessments, corrections, erasures, feedback, reviews
from tunesmith.experience.tables import experiences as experiences_table
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.tables import runs
from tunesmith.store import events
from tunesmith.store.database import Database, Tx
from tunesmith.store.events import events as events_table

_READING = (RunState.QUEUED, RunState.TRAINING, RunState.PAUSED, RunState.EVALUATING)
"""In these states a run will read its dataset's folder, or is judged on its cases."""
_KEPT_REASONS = ("moved", "sent_to_review")
"""Events whose reason is ours and names ids only; the reasons of others may repeat what was said."""
_LEFT_OUT = re.compile(r"not in dataset (ds-[0-9a-z]+):")
_TIMEOUT_S = 3.0
_REWRITTEN_BYTES = 1024**3
"""Rewriting a larger file would keep others from writing for so long that workers lose their leases."""
_NAMED = 100  # experiences in one event; the table of erasures has them all


@dataclass(frozen=True)
class Pending:
    """A dataset whose text must still be rewritten."""

    dataset_id: str
    experience_ids: tuple[str, ...]
    hashes: frozenset[str]
    since: datetime
    last: int
    """The place of the newest of them in the order; what is asked for later waits for its own rewrite."""


@dataclass(frozen=True)
class Erasure:
    """One experience that was taken out of one dataset, or will be."""

    experience_id: str
    dataset_id: str
    requested_at: datetime
    done_at: datetime | None
    old_fingerprint: str
    new_fingerprint: str | None


def forget(tx: Tx, experience_id: str, *, actor: str, reason: str) -> bool:
    """Leave a tombstone: every text goes now, and every dataset that holds it is marked. False: it was one already."""
    for dataset_id in sorted(holders(tx, experiences.get(tx, experience_id))):
        datasets.lock(tx, dataset_id)  # before the experience, as the end of a run does, to avoid a deadlock
    experience = experiences.lock(tx, experience_id)
    if experience.state is ExperienceState.FORGOTTEN:
        return False
    hashes = hashes_of(experience.messages, _other_answers(tx, experience_id)) if experience.messages else []
    for dataset_id in sorted(holders(tx, experience)):
        _request(tx, experience_id, dataset_id, hashes)
    _forget_cases(tx, experience_id)
    _forget_words_elsewhere(tx, experience)
    experiences.move(tx, experience_id, ExperienceState.FORGOTTEN, actor=actor, reason=reason)
    _blank(tx, experience)
    _owe_rewrite(tx)
    return True


def holders(tx: Tx, experience: Experience) -> set[str]:
    """Return the datasets whose folders may hold it, as an example or as a quarantined row."""
    found = {member.dataset_id for member in members.of_experience(tx, experience.id)}
    if experience.dataset_id is not None:
        found.add(experience.dataset_id)
    return found | left_out_of(tx, [experience.id])


def left_out_of(tx: Tx, experience_ids: Sequence[str]) -> set[str]:
    """The datasets that these were meant for, and whose preparation kept them aside or refused them."""
    table = events_table
    query = sa.select(table.c.reason).where(
        table.c.entity == "experience", table.c.entity_id.in_(experience_ids), table.c.action == "left_out"
    )
    named = {name for reason in tx.conn.execute(query).scalars() for name in _LEFT_OUT.findall(reason)}
    known = sa.select(datasets_table.c.id).where(datasets_table.c.id.in_(sorted(named)))
    return {row["id"] for row in tx.all(known)}


def _other_answers(tx: Tx, experience_id: str) -> list[str]:
    """What was learnt in place of its own answer: corrections of raters and of teachers."""
    mine = (
        sa.select(feedback.c.correction).where(
            feedback.c.experience_id == experience_id, feedback.c.correction.is_not(None)
        ),
        sa.select(corrections.c.answer).where(
            corrections.c.experience_id == experience_id, corrections.c.answer.is_not(None)
        ),
    )
    return [str(answer) for query in mine for answer in tx.conn.execute(query).scalars()]


def _request(tx: Tx, experience_id: str, dataset_id: str, hashes: Sequence[str]) -> None:
    datasets.lock(tx, dataset_id)  # a run is submitted on it before this, or not at all until it is done
    examples = [
        member.example_id for member in members.of_experience(tx, experience_id) if member.dataset_id == dataset_id
    ]
    tx.insert_if_absent(
        erasures,
        experience_id=experience_id,
        dataset_id=dataset_id,
        requested_at=tx.now,
        old_fingerprint=datasets.get(tx, dataset_id).fingerprint,
        hashes=[*examples, *hashes],
    )


def _forget_cases(tx: Tx, experience_id: str) -> None:
    """Held-out cases of its prompts; where another experience asked the same, its case comes back with the rewrite."""
    for member in members.of_experience(tx, experience_id):
        if member.split is Split.HELDOUT:
            tx.run(
                heldout_cases.delete().where(
                    heldout_cases.c.dataset_id == member.dataset_id, heldout_cases.c.case_id == member.group_id
                )
            )


def _forget_words_elsewhere(tx: Tx, experience: Experience) -> None:
    """A complaint in its conversation was kept as a comment on the answer before it."""
    if experience.session is None:
        return
    table = experiences_table
    session = (table.c.profile == experience.profile, table.c.session == experience.session)
    said = [str(message.get("content") or "")[:500] for message in experience.messages if message["role"] == "user"]
    tx.run(
        feedback.update()
        .where(
            feedback.c.experience_id.in_(sa.select(table.c.id).where(*session)),
            feedback.c.is_implicit,
            feedback.c.comment.in_(said),
        )
        .values(comment=None)
    )


def _blank(tx: Tx, experience: Experience) -> None:
    mine = experience.id
    tx.run(
        experiences_table.update()
        .where(experiences_table.c.id == mine)
        .values(
            natural_key=tombstone_key(experience.natural_key),
            messages=[],
            in_review=False,
            source=None,
            session=None,
            served_by=None,
            template=None,
            task_type=None,
            reference=None,
            key_label=None,
        )
    )
    tx.run(
        assessments.update()
        .where(assessments.c.experience_id == mine)
        .values(
            class_name=ExperienceClass.QUARANTINED,
            reasons=[FORGOTTEN],
            findings={},
            suspicions=[],
            review=ReviewDecision.REJECT,
            assessed_at=tx.now,
        )
    )
    tx.run(feedback.delete().where(feedback.c.experience_id == mine))
    tx.run(corrections.delete().where(corrections.c.experience_id == mine))
    shadows.erase(tx, experience.profile, experience.natural_key)
    tx.run(reviews.update().where(reviews.c.experience_id == mine).values(reason=""))
    tx.run(members_table.update().where(members_table.c.experience_id == mine).values(reason=""))
    its = (events_table.c.entity == "experience", events_table.c.entity_id == mine)
    talkative = events_table.c.action.not_in(_KEPT_REASONS)
    tx.run(events_table.update().where(*its, talkative).values(reason="", detail={}))


def refuse_while_pending(tx: Tx, dataset_id: str, fingerprint: str) -> None:
    """Before a run is queued on a dataset: nothing of it may be about to change, or have changed since it was read."""
    datasets.lock(tx, dataset_id)
    if tx.first(sa.select(erasures.c.seq).where(erasures.c.dataset_id == dataset_id, _PENDING).limit(1)) is not None:
        raise Refused(
            f"an experience in dataset {dataset_id} was forgotten and its text is being removed; "
            "submit again when `tunesmith inbox` no longer names the dataset"
        )
    if datasets.get(tx, dataset_id).fingerprint != fingerprint:
        raise Refused(f"dataset {dataset_id} was rewritten a moment ago, without what was forgotten; submit again")


_PENDING = sa.text("erasures.done_at IS NULL")  # as the partial index says it


def pending(tx: Tx) -> list[Pending]:
    """Datasets whose text must still be rewritten, the longest waiting first."""
    query = sa.select(erasures).where(_PENDING).order_by(erasures.c.seq)
    found: dict[str, list[sa.RowMapping]] = {}
    for row in tx.all(query):
        found.setdefault(row["dataset_id"], []).append(row)
    return [
        Pending(
            dataset_id,
            tuple(row["experience_id"] for row in rows),
            frozenset(each for row in rows for each in row["hashes"]),
            rows[0]["requested_at"],
            rows[-1]["seq"],
        )
        for dataset_id, rows in found.items()
    ]


def of_dataset(tx: Tx, dataset_id: str) -> list[Erasure]:
    """What was taken out of a dataset, or waits to be, the oldest first."""
    query = sa.select(erasures).where(erasures.c.dataset_id == dataset_id).order_by(erasures.c.seq)
    names = tuple(Erasure.__dataclass_fields__)
    return [Erasure(**{name: row[name] for name in names}) for row in tx.all(query)]


def num_since(tx: Tx, dataset_id: str, instant: datetime) -> int:
    """How many experiences were taken out of a dataset since then."""
    taken = (erasures.c.dataset_id == dataset_id, erasures.c.done_at >= instant)
    return int(tx.conn.execute(sa.select(sa.func.count()).select_from(erasures).where(*taken)).scalar_one())


def readers(tx: Tx, dataset_id: str, *, judges: bool) -> list[str]:
    """Unfinished runs that read the dataset, or, where cases of it are forgotten, that are just being judged."""
    reads = sa.and_(runs.c.dataset_id == dataset_id, runs.c.state.in_(_READING))
    if judges:
        profile = datasets.get(tx, dataset_id).profile
        reads = sa.or_(reads, sa.and_(runs.c.profile == profile, runs.c.state == RunState.EVALUATING))
    query = sa.select(runs.c.id).where(reads, runs.c.finished_at.is_(None)).order_by(runs.c.seq)
    return [row["id"] for row in tx.all(query)]


def runs_of_profile(tx: Tx, profile: str) -> dict[str, str]:
    """Every run of a profile, with its dataset."""
    query = sa.select(runs.c.id, runs.c.dataset_id).where(runs.c.profile == profile).order_by(runs.c.seq)
    return {row["id"]: row["dataset_id"] for row in tx.all(query)}


def groups_of(tx: Tx, todo: Pending) -> dict[Split, set[str]]:
    """In which splits of its dataset these experiences are, and under which groups."""
    table = members_table
    forgotten = sa.select(erasures.c.experience_id).where(*_of(todo))
    query = sa.select(table.c.split, table.c.group_id).where(
        table.c.dataset_id == todo.dataset_id, table.c.experience_id.in_(forgotten)
    )
    found: dict[Split, set[str]] = {}
    for split, group in tx.conn.execute(query.distinct()):
        found.setdefault(Split(split), set()).add(group)
    return found


def _of(todo: Pending) -> tuple[Any, ...]:
    return erasures.c.dataset_id == todo.dataset_id, erasures.c.seq <= todo.last, _PENDING


def point_to(tx: Tx, old: Dataset, path: str, fingerprint: str, counts: dict[str, int]) -> bool:
    """From now on the dataset is the rewritten folder; False: somebody else was first."""
    moved = tx.run(
        datasets_table.update()
        .where(datasets_table.c.id == old.id, datasets_table.c.path == old.path)
        .values(path=path, fingerprint=fingerprint, counts=counts)
    )
    return moved == 1


def settle(tx: Tx, done: Pending, *, actor: str, cases: Sequence[datasets.HeldoutCase]) -> None:
    """Nothing on disk holds these texts any more."""
    now = datasets.get(tx, done.dataset_id)
    old = tx.first(sa.select(erasures.c.old_fingerprint).where(*_of(done)).order_by(erasures.c.seq))
    if old is None:
        return  # somebody else has settled it
    tx.run(erasures.update().where(*_of(done)).values(done_at=tx.now, new_fingerprint=now.fingerprint))
    for case in cases:
        tx.insert_if_absent(
            heldout_cases, profile=now.profile, dataset_id=now.id, case_id=case.id, messages=case.messages,
            added_at=tx.now,
        )  # fmt: skip
    detail: dict[str, Any] = {
        "old_fingerprint": old["old_fingerprint"],
        "new_fingerprint": now.fingerprint,
        "experiences": list(done.experience_ids[:_NAMED]),
    }
    reason = f"{len(done.experience_ids)} forgotten experiences were taken out"
    events.record(tx, "dataset", now.id, "erased", actor=actor, reason=reason, detail=detail)


def _owe_rewrite(tx: Tx) -> None:
    """SQLite: odd means that something was forgotten since the file was last rewritten; it only ever grows."""
    if not tx.is_postgres:
        owed = _num_changes(tx.execute)
        tx.execute(f"PRAGMA user_version = {owed + 1 + owed % 2}")


def needs_vacuum(tx: Tx) -> bool:
    """Return whether free pages of the SQLite file may still contain erased text."""
    return not tx.is_postgres and _num_changes(tx.execute) % 2 == 1


def _num_changes(execute: Callable[[str], Any]) -> int:
    return int(execute("PRAGMA user_version").fetchone()[0])


def vacuum(database: Database) -> str:
    """Vacuum the SQLite file if something was erased, and truncate its write-ahead log. Return why that must wait.

    SQLite zeroes freed texts, but not the copies that stay in pages when rows move to other pages.
    """
    if database.engine.dialect.name != "sqlite":
        return ""
    with database.engine.connect() as conn:
        cursor = conn.connection.cursor()
        (before,) = cursor.execute("PRAGMA busy_timeout").fetchone()
        cursor.execute(f"PRAGMA busy_timeout = {int(_TIMEOUT_S * 1000)}")
        try:
            return _rewrite_file(cursor, Path(database.where))
        except database.engine.dialect.loaded_dbapi.DatabaseError as error:  # busy, no room, or damaged
            return str(error)
        finally:
            if conn.connection.in_transaction:
                cursor.execute("ROLLBACK")
            cursor.execute(f"PRAGMA busy_timeout = {int(before)}")
            cursor.close()


def _rewrite_file(cursor: Any, path: Path) -> str:
    if not _cut_log(cursor):
        return "somebody reads it"  # and would keep the old pages; so not at the price of a rewrite
    owed = _num_changes(cursor.execute)
    if owed % 2 == 0:
        return ""
    size = path.stat().st_size
    if size > _REWRITTEN_BYTES:
        return f"it has {size / 1024**3:.1f} GiB, and others could not write for too long"
    if min(shutil.disk_usage(place).free for place in (path.resolve().parent, tempfile.gettempdir())) < 2 * size:
        return f"there is less than {2 * size / 1024**2:.0f} MiB of free disk"
    cursor.execute("VACUUM")
    if not _cut_log(cursor):
        return "somebody reads it"
    cursor.execute("BEGIN IMMEDIATE")
    if _num_changes(cursor.execute) == owed:  # else more was forgotten meanwhile
        cursor.execute(f"PRAGMA user_version = {owed + 1}")
    cursor.execute("COMMIT")
    _cut_log(cursor)
    return ""


def _cut_log(cursor: Any) -> bool:
    """Bring the write-ahead log into the file; False: somebody reads or writes at this moment."""
    return not cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
