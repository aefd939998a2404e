"""Curriculum: the worst answers are given again by a teacher, and only what proves better is kept.

For each entry: reserve the most it may cost, ask with the very messages the student saw, settle with what it did cost,
judge with the student's own verifiers, store what came of it. Money and outcome are one transaction; between the two
transactions there is only the call, so whoever dies in it leaves a reservation that counts as spent, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from tunesmith.core.errors import ConfigError, Conflict, NotFound, Refused
from tunesmith.core.ids import new_id, new_token
from tunesmith.core.staging import staging_for
from tunesmith.curriculum.cycle_config import CycleConfig, cycle_config
from tunesmith.curriculum.queries import corrections, cycles, spends
from tunesmith.curriculum.queries.corrections import Correction
from tunesmith.curriculum.queries.spends import Charge, OverBudget
from tunesmith.curriculum.rules.correction import ComparedAnswers, Reply, decide, unusable
from tunesmith.curriculum.rules.cycle import (
    GIVEN_UP,
    PURPOSE,
    Entry,
    cost_of,
    in_window,
    money,
    most_tokens,
    not_due,
    worst,
    worth,
)
from tunesmith.curriculum.teachers.endpoint import TeacherFailed, Wait, ask
from tunesmith.curriculum.teachers.local import LocalTeacher, ProgramHandle, Prompt, TeacherCancelled
from tunesmith.experience.capture import suspicions_in
from tunesmith.experience.queries import experiences
from tunesmith.experience.queries.experiences import Experience
from tunesmith.experience.rules.experience import CorrectionState, ExperienceState
from tunesmith.profiles.checks import ProfileCheck
from tunesmith.programs.device.take import LOCAL_TEACHER, take_device
from tunesmith.programs.launch import RunningProgram
from tunesmith.programs.stage import StageContext, StageEnd
from tunesmith.runs.queries import switches, tasks
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AttemptRef
from tunesmith.store import events
from tunesmith.store.database import Database, Tx
from tunesmith.verifiers.base import Finding, Interaction
from tunesmith.verifiers.registry import verify

T = TypeVar("T")
Ask = Callable[[str, Sequence[Mapping[str, Any]]], Reply]
"""The teacher's answer about an entry, whose prompt is this; raises TeacherFailed, or Abandoned."""
_FAILURES_IN_A_ROW = 2  # each after several tries: the teacher is down, and no entry is worth asking about now
_FOREGROUND_LEASE_S = 600.0  # a person may stop the command for a while
ABANDONED_AFTER = timedelta(hours=1)
"""No call takes that long: whoever holds such a reservation is gone."""
ESTOP, TOLD_TO_END, WINDOW_OVER = "the e-stop is on", "the worker was told to end", "its window is over"


@dataclass(frozen=True)
class EntryResult:
    """The result of asking the teacher about one entry."""

    experience_id: str
    student: float
    """Of the student's answer, by its worst verifier."""
    teacher: float | None
    """Of the teacher's; None: there was none worth a look."""
    decision: str
    """accepted, refused, failed; or skipped: somebody else moved it first."""
    reason: str
    cost: int
    """In millionths."""


@dataclass(frozen=True)
class CycleEnd:
    id: str
    outcomes: tuple[EntryResult, ...]
    why: str
    """Why it ended where it did; empty: there was nothing more to ask."""

    @property
    def counts(self) -> dict[str, int]:
        decided = [outcome.decision for outcome in self.outcomes]
        found = {name: decided.count(name) for name in ("accepted", "refused", "failed", "skipped")}
        return {**found, "spent": sum(outcome.cost for outcome in self.outcomes)}

    @property
    def summary(self) -> str:
        counts = self.counts
        parts = [f"{counts[name]} {name}" for name in ("accepted", "refused", "failed", "skipped") if counts[name]]
        told = [", ".join(parts) or "nothing asked", f"spent {money(counts['spent'])}", self.why]
        return "; ".join(filter(None, told))


@dataclass(frozen=True)
class CycleContext:
    """Database access and stop checks of a cycle: a worker's under its lease, or a person's in the foreground."""

    actor: str
    write: Callable[[Callable[[Tx], Any]], Any]
    read: Callable[[Callable[[Tx], Any]], Any]
    why_stop: Callable[[], str | None]
    """Called between two entries; returns why the cycle must stop, or None."""
    wait: Wait | None = None
    handle: ProgramHandle | None = None
    """The handle of the teacher's program, for a local teacher."""
    on_outcome: Callable[[int, int, EntryResult], None] = field(default=lambda done, total, outcome: None)


