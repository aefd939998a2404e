"""`client.curriculum`: let a teacher answer the worst again; see what is due, why it waits, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tunesmith.core.errors import Refused, TunesmithError, UsageError
from tunesmith.core.ids import new_id
from tunesmith.curriculum import due
from tunesmith.curriculum.cycle import ESTOP, EntryResult, choose, foreground_context, most_cost, run_cycle
from tunesmith.curriculum.cycle_config import CycleConfig, cycle_config, policy_of
from tunesmith.curriculum.due import CurriculumStatus, curriculum_status
from tunesmith.curriculum.queries import cycles, spends
from tunesmith.curriculum.queries.cycles import CycleRecord
from tunesmith.curriculum.rules.cycle import PURPOSE, Entry, worth
from tunesmith.experience.queries import experiences
from tunesmith.experience.review import check_reason
from tunesmith.profiles.sections.curriculum import CurriculumPolicy
from tunesmith.runs.session import Session

MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class CycleView:
    """What came of a cycle; amounts are in millionths of the currency of the prices."""

    id: str | None
    """None: a dry run, or nothing was due; it leaves nothing behind."""
    profile: str
    teacher: str
    outcomes: tuple[EntryResult, ...]
    """Of a dry run: what would be asked, with the most it may cost."""
    counts: dict[str, int]
    ended: str
    """Why it ended where it did; empty: there was nothing more to ask."""


@dataclass(frozen=True)
class DueView:
    """An entry that the next cycle would ask about."""

    experience_id: str
    student: float
    num_attempts: int


@dataclass(frozen=True)
class CurriculumView:
    """Where the curriculum of a profile stands; amounts are in millionths."""

    profile: str
    enabled: bool
    """Whether cycles begin by themselves; `waits_for` says why not."""
    teacher: str | None
    problem: str | None
    """Why no cycle can run at all, as things are; None: one could."""
    waits_for: list[str]
    """What keeps a cycle from beginning by itself; empty: the next worker opens one."""
    num_due: int
    due: list[DueView]
    others: dict[str, int]
    """Why other entries wait, with how many of each."""
    window: str
    per_cycle: int
    per_month: int
    spent_month: int
    left_month: int
    last_began_at: datetime | None
    last_ended_at: datetime | None
    last_summary: str


class Curriculum:
    def __init__(self, session: Session) -> None:
        self._session = session

    def run(
        self,
        profile: str,
        *,
        max_entries: int | None = None,
        dry_run: bool = False,
        now: bool = False,
        on_outcome: Callable[[int, int, EntryResult], None] | None = None,
    ) -> CycleView:
        """Run a cycle here. `now`: also outside its window, before its cooldown is over, with few entries.

        The e-stop and the budget hold all the same.
        """
        session, database = self._session, self._session.database
        if max_entries is not None and not 1 <= max_entries <= MAX_ENTRIES:
            raise UsageError(f"max_entries is {max_entries}; use a number from 1 to {MAX_ENTRIES}")
        config = cycle_config(
            database,
            session.workspace,
            profile,
            actor=session.actor,
            environ=session.environ,
            check=session.check_profile,
        )
        self._refuse(config, now=now or dry_run)
        chosen = choose(database, config, max_entries or config.policy.max_entries)
        if dry_run:
            return self._rehearse(config, chosen)
        if not chosen:
            return CycleView(None, profile, config.teacher_name, (), {}, "no entry is due")
        cycle_id = new_id("cyc")
        with database.write() as tx:
            cycles.begin(tx, profile, cycle_id, actor=session.actor)
        end = run_cycle(config, cycle_id, chosen, foreground_context(database, session.actor, on_outcome))
        return CycleView(cycle_id, profile, config.teacher_name, end.outcomes, end.counts, end.why)

    def show(self, profile: str) -> CurriculumView:
        """What is due, why it waits, what is spent and left."""
        session, database = self._session, self._session.database
        policy, off = policy_of(database, session.workspace, profile, session.environ)
        with database.read() as tx:
            found = curriculum_status(tx, profile, policy, off)
        return _view(profile, policy, found, self._problem(profile), is_on=off is None)

    def retry(self, experience_id: str, *, reason: str) -> str:
        """Reset an entry that was given up or waits, so that teachers are asked again. Return its id."""
        said = check_reason(reason)
        with self._session.database.write() as tx:
            found = experiences.find(tx, experience_id)
            due.retry(tx, found.id, actor=self._session.actor, reason=said)
        return found.id

    def again(self, experience_id: str, *, reason: str) -> str:
        """The former name of `retry`."""
        return self.retry(experience_id, reason=reason)

    def _problem(self, profile: str) -> str | None:
        session = self._session
        try:
            cycle_config(
                session.database,
                session.workspace,
                profile,
                actor=session.actor,
                environ=session.environ,
                check=session.check_profile,
            )
        except TunesmithError as error:
            return str(error)
        return None

    def _refuse(self, config: CycleConfig, *, now: bool) -> None:
        with self._session.database.read() as tx:
            found = curriculum_status(tx, config.profile, config.policy, config.why_off)
        if ESTOP in found.waits_for:
            raise Refused("the e-stop is on: nothing is asked; turn it off with `tunesmith estop off`")
        if found.waits_for and not now:
            why = "; ".join(found.waits_for)
            raise Refused(f"no cycle of {config.profile} is due: {why}. Run it all the same with --now")

    def _rehearse(self, config: CycleConfig, chosen: list[Entry]) -> CycleView:
        """What would be asked, and the most it may cost; nobody is asked and nothing is stored."""
        limits, outcomes, total = config.policy.limits, [], 0
        with self._session.database.read() as tx:
            left = limits.per_month - spends.spent(tx, config.profile, PURPOSE, None).month
            for entry in chosen:
                most = most_cost(config, experiences.get(tx, entry.id))
                total += most
                fits = total <= min(limits.per_cycle, left)
                reason = "" if fits else "the budget may not reach that far"
                outcomes.append(EntryResult(entry.id, worth(entry.findings), None, "would ask", reason, most))
        counts = {"would ask": len(outcomes), "most": total}
        return CycleView(None, config.profile, config.teacher_name, tuple(outcomes), counts, "")


def _view(
    profile: str, policy: CurriculumPolicy, found: CurriculumStatus, problem: str | None, *, is_on: bool
) -> CurriculumView:
    last: CycleRecord | None = found.last
    limits = policy.limits
    return CurriculumView(
        profile=profile,
        enabled=is_on,
        teacher=policy.teacher.name,
        problem=problem,
        waits_for=found.waits_for,
        num_due=found.num_due,
        due=[DueView(entry.id, worth(entry.findings), entry.num_attempts) for entry in found.due],
        others=found.others,
        window=policy.window,
        per_cycle=limits.per_cycle,
        per_month=limits.per_month,
        spent_month=found.spent_month,
        left_month=max(0, limits.per_month - found.spent_month),
        last_began_at=None if last is None else last.began_at,
        last_ended_at=None if last is None else last.ended_at,
        last_summary="" if last is None else last.summary,
    )
