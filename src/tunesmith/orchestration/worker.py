"""A worker: claim a task, keep its lease while it makes progress, run its stage, settle; reap what others left.

One task at a time per process; more workers are more processes. TERM: stop claiming, let the program checkpoint,
give the task back. A second TERM: now.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import TypeVar

from tunesmith.core import logs
from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import LeaseLost, StoreCorrupt, StoreError, TunesmithError
from tunesmith.core.files import private_files
from tunesmith.core.ids import new_id
from tunesmith.curriculum.cycle import ABANDONED_AFTER, curriculum
from tunesmith.curriculum.cycle_config import remove_left_behind
from tunesmith.curriculum.due import open_due
from tunesmith.curriculum.queries import spends
from tunesmith.datasets.prepare import remove_unrecorded
from tunesmith.deployment.deploy import deploy
from tunesmith.deployment.reconcile import check_targets, reconcile_task
from tunesmith.deployment.watch import watch
from tunesmith.evaluation.evaluate import evaluate
from tunesmith.experience.forgetting import forget
from tunesmith.experience.queries import members
from tunesmith.orchestration import control, disk_space, lifecycle
from tunesmith.orchestration.check import check_now
from tunesmith.orchestration.rounds.scheduler import Scheduler
from tunesmith.profiles.settings import Settings, WorkerSettings
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.process_identity import ProcessIdentity, identify, kill_orphans
from tunesmith.programs.stage import Pulse, StageContext, StageEnd
from tunesmith.runs.queries import queue, tasks, workers
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.task import NEEDS_ROOM, AttemptState, TaskKind
from tunesmith.store.database import STOP_SIGNALS, Database, Tx, patiently
from tunesmith.training.train import train

STAGES: dict[TaskKind, Callable[[StageContext], StageEnd]] = {
    TaskKind.TRAIN: train,
    TaskKind.EVALUATE: evaluate,
    TaskKind.DEPLOY: deploy,
    TaskKind.WATCH: watch,
    TaskKind.RECONCILE: reconcile_task,
    TaskKind.CURRICULUM: partial(curriculum, check=check_now),
}
"""What a worker can do. A kind without a stage is never claimed."""

_FAILED_ERASURE_SWEEPS = 100
_CYCLES_EVERY = 10  # sweeps between two looks whether a curriculum is due

R = TypeVar("R")
log = logs.logger("worker")


class Worker:
    def __init__(
        self, database: Database, workspace: Workspace, settings: Settings, kinds: Collection[TaskKind] = tuple(STAGES)
    ) -> None:
        self.id = new_id("wk")
        self.database = database
        self.workspace = workspace
        self.settings = settings
        self.kinds = frozenset(kinds) & frozenset(STAGES)
        self.stopping = threading.Event()
        self._swept = self._looked = self._erase_after = self._targets_due = self._rounds_due = 0.0
        self._scheduler = Scheduler(database, workspace, self.id, settings.worker.lease_s)
        self._unsure = False
        self._short_of: str | None = None
        self._pulse: Pulse | None = None

    @property
    def timing(self) -> WorkerSettings:
        return self.settings.worker

    def run(self, *, until_idle: bool = False) -> int:
        """Work until told to stop, or until nothing is left to do; returns how many tasks were worked on."""
        with private_files():
            return self._run(until_idle)

    def _run(self, until_idle: bool) -> int:
        done, claim = 0, None
        self._register()
        remove_unrecorded(self.database, self.workspace)
        remove_left_behind(self.workspace)
        log.info("worker_started", worker=self.id, kinds=sorted(self.kinds))
        try:
            while not self.stopping.is_set():
                claim = claim or self._patiently(self._next)
                if claim is not None:
                    done += 1
                    claim = self.work(claim)
                elif until_idle and not self._patiently(self._anything_left):
                    break
                else:
                    self.stopping.wait(self.timing.poll_s)
            if claim is not None:
                self._give_back(claim)
        finally:
            self._leave()
        log.info("worker_ended", worker=self.id, num_tasks=done)
        return done

    def install_signals(self) -> None:
        """TERM and INT end the worker in order; the second one ends it now (its program dies with it)."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.stopping.is_set():
                os._exit(128 + number)
            self.stop()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def stop(self) -> None:
        self.stopping.set()
        if self._pulse is not None:
            self._pulse.stopping.set()

    def work(self, claim: Claim) -> Claim | None:
        """One attempt, from claim to settled; returns the next claim, taken in the transaction that settled this one.

        If the lease is lost, nothing is recorded. An exception ends the attempt, not the worker.
        """
        pulse = self._pulse = Pulse()
        if self.stopping.is_set():
            pulse.stopping.set()
        context = StageContext(self.database, self.workspace, self.settings, claim, self.id, pulse)
        heart = HeartbeatThread(self.database, self.timing, claim, self.id, pulse)
        heart.start()
        where = {"worker": self.id, "task": claim.task.id, "kind": claim.task.kind, "run": claim.task.run_id}
        log.info("task_started", attempt=claim.attempt.number, **where)
        try:
            end = self._run_stage(context)
            following = self._patiently(lambda: self._settle(claim, end))
            log.info("task_ended", outcome=end.outcome, reason=end.error or "", **where)
            return following
        except LeaseLost as error:
            log.warning("lease_lost", reason=str(error), **where)
            return None
        finally:
            heart.end()
            self._pulse = None

    def _run_stage(self, context: StageContext) -> StageEnd:
        try:
            return disk_space.excused(context, STAGES[context.claim.task.kind](context))
        except (LeaseLost, StoreCorrupt):
            raise
        except Exception as error:
            if context.pulse.lost.is_set():
                raise LeaseLost(
                    "the lease ran out; the work is left as it is, for whoever holds the task now"
                ) from error
            log.exception("stage_failed", task=context.claim.task.id, run=context.claim.task.run_id)
            return disk_space.excused(context, lifecycle.end_of_error(error))

    def _settle(self, claim: Claim, end: StageEnd) -> Claim | None:
        """Record the end of an attempt; if that raises, the attempt is recorded as failed and the worker goes on."""
        try:
            with self.database.write() as tx:
                lifecycle.settle(tx, claim, end, actor=self.id)
                return None if self.stopping.is_set() or self._sweep_is_due() else self._claim(tx)
        except (LeaseLost, StoreError):
            raise
        except Exception as error:
            log.exception("settle_failed", task=claim.task.id, run=claim.task.run_id)
            with self.database.write() as tx:
                lifecycle.settle(tx, claim, lifecycle.end_of_error(error), actor=self.id)
            return None

    def _give_back(self, claim: Claim) -> None:
        """We were told to stop just after we had taken the next task."""
        end = StageEnd(AttemptState.INTERRUPTED, error="the worker was told to end")
        with self.database.write() as tx:
            lifecycle.settle(tx, claim, end, actor=self.id)

    def _next(self) -> Claim | None:
        """Sweep if it is time, then claim."""
        if self._sweep_is_due():
            self.sweep()
            self._swept = boot_seconds()
            self._open_cycles()
            self._open_rounds()
            self._look_at_targets()
        with self.database.write(durable=False) as tx:
            # after an error we cannot know whether the last claim was committed: look before taking another
            held = tasks.leased_by(tx, self.id) if self._unsure else None
            claim = held or self._claim(tx)
        self._unsure = False
        return claim

    def _claim(self, tx: Tx) -> Claim | None:
        claim = tasks.claim(tx, self.id, self._able_kinds(), self.timing.lease_s)
        if claim is not None:
            lifecycle.begin(tx, claim, actor=self.id)
        return claim

    def _able_kinds(self) -> frozenset[TaskKind]:
        """What can be begun now: on a full disk, nothing that needs room. The queue waits, it does not fail."""
        why = self.workspace.shortage(self.timing.min_free_mb)
        if why is not None and self._short_of is None:
            log.warning("no_room", reason=why, worker=self.id)
        elif why is None and self._short_of is not None:
            log.info("room_again", worker=self.id)
        self._short_of = why
        return self.kinds if why is None else self.kinds - NEEDS_ROOM

    def _sweep_is_due(self) -> bool:
        return boot_seconds() - self._swept >= self.timing.sweep_s

    def sweep(self) -> None:
        """Say that we are alive; take over what dead workers held, end their programs; expire old holds."""
        with self.database.write() as tx:
            workers.heartbeat(tx, self.id, self._alive_s)
            workers.remove_expired(tx)
            expired = tasks.expired(tx)
            for claim in expired:
                lifecycle.settle_lost(tx, claim, actor=self.id)
            control.expire_held(tx, actor=self.id)
            spends.settle_abandoned(tx, ABANDONED_AFTER, actor=self.id)
            members.release_unused(tx, actor=self.id)
        for claim in expired:
            log.warning("lease_expired", task=claim.task.id, run=claim.task.run_id, held_by=claim.attempt.worker_id)
            if claim.attempt.process is not None:
                folder = self.workspace.runs_dir / str(claim.task.run_id) / claim.attempt.id
                kill_orphans(ProcessIdentity.from_json(claim.attempt.process), self.timing.grace_s, folder)
        control.end_forgotten(self.database, actor=self.id)
        self._finish_erasures()
        if self.database.reserve is not None:
            self.database.reserve.fill_up()

    def _finish_erasures(self) -> None:
        """Rewrite datasets without what was forgotten, once no run reads them; what failed is tried much later."""
        if boot_seconds() < self._erase_after:
            return
        outcomes = forget.finish(self.database, self.workspace, actor=self.id)
        if any(outcome.state == "failed" for outcome in outcomes):
            self._erase_after = boot_seconds() + _FAILED_ERASURE_SWEEPS * self.timing.sweep_s

    def _open_cycles(self) -> None:
        """Let a curriculum begin whose time has come; seldom, because that reads every profile's file."""
        if TaskKind.CURRICULUM in self.kinds and boot_seconds() - self._looked >= _CYCLES_EVERY * self.timing.sweep_s:
            open_due(self.database, self.workspace, actor=self.id)
            self._looked = boot_seconds()

    def _open_rounds(self) -> None:
        """Let campaigns open the rounds that are due, if we hold the scheduler's lease."""
        if TaskKind.TRAIN in self.kinds and boot_seconds() >= self._rounds_due:
            self._scheduler.open_due()
            self._rounds_due = boot_seconds() + self.timing.triggers_s

    def _look_at_targets(self) -> None:
        """Have targets brought back that lost what they should serve: a server restarted, somebody moved a link."""
        begun = boot_seconds()
        if TaskKind.RECONCILE in self.kinds and begun >= self._targets_due:
            check_targets(self.database, self.workspace, actor=self.id)
            now = boot_seconds()  # a target that hangs must not take more than a tenth of a worker's time
            self._targets_due = now + max(self.timing.targets_s, 9 * (now - begun))

    def _anything_left(self) -> bool:
        with self.database.read() as tx:
            return queue.any_open(tx, self.kinds)

    @property
    def _alive_s(self) -> float:
        return max(self.timing.lease_s, 3 * self.timing.sweep_s)

    def _register(self) -> None:
        process = identify(os.getpid()).to_json()
        with self.database.write() as tx:
            workers.register(
                tx, self.id, host=socket.gethostname(), process=process, kinds=self.kinds, alive_s=self._alive_s
            )

    def _leave(self) -> None:
        try:
            self._scheduler.leave()
            with self.database.write() as tx:
                workers.leave(tx, self.id)
        except StoreError as error:
            log.warning("store_unavailable", reason=str(error))

    def _patiently(self, action: Callable[[], R]) -> R:
        """A restarted database must not end a worker, unless it was told to end anyway."""

        def tell(error: StoreError) -> None:
            self._unsure = True
            log.warning("store_unavailable", reason=str(error))

        return patiently(action, self.stopping.wait, on_error=tell)