def curriculum(context: StageContext, check: ProfileCheck) -> StageEnd:
    """One cycle as a task; what an earlier attempt of the task has asked and paid counts."""
    task, actor = context.claim.task, context.worker_id
    assert task.profile is not None, task.id
    try:
        config = cycle_config(context.database, context.workspace, task.profile, actor=actor, environ=None, check=check)
    except (ConfigError, NotFound, Refused) as error:
        end = CycleEnd(task.id, (), str(error))
        context.write(lambda tx: _tell_end(tx, task.profile or "", end, actor))
        return StageEnd.failed(ErrorClass.CONFIG, str(error))
    held = None if config.folder is None else take_device(context, LOCAL_TEACHER)
    if held is not None:
        return StageEnd.device_busy(held)
    cycle = _worker_context(context, config)
    num = config.policy.max_entries - context.read(lambda tx: spends.num_in_cycle(tx, task.id))
    end = run_cycle(config, task.id, choose(context.database, config, max(0, num)), cycle)
    if end.why in (ESTOP, TOLD_TO_END):
        return StageEnd(AttemptState.INTERRUPTED, error=end.why, result=dict(end.counts))
    return StageEnd(AttemptState.SUCCEEDED, result={**end.counts, "summary": end.summary})


def _worker_context(context: StageContext, config: CycleConfig) -> CycleContext:
    """Return the context of a worker; every write checks the lease."""

    def write(action: Callable[[Tx], T]) -> T:
        def guarded(tx: Tx) -> T:
            tasks.require_lease(tx, context.claim.lease)
            return action(tx)

        return context.write(guarded)

    def why_stop() -> str | None:
        context.pulse.raise_if_lost()
        context.pulse.progress()
        if context.pulse.stopping.is_set():
            return TOLD_TO_END
        is_stopped, now = context.read(lambda tx: (switches.is_on(tx, switches.ESTOP), tx.now))
        if is_stopped:
            return ESTOP
        return None if in_window(config.policy.window, now) else WINDOW_OVER

    def hold(program: RunningProgram | None) -> None:
        context.pulse.program = program  # the heartbeat keeps it alive as long as the lease is ours
        if program is not None:
            process = program.identity.to_json()
            context.write(lambda tx: tasks.note_process(tx, context.claim.lease, process))

    passed = context.settings.worker.pass_environment
    handle = ProgramHandle(context.attempt_ref, why_stop, hold, lambda program: None, passed)
    return CycleContext(context.worker_id, write, context.read, why_stop, context.pulse.stopping.wait, handle)


def foreground_context(
    database: Database, actor: str, on_outcome: Callable[[int, int, EntryResult], None] | None = None
) -> CycleContext:
    """Return the context of a person who runs the cycle in the foreground."""

    def write(action: Callable[[Tx], T]) -> T:
        with database.write() as tx:
            return action(tx)

    def read(action: Callable[[Tx], T]) -> T:
        with database.read() as tx:
            return action(tx)

    def why_stop() -> str | None:
        return ESTOP if read(lambda tx: switches.is_on(tx, switches.ESTOP)) else None

    ours = AttemptRef(
        task_id="none", attempt_id=new_id("att"), number=1, token=new_token(), lease_s=_FOREGROUND_LEASE_S
    )
    handle = ProgramHandle(ours, why_stop, lambda program: None, RunningProgram.keepalive)
    context = CycleContext(actor, write, read, why_stop, handle=handle)
    return context if on_outcome is None else replace(context, on_outcome=on_outcome)


def choose(database: Database, config: CycleConfig, num: int) -> list[Entry]:
    """The worst entries that are due now."""
    with database.read() as tx:
        return worst(corrections.entries(tx, config.profile), config.policy, tx.now, num)


def most_cost(config: CycleConfig, experience: Experience) -> int:
    """The most that asking about it may cost."""
    return cost_of(most_tokens(experience.messages[:-1]), config.teacher.max_tokens, config.teacher)


