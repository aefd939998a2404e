"""Hand-over, the server's side: release the device to a training run, and always reclaim it.

`programs/device/rules.py` decides; this module reads the rows, checks the processes and controls the engines. While the
store does not answer, the trainer's process and the time decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

from tunesmith.core import logs
from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import StoreError
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.device.queries import hand_overs
from tunesmith.programs.device.queries.hand_overs import HandOver, Taker
from tunesmith.programs.device.rules import (
    Action,
    HandOverState,
    Remembered,
    ServerNow,
    ServerState,
    Step,
    TaskSeen,
    Wanted,
    decide,
    decide_cut_off,
    with_program,
)
from tunesmith.programs.process_identity import ProcessIdentity, is_alive, processes_of_attempt
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.interfaces import EngineControl
from tunesmith.store.database import Database, Tx

_RETRY_AFTER_S = 15.0
log = logs.logger("hand_over")


@dataclass(frozen=True)
class Following:
    """The server's own identity, device and lease time."""

    server_id: str
    device: str
    reported_s: float
    """A server counts as alive for this long after its last heartbeat in the store."""


class DeviceHandOver:
    """Implements `interfaces.HandOver`: follows the rows of this machine, one step at a time."""

    def __init__(
        self, database: Database, settings: ServeSettings, engines: EngineControl, following: Following
    ) -> None:
        self.database = database
        self.settings = settings
        self.engines = engines
        self.following = following
        self.host = socket.gethostname()
        # nothing is known before the first tick: a training may run, so requests wait
        self._state = ServerState.RETURNING if self._shares else ServerState.SERVING
        self._is_ours = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._held_at: dict[str, float] = {}
        """By hand-over, when its task was last seen in somebody's hands; on the boot clock."""
        self._remembered: list[Remembered] = []
        self._programs: dict[str, ProcessIdentity] = {}
        self._answered_at = boot_seconds()
        self._is_cut_off = False

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def _shares(self) -> bool:
        rule = self.settings.hand_over.shares_device
        return rule == "always" or (rule == "auto" and self.following.device == "cuda")

    async def admit(self) -> None:
        """Return if the engines may run; else wait or raise EngineError (503), by policy."""
        if self._is_open:
            return
        policy = self.settings.hand_over
        if policy.when_released == "refuse" or self._num_waiting >= self.settings.max_waiting:
            raise _device_in_use()
        self._num_waiting += 1
        try:
            await asyncio.wait_for(self._is_ours.wait(), self.settings.timeout_s)
        except TimeoutError:
            raise _device_in_use() from None
        finally:
            self._num_waiting -= 1

    @property
    def _is_open(self) -> bool:
        on_cpu = self._state is ServerState.ASIDE and self.settings.hand_over.mode == "cpu"
        return self._state is ServerState.SERVING or on_cpu

    async def run(self) -> None:
        """Poll the store and act, until cancelled."""
        if not self._shares:
            return
        try:
            await self._begin()
            while True:
                await self._tick_safely()
                await asyncio.sleep(self.settings.follow_s)
        finally:
            if self._stepping is not None:
                self._stepping.cancel()

    async def _tick_safely(self) -> None:
        try:
            await self.tick()
        except Exception:
            # nothing that goes wrong here may end the loop: serving would never come back
            log.exception("hand_over_failed", server=self.following.server_id)

    async def _begin(self) -> None:
        """Nothing is loaded yet: serve at once, unless somebody of this machine computes on the device now."""
        try:
            rows = await asyncio.to_thread(self._read)
            step = decide(self._now(ServerState.ASIDE), rows)
        except Exception as error:  # whatever it is, a server that never begins to serve would be worse
            log.warning("hand_overs_unknown", reason=f"{type(error).__name__}: {error}")
            step = Step(Action.RETURN, "the store does not answer, so nobody is known to need the device")
        if step.action is Action.RETURN:
            self._set(ServerState.SERVING, step.reason)
        else:
            self._set(ServerState.STEPPING_ASIDE, step.reason)
            self._stepping = asyncio.create_task(self.engines.release_device(self.settings.hand_over.mode, 0.0))

    async def tick(self) -> None:
        """Read the store once and do the one step that follows."""
        if self._state is ServerState.RETURNING:  # the last attempt to do so failed half-way
            await self._return("tried again")
        try:
            rows = await asyncio.to_thread(self._read)
            step = decide(self._now(), rows)
            if step.action is not Action.KEEP or step.ended:
                step = await asyncio.to_thread(self._write)
            self._is_cut_off = False
        except StoreError as error:
            step = self._decide_cut_off()
            if not self._is_cut_off:
                log.warning("store_unavailable", reason=str(error))
            self._is_cut_off = True
        await self._do(step)

    async def _do(self, step: Step) -> None:
        match step.action:
            case Action.STEP_ASIDE:
                self._set(ServerState.STEPPING_ASIDE, step.reason)
                policy = self.settings.hand_over
                self._stepping = asyncio.create_task(self.engines.release_device(policy.mode, policy.drain_s))
            case Action.GIVE:
                self._set(ServerState.ASIDE, step.reason)
            case Action.RETURN:
                await self._return(step.reason)
            case Action.KEEP:
                await self._recover_failed_release()

    async def _return(self, reason: str) -> None:
        self._set(ServerState.RETURNING, reason)
        self._stepping = None
        await self.engines.reclaim_device()
        self._set(ServerState.SERVING, reason)
        with contextlib.suppress(StoreError):  # the server's next word in the store says so too
            await asyncio.to_thread(self._tell, ServerState.SERVING, reason)

    async def _recover_failed_release(self) -> None:
        """If the engines could not be stopped, the device is not free: resume serving; the next tick tries again."""
        stepping = self._stepping
        has_failed = stepping is not None and stepping.done() and not _went_well(stepping)
        if self._state is ServerState.STEPPING_ASIDE and has_failed:
            log.warning("step_aside_failed", server=self.following.server_id)
            await self._return("the engines could not be ended")

    def _set(self, state: ServerState, reason: str) -> None:
        if state is not self._state:
            log.info("device", server=self.following.server_id, was=self._state, now=state, reason=reason)
        self._state = state
        if self._is_open:
            self._is_ours.set()
        else:
            self._is_ours.clear()

    # --- in a thread of its own: the store and /proc -------------------------------------------------------------

    def _read(self) -> list[Wanted]:
        with self.database.read() as tx:
            return self._rows(tx)

    def _write(self) -> Step:
        """Decide again where nobody else decides, and write down what follows, in one transaction."""
        server_id = self.following.server_id
        with self.database.write() as tx:
            hand_overs.lock(tx, self.host)
            rows = self._rows(tx)
            step = decide(self._now(), rows)
            ended = dict(step.ended)
            for row in rows:
                if row.id in ended:
                    hand_overs.end(tx, row.id, actor=server_id, reason=ended[row.id])
                elif step.action is Action.GIVE and row.state is HandOverState.REQUESTED:
                    reason = "serving is aside: no engine runs on the device"
                    hand_overs.give(tx, row.id, server_id=server_id, actor=server_id, reason=reason)
            told = _TOLD.get(step.action)
            if told is not None:
                hand_overs.tell(tx, server_id, told, actor=server_id, reason=step.reason)
        return step

    def _tell(self, state: ServerState, reason: str) -> None:
        with self.database.write() as tx:
            hand_overs.tell(tx, self.following.server_id, state, actor=self.following.server_id, reason=reason)

    def _now(self, state: ServerState | None = None) -> ServerNow:
        is_free = self._stepping is not None and _went_well(self._stepping)
        return ServerNow(state or self._state, is_free, self.settings.hand_over.unused_timeout_s)

    def _rows(self, tx: Tx) -> list[Wanted]:
        """What is open on this machine, with what its processes do; remembered for when the store is gone."""
        found = [(hand_over, hand_overs.taker_of(tx, hand_over)) for hand_over in hand_overs.open_on(tx, self.host)]
        self._answered_at = boot_seconds()
        self._held_at = {each.id: self._held_at.get(each.id, self._answered_at) for each, _ in found}
        self._programs = {
            each.id: ProcessIdentity.from_json(taker.program) for each, taker in found if taker.program is not None
        }
        self._remembered = [
            Remembered(self._wanted(each, taker), taker.lease_left_s, taker.program is not None)
            for each, taker in found
        ]
        return [row.wanted for row in self._remembered]

    def _wanted(self, hand_over: HandOver, taker: Taker) -> Wanted:
        holder = None if taker.holder is None else ProcessIdentity.from_json(taker.holder)
        is_held = taker.lease_left_s > 0 and (holder is None or is_alive(holder))
        program = self._programs.get(hand_over.id)
        task = TaskSeen(
            state=taker.state,
            is_held_here=is_held,
            program_runs=program is not None and _runs(program),
            somebody_here=any(is_alive(ProcessIdentity.from_json(worker)) for worker in taker.workers),
            is_followed=taker.is_followed,
        )
        if is_held or hand_over.state is HandOverState.REQUESTED:
            self._held_at[hand_over.id] = self._answered_at
        return Wanted(hand_over.id, hand_over.state, task, self._answered_at - self._held_at[hand_over.id])

    def _decide_cut_off(self) -> Step:
        rows = [
            with_program(row, _runs(self._programs[row.wanted.id])) if row.has_program else row
            for row in self._remembered
        ]
        cut_off_s = boot_seconds() - self._answered_at
        return decide_cut_off(self._now(), rows, cut_off_s, self.following.reported_s)


_TOLD = {
    Action.STEP_ASIDE: ServerState.STEPPING_ASIDE,
    Action.GIVE: ServerState.ASIDE,
    Action.RETURN: ServerState.RETURNING,
}


def _went_well(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _runs(program: ProcessIdentity) -> bool:
    """Whether anything of the attempt lives: its shim, or what a killed shim left behind."""
    return is_alive(program) or bool(processes_of_attempt(program))


def _device_in_use() -> EngineError:
    return EngineError(
        "a training run is using the GPU; serving resumes automatically, retry later",
        code="device_in_use",
        http_status=503,
        retry_after_s=_RETRY_AFTER_S,
    )
