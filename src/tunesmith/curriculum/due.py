"""Decides when a curriculum cycle is due: the status that people see, and the tasks that workers open."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

from tunesmith.core import logs
from tunesmith.core.errors import NotFound, Refused, TunesmithError
from tunesmith.curriculum.cycle_config import policy_of
from tunesmith.curriculum.queries import corrections, cycles, spends
from tunesmith.curriculum.queries.cycles import CycleRecord
from tunesmith.curriculum.rules.cycle import PURPOSE, CycleInputs, Entry, not_due, waits_for, worst
from tunesmith.experience.queries import experiences, reviews
from tunesmith.experience.rules.experience import ReviewDecision
from tunesmith.profiles.sections.curriculum import CurriculumPolicy
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import switches, tasks
from tunesmith.runs.rules.run import Priority
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store.database import Database, Tx

log = logs.logger("curriculum")


@dataclass(frozen=True)
class CurriculumStatus:
    """The state of a profile's curriculum: entries due, spending, the last cycle."""

    waits_for: list[str]
    """Why no cycle starts now; empty: the next worker opens one."""
    due: list[Entry]
    """The worst, as many as one cycle would ask about."""
    num_due: int
    others: dict[str, int]
    """Why other entries wait, with how many of each."""
    spent_month: int
    last: CycleRecord | None


def curriculum_status(tx: Tx, profile: str, policy: CurriculumPolicy, why_off: str | None) -> CurriculumStatus:
    """Return the status; reads every entry that needs improvement."""
    entries = list(corrections.entries(tx, profile))
    others = Counter(why for entry in entries if (why := not_due(entry, policy, tx.now)) is not None)
    num_due = len(entries) - others.total()
    moment = _cycle_inputs(tx, profile, num_due, why_off)
    return CurriculumStatus(
        waits_for=waits_for(policy, moment),
        due=worst(entries, policy, tx.now, policy.max_entries),
        num_due=num_due,
        others=dict(others.most_common()),
        spent_month=moment.month,
        last=cycles.last(tx, profile),
    )


def retry(tx: Tx, experience_id: str, *, actor: str, reason: str) -> None:
    """Reset attempts and backoff of an entry, so that a teacher is asked again."""
    experience = experiences.lock(tx, experience_id)
    entry = corrections.entry(tx, experience.profile, experience_id)
    if entry is None:
        raise Refused(
            f"no teacher is asked about experience {experience_id}: only what needs improvement, is not reserved or "
            "learnt, waits for no review and has no correction; see `experience show`"
        )
    if not entry.num_attempts:
        raise Refused(f"no teacher has tried experience {experience_id} yet; there is nothing to start anew")
    reviews.add(tx, experience_id, ReviewDecision.ACCEPT, reviewer=actor, reason=reason)


def open_due(database: Database, workspace: Workspace, *, actor: str) -> list[str]:
    """Open a task for every profile whose cycle is due; their ids. A profile that cannot be read hides no other."""
    with database.read() as tx:
        names = reviews.profiles_known(tx)
    opened = []
    for name in names:
        try:
            policy, off = policy_of(database, workspace, name, None)
        except NotFound:
            continue  # its file was removed, and its experiences stay
        except TunesmithError as error:
            log.warning("curriculum_unreadable", profile=name, reason=str(error))
            continue
        if off is None and _looks_due(database, name, policy):
            with database.write() as tx:
                opened += _open(tx, name, policy, actor)
    return opened


def _looks_due(database: Database, profile: str, policy: CurriculumPolicy) -> bool:
    """A look that keeps nobody from writing, because nearly always there is nothing to open."""
    with database.read() as tx:
        return _is_due(tx, profile, policy)


def _open(tx: Tx, profile: str, policy: CurriculumPolicy, actor: str) -> list[str]:
    """At most one: whoever comes second finds it open."""
    cycles.lock_profile(tx, profile)
    if not _is_due(tx, profile, policy):
        return []
    task_id = tasks.add(tx, TaskKind.CURRICULUM, actor=actor, profile=profile, priority=Priority.LOW.rank)
    cycles.begin(tx, profile, task_id, actor=actor)
    return [task_id]


def _is_due(tx: Tx, profile: str, policy: CurriculumPolicy) -> bool:
    """Of a curriculum that is on. Entries are counted last, and no further than needed."""
    if waits_for(policy, _cycle_inputs(tx, profile, policy.min_entries, None)):
        return False
    due = (entry for entry in corrections.entries(tx, profile) if not_due(entry, policy, tx.now) is None)
    return sum(1 for _ in islice(due, policy.min_entries)) == policy.min_entries


def _cycle_inputs(tx: Tx, profile: str, num_due: int, why_off: str | None) -> CycleInputs:
    last = cycles.last(tx, profile)
    return CycleInputs(
        now=tx.now,
        last_began_at=None if last is None else last.began_at,
        num_due=num_due,
        month=spends.spent(tx, profile, PURPOSE, None).month,
        is_stopped=switches.is_on(tx, switches.ESTOP),
        is_open=cycles.is_open(tx, profile),
        why_off=why_off,
    )