def run_cycle(config: CycleConfig, cycle_id: str, chosen: list[Entry], context: CycleContext) -> CycleEnd:
    """Ask about one entry after the other, and tell what came of it."""
    with _asking(config, cycle_id, chosen, context) as ask_teacher:
        end = _ask_all(config, cycle_id, chosen, context, ask_teacher)
    if end.why not in (ESTOP, TOLD_TO_END):  # those go on later
        context.write(lambda tx: _tell_end(tx, config.profile, end, context.actor))
    return end


@contextmanager
def _asking(config: CycleConfig, cycle_id: str, chosen: list[Entry], context: CycleContext) -> Iterator[Ask]:
    """How the teacher is asked: over the wire, or by a program of ours that ends with the cycle."""
    if config.folder is None or context.handle is None:
        yield lambda entry_id, prompt: ask(config.teacher, prompt, config.key, context.wait)
        return
    with staging_for(config.work_dir / cycle_id) as directory:
        local = LocalTeacher(config.teacher, config.folder, directory, context.handle)

        def ask_local(entry_id: str, prompt: Sequence[Mapping[str, Any]]) -> Reply:
            if not local.is_started:  # now, because everything before may have been moved by others
                local.start(_prompts(chosen, context), seed=cycle_id)
            return local.ask(entry_id)

        try:
            yield ask_local
        finally:
            local.close()


def _prompts(chosen: list[Entry], context: CycleContext) -> Iterator[Prompt]:
    """What will be asked about these entries, in their order."""
    for entry in chosen:
        experience: Experience = context.read(partial(experiences.get, experience_id=entry.id))
        if _refused_unasked(experience) is None:
            yield entry.id, experience.messages[:-1]


def _refused_unasked(experience: Experience) -> str | None:
    """Why no teacher is asked about it at all."""
    if experience.state is ExperienceState.FORGOTTEN:
        return "it was forgotten meanwhile"
    if experience.messages[-1].get("tool_calls"):
        return "the student called a function: no text replaces that"
    return None


def _ask_all(
    config: CycleConfig, cycle_id: str, chosen: list[Entry], context: CycleContext, ask_teacher: Ask
) -> CycleEnd:
    outcomes: list[EntryResult] = []
    why, num_failures = "", 0
    for entry in chosen:
        why = context.why_stop() or ""
        if why:
            break
        try:
            outcome, is_down, why = _Asked(config, cycle_id, entry, context).settle(ask_teacher)
        except OverBudget as error:
            why = f"out of money: {error}"
            break
        outcomes.append(outcome)
        context.on_outcome(len(outcomes), len(chosen), outcome)
        num_failures = num_failures + 1 if is_down else 0
        if num_failures >= _FAILURES_IN_A_ROW:
            why = f"the teacher is down: {outcome.reason}"
        if why:
            break
    return CycleEnd(cycle_id, tuple(outcomes), why)


def _tell_end(tx: Tx, profile: str, end: CycleEnd, actor: str) -> None:
    cycles.end(tx, profile, end.id, actor=actor, summary=end.summary, counts=end.counts)


