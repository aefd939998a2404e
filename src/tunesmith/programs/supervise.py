"""Run one program to its end: pass on requests, notice progress, enforce limits from outside, judge nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tunesmith.core.errors import ProgramError
from tunesmith.programs.launch import RunningProgram, launch
from tunesmith.programs.progress import Advance
from tunesmith.programs.protocol import Ack, Event, LiveCheckFailure, Metrics
from tunesmith.programs.stage import StageContext
from tunesmith.runs.queries import requests, switches, tasks
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.task import STOPPED_BY_ESTOP, ErrorClass
from tunesmith.runs.spec import EvaluateSpec, TrainSpec
from tunesmith.store.database import Tx

_POLL_INTERVAL_S = 0.05
_STACKS_S = 0.2  # for a hanging program to write its stacks, before it is ended
_ASK_S = 0.5
_BUDGET_MARGIN_S = 30.0

LiveCheck = Callable[[Metrics], LiveCheckFailure | None]


@dataclass
class ProgramEnd:
    """Why and how the program ended, before anybody looked at its result."""

    exit_code: int = 0
    killed_for: ErrorClass | None = None
    why: str = ""
    finding: LiveCheckFailure | None = None
    decided_by: RequestKind | None = None
    interrupted: str | None = None
    """Asked to checkpoint and end: TERM of the worker, or e-stop."""


class Supervisor:
    """Watches one program of a worker: passes on requests and the e-stop, enforces the limits."""

    def __init__(
        self,
        context: StageContext,
        on_event: Callable[[Event], None] = lambda event: None,
        wall_s: float | None = None,
        live_check: LiveCheck = lambda metrics: None,
    ) -> None:
        self.context = context
        self.on_event = on_event
        self.wall_s = wall_s
        self.live_check = live_check
        self.end = ProgramEnd()
        self.advance = Advance()
        self.started = time.monotonic()
        self.asked = 0.0
        self.passed_on: set[str] = set()
        self.kill_at: float | None = None

    def run(
        self, argv: Sequence[str], spec: TrainSpec | EvaluateSpec, env: Mapping[str, str] | None = None
    ) -> ProgramEnd:
        context = self.context
        program = launch(argv, spec, context.attempt_dir, env=env)
        context.pulse.program = program
        try:
            process = program.identity.to_json()
            context.write(lambda tx: tasks.note_process(tx, context.claim.lease, process))
            self.end.exit_code = self._follow(program)
            context.pulse.raise_if_lost()
            return self.end
        finally:
            context.pulse.program = None
            program.kill_tree(0.0)

    def _follow(self, program: RunningProgram) -> int:
        try:
            code = follow(program, lambda event: self._take(program, event), lambda: self._look(program))
        except ProgramError as error:  # nothing else that it says counts
            self._kill(program, ErrorClass.PROTOCOL, str(error))
            code = program.poll()
        assert code is not None
        return code

    def _look(self, program: RunningProgram) -> None:
        self.context.pulse.raise_if_lost()
        now = time.monotonic()
        if now - self.asked >= _ASK_S:
            self.asked = now
            self._pass_on_requests(program)
        if self.context.pulse.stopping.is_set() and self.end.interrupted is None:
            self._interrupt(program, "the worker was told to end")
        self._enforce_limits(program, now)

    def _take(self, program: RunningProgram, event: Event) -> None:
        if self.advance.takes(event):
            self.context.pulse.progress()
        match event:
            case Metrics() if self.end.finding is None and (finding := self.live_check(event)) is not None:
                self.end.finding = finding
                program.kill_tree(self.context.settings.worker.grace_s)
            case Ack(request_id=request_id, detail=detail):
                self.context.write(lambda tx: self._acknowledge(tx, request_id, detail or "done"))
            case _:
                pass
        self.on_event(event)

    def _acknowledge(self, tx: Tx, request_id: str, answer: str) -> None:
        """Only checkpoint requests. Others are acknowledged when they are fulfilled, as the attempt is settled:
        a program that acknowledged and then died has not done what was asked."""
        tasks.require_lease(tx, self.context.claim.lease)
        for request in requests.unanswered(tx, self.context.run_id):
            if request.id == request_id and request.kind is RequestKind.CHECKPOINT:
                requests.acknowledge(tx, request_id, actor=self.context.worker_id, answer=answer)

    def _pass_on_requests(self, program: RunningProgram) -> None:
        """Requests and the e-stop, from the database to the program."""
        run_id = self.context.run_id
        unanswered, estop = self.context.read(
            lambda tx: (requests.unanswered(tx, run_id), switches.is_on(tx, switches.ESTOP))
        )
        decisive = strongest([request.kind for request in unanswered])
        if decisive is RequestKind.CANCEL:
            self.end.decided_by = RequestKind.CANCEL
            program.kill_tree(self.context.settings.worker.grace_s)
            return
        if decisive is not None:
            self.end.decided_by = decisive
        for request in unanswered:
            if request.id not in self.passed_on and request.kind in (decisive, RequestKind.CHECKPOINT):
                self.passed_on.add(request.id)
                program.send(request.id, request.kind)
        if estop and self.context.claim.task.kind in STOPPED_BY_ESTOP and self.end.interrupted is None:
            self._interrupt(program, "e-stop")

    def _interrupt(self, program: RunningProgram, why: str) -> None:
        self.end.interrupted = why
        self.kill_at = time.monotonic() + max(self.context.settings.worker.grace_s, 0.0)
        program.terminate()

    def _enforce_limits(self, program: RunningProgram, now: float) -> None:
        deadline = self.context.settings.worker.phase_deadlines_s[self.advance.phase]
        if self.wall_s is not None and now - self.started > self.wall_s + _BUDGET_MARGIN_S:
            self._kill(program, ErrorClass.BUDGET, f"still running {_BUDGET_MARGIN_S:.0f} s after its time budget")
        elif self.advance.idle_s > deadline:
            program.dump_stacks()
            time.sleep(_STACKS_S)
            self._kill(program, ErrorClass.STALLED, f"no progress for {deadline:g} s in phase {self.advance.phase}")
        elif self.kill_at is not None and now > self.kill_at:
            self.kill_at = None
            program.kill_tree(0.0)

    def _kill(self, program: RunningProgram, error: ErrorClass, why: str) -> None:
        self.end.killed_for, self.end.why = error, why
        # who broke the protocol has nothing more to say, and may be flooding the disk
        program.kill_tree(0.0 if error is ErrorClass.PROTOCOL else self.context.settings.worker.grace_s)


def follow(
    program: RunningProgram,
    on_event: Callable[[Event], None],
    look: Callable[[], None],
    *,
    until: Callable[[], bool] = lambda: False,
    look_s: float = _POLL_INTERVAL_S,
) -> int | None:
    """Follow a program until it has ended, or until `until`; its exit code, None if it still runs.

    Each turn takes in all that it said, then `look` renews, asks and enforces: it may kill the program, or raise.
    A broken protocol raises ProgramError. Keeping the program alive is up to the caller, and so is ending it.
    """
    while True:
        code = program.poll()  # before reading: what an ended program wrote is all there
        while events := program.events():  # a flood comes in portions
            for event in events:
                on_event(event)
        if until() or code is not None:
            return code
        look()
        time.sleep(look_s)