class HeartbeatThread(threading.Thread):
    """Renews the lease and the program's keepalive, while the stage makes progress within its deadline."""

    def __init__(self, database: Database, timing: WorkerSettings, claim: Claim, worker_id: str, pulse: Pulse) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.database = database
        self.timing = timing
        self.claim = claim
        self.worker_id = worker_id
        self.pulse = pulse
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Ctrl-Z is the main thread's, between transactions
        timeout_s = max(self.timing.phase_deadlines_s.values()) + self.timing.grace_s + self.timing.lease_s
        renewed = moved = boot_seconds()
        while not self._ended.wait(self.timing.heartbeat_s):
            now = boot_seconds()
            if self.pulse.has_moved():
                moved = now
            if now - moved > timeout_s:
                log.warning("no_progress", task=self.claim.task.id, seconds=round(now - moved))
                self.pulse.lost.set()
                return
            try:
                self._send_heartbeat()
                renewed = now
            except LeaseLost:
                self.pulse.lost.set()
                return
            except (TunesmithError, OSError) as error:
                log.warning("heartbeat_failed", task=self.claim.task.id, reason=str(error))
                if now - renewed > self.timing.lease_s:
                    self.pulse.lost.set()
                    return

    def _send_heartbeat(self) -> None:
        with self.database.write(durable=False) as tx:
            tasks.renew(tx, self.claim.lease, self.timing.lease_s)
            workers.heartbeat(tx, self.worker_id, max(self.timing.lease_s, 3 * self.timing.sweep_s))
        program = self.pulse.program
        if program is not None:
            program.keepalive()