class _Asked:
    """One entry, from the reservation to what came of it."""

    def __init__(self, config: CycleConfig, cycle_id: str, entry: Entry, context: CycleContext) -> None:
        self.config, self.cycle_id, self.entry, self.context = config, cycle_id, entry, context
        self.experience: Experience = context.read(lambda tx: experiences.get(tx, entry.id))
        self.most = most_cost(config, self.experience)

    def settle(self, ask_teacher: Ask) -> tuple[EntryResult, bool, str]:
        """The outcome; whether the teacher is to blame for having none; and why the cycle must not go on, if so."""
        refused = _refused_unasked(self.experience)
        if refused is not None:
            correction = self._correction(CorrectionState.REFUSED, refused)
            return self.context.write(lambda tx: self._store(tx, None, 0, correction)), False, ""
        try:
            spend_id = self.context.write(self._reserve)
        except Conflict as error:
            return self._outcome("skipped", str(error), 0), False, ""
        prompt = self.experience.messages[:-1]
        try:
            reply = ask_teacher(self.entry.id, prompt)
        except TeacherCancelled as told:  # nobody knows of an answer, so the entry is as if it had not been chosen
            self.context.write(lambda tx: spends.settle(tx, spend_id, 0))
            return self._outcome("skipped", str(told), 0), False, str(told)
        except TeacherFailed as failed:
            correction = self._correction(CorrectionState.FAILED, failed.reason, counts=failed.is_about_prompt)
            cost = None if failed.may_be_billed else 0
            outcome = self.context.write(lambda tx: self._store(tx, spend_id, cost, correction))
            return outcome, not failed.is_about_prompt, ""
        correction = self._judge(reply)
        cost = self._cost(reply)
        outcome = self.context.write(lambda tx: self._store(tx, spend_id, cost, correction))
        billed_more = f"the teacher counted more tokens than it was asked for ({money(outcome.cost)})"
        return outcome, False, billed_more if outcome.cost > self.most else ""

    def _reserve(self, tx: Tx) -> str:
        """Set the money aside, if the entry is still as it was when it was chosen."""
        experiences.lock(tx, self.entry.id)
        entry = corrections.entry(tx, self.config.profile, self.entry.id)
        moved = entry is None or entry.num_attempts != self.entry.num_attempts
        if entry is None or moved or not_due(entry, self.config.policy, tx.now) is not None:
            raise Conflict("somebody else moved it first")
        charge = Charge(self.config.profile, PURPOSE, self.cycle_id, self.entry.id, self.most)
        return spends.reserve(tx, charge, self.config.policy.limits)

    def _judge(self, reply: Reply) -> Correction:
        """The same verifiers on both answers, the screens on the teacher's."""
        wanted, reference = self.config.rules.policy.wanted, self.experience.reference
        student = Interaction(self.experience.messages, reference)
        problem = unusable(reply, student)
        if problem is not None:
            return self._correction(CorrectionState.REFUSED, problem)
        answer = {"role": "assistant", "content": reply.text}
        suspicions = suspicions_in([answer], self.config.rules)
        findings = verify(Interaction([*self.experience.messages[:-1], answer], reference), wanted)
        said = decide(ComparedAnswers(verify(student, wanted), findings, suspicions), self.config.policy.min_score)
        if suspicions:  # the text may hold what nobody should keep
            return self._correction(CorrectionState.REFUSED, said.reason)
        state = CorrectionState.ACCEPTED if said.is_accepted else CorrectionState.REFUSED
        return self._correction(state, said.reason, reply.text, findings)

    def _store(self, tx: Tx, spend_id: str | None, cost: int | None, said: Correction) -> EntryResult:
        """Settle the money, if there was a call, and store the attempt; what was forgotten gets no new text."""
        experience = experiences.lock(tx, self.entry.id)  # first: whoever reserves for it takes the same order
        paid = 0 if spend_id is None else spends.settle(tx, spend_id, cost)
        if experience.state is ExperienceState.FORGOTTEN:
            return self._outcome("skipped", "it was forgotten meanwhile", paid)
        if corrections.entry(tx, self.config.profile, experience.id) is None:
            said = self._correction(CorrectionState.FAILED, "it was corrected or moved meanwhile", counts=False)
        corrections.add(tx, experience.id, self.config.profile, said, actor=self.context.actor, paid_by=spend_id)
        now = corrections.entry(tx, self.config.profile, experience.id)
        if now is not None and not_due(now, self.config.policy, tx.now) == GIVEN_UP:
            reason = f"{now.num_counted} answers of teachers were refused; {GIVEN_UP}"
            events.record(tx, "experience", experience.id, "given_up", actor=self.context.actor, reason=reason)
        return self._outcome(said.state, said.reason, paid, worth(said.findings) if said.findings else None)

    def _cost(self, reply: Reply) -> int | None:
        if reply.num_in is None or reply.num_out is None:
            return None
        return cost_of(reply.num_in, reply.num_out, self.config.teacher)

    def _correction(
        self,
        state: CorrectionState,
        reason: str,
        answer: str | None = None,
        findings: dict[str, Finding] | None = None,
        counts: bool = True,
    ) -> Correction:
        return Correction(self.config.teacher_name, state, reason, answer, findings or {}, counts)

    def _outcome(self, decision: str, reason: str, cost: int, teacher: float | None = None) -> EntryResult:
        return EntryResult(self.entry.id, worth(self.entry.findings), teacher, str(decision), reason, cost)
