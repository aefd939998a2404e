"""Hand-overs on both databases: asking, giving, ending; a task that waits for the device; a server that follows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa

from support.local_teachers import DATES, add_dates, school_of
from support.native import a_micro_base
from support.rows import ACTOR, WORKER, Unreachable, a_claimed_run, a_run, claim_of, seconds_until_due
from support.workspaces import PROFILE, a_workspace
from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import InvalidTransition, StoreError
from tunesmith.curriculum.cycle import curriculum
from tunesmith.orchestration import lifecycle
from tunesmith.orchestration.check import check_now
from tunesmith.profiles.settings import HandOverSettings, ServeSettings, Settings
from tunesmith.profiles.workspace import init_workspace
from tunesmith.programs.device.queries import hand_overs, servers
from tunesmith.programs.device.rules import HELD, HandOverState, ServerState
from tunesmith.programs.device.tables import hand_overs as table
from tunesmith.programs.device.take import take_device
from tunesmith.programs.process_identity import identify, is_alive
from tunesmith.programs.stage import DeviceBusy, Pulse, StageContext, StageEnd
from tunesmith.runs.queries import queue, requests, runs, tasks, workers
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.hand_over import DeviceHandOver, Following
from tunesmith.serving.generation import GenerationRequest
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

HOST = socket.gethostname()
S, H = ServerState, HandOverState


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test kills it."""
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield running
    running.kill()
    running.wait()


def killed(running: subprocess.Popen[bytes]) -> None:
    running.send_signal(signal.SIGKILL)
    running.wait()


def a_worker(tx: Tx, pid: int | None = None, worker_id: str = WORKER) -> None:
    here = identify(pid or os.getpid()).to_json()
    workers.register(tx, worker_id, host=HOST, process=here, kinds=tuple(TaskKind), alive_s=60.0)


def a_server(
    tx: Tx, server_id: str = "sv-1", *, state: ServerState = S.SERVING, pid: int | None = None, alive_s: float = 60.0
) -> str:
    server = servers.Server(
        id=server_id,
        host=HOST,
        process=identify(pid or os.getpid()).to_json(),
        url="http://127.0.0.1:1",
        device="cpu",
        state=state,
        serving={},
        counts={},
        started_at=tx.now,
    )
    servers.register(tx, server, alive_s)
    return server_id


def a_context(database: Database, claim: Claim, tmp_path: Path, rule: str = "always") -> StageContext:
    settings = Settings(serve=ServeSettings(hand_over=HandOverSettings(shares_device=rule)))
    workspace = init_workspace(tmp_path / "ws")
    return StageContext(database, workspace, settings, claim, WORKER, Pulse())


def claimed(database: Database) -> Claim:
    with database.write() as tx:
        _, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    return claim


def state_of(database: Database, hand_over_id: str) -> HandOverState:
    with database.read() as tx:
        return hand_overs.get(tx, hand_over_id).state


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_hand_over_asked_for_twice_is_one_and_every_move_has_its_event(database: Database) -> None:
    claim = claimed(database)
    with database.write() as tx:
        asked = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
        assert hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD) == asked
        hand_overs.give(tx, asked.id, server_id="sv-1", actor="sv-1", reason="aside")
        hand_overs.end(tx, asked.id, actor="sv-1", reason="trained")
        told = [(e.actor, e.new_state, e.reason) for e in events.of_entity(tx, "hand_over", asked.id)]
        found = hand_overs.get(tx, asked.id)
        again = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
    assert told == [(WORKER, "requested", HELD), ("sv-1", "given", "aside"), ("sv-1", "over", "trained")]
    assert (found.server_id, found.state, found.reason) == ("sv-1", H.OVER, "trained")
    assert again.id != asked.id


def test_hand_over_that_is_over_stays_over(database: Database) -> None:
    claim = claimed(database)
    with database.write() as tx:
        asked = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
        hand_overs.end(tx, asked.id, actor="sv-1", reason="nobody came")
    with pytest.raises(InvalidTransition), database.write() as tx:
        hand_overs.give(tx, asked.id, server_id="sv-1", actor="sv-1", reason="late")
    assert state_of(database, asked.id) is H.OVER


def test_database_refuses_two_open_hand_overs_of_one_task(database: Database) -> None:
    claim = claimed(database)
    with database.write() as tx:
        asked = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
        row = dict(tx.first(sa.select(table).where(table.c.id == asked.id)) or {})
    with pytest.raises(sa.exc.IntegrityError), database.write() as tx:
        tx.run(table.insert().values(**{**row, "id": "ho-other", "seq": row["seq"] + 1}))


def test_given_device_makes_its_task_due_at_once(database: Database) -> None:
    claim = claimed(database)
    with database.write() as tx:
        asked = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
        tasks.defer_unstarted(tx, claim.lease, 3600.0, actor=WORKER, reason=HELD)
        assert tasks.claim(tx, WORKER, (TaskKind.TRAIN,), 30.0) is None
        hand_overs.give(tx, asked.id, server_id="sv-1", actor="sv-1", reason="aside")
        again = tasks.claim(tx, WORKER, (TaskKind.TRAIN,), 30.0)
    assert again is not None
    assert again.task.id == claim.task.id


# --- the worker -------------------------------------------------------------------------------------------------------


def test_task_beside_a_serving_server_asks_and_waits_without_burning_anything(
    database: Database, tmp_path: Path
) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        tx.run(sa.text("UPDATE tasks SET num_crashes = 2"))
        a_server(tx)
    held = take_device(a_context(database, claim, tmp_path), "sim")
    assert held is not None
    assert held.reason == HELD
    with database.write() as tx:
        lifecycle.settle(tx, claim, StageEnd.device_busy(held), actor=WORKER)
        now, task, [attempt] = runs.get(tx, run.id), tasks.get(tx, claim.task.id), queue.attempts_of_run(tx, run.id)
        [asked] = hand_overs.open_on(tx, HOST)
    assert (now.state, now.reason) == (RunState.QUEUED, HELD)
    assert (task.state, task.reason, task.counts.num_crashes) == (TaskState.WAITING, HELD, 2), "forgiven, or charged"
    assert (attempt.state, attempt.error) == (AttemptState.INTERRUPTED, HELD)
    assert (asked.state, asked.task_id) == (H.REQUESTED, claim.task.id)


def test_evaluation_that_waits_for_the_device_stays_evaluating(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.EVALUATING, TaskKind.EVALUATE)
        lifecycle.settle(tx, claim, StageEnd.device_busy(DeviceBusy(HELD, 1.0)), actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.EVALUATING
        assert tasks.get(tx, claim.task.id).reason == HELD


@pytest.mark.slow
def test_curriculum_with_a_local_teacher_beside_a_serving_server_waits_and_asks_nobody(
    database: Database, store_url: str, tmp_path: Path
) -> None:
    school = school_of(Path("models/teacher"), enabled=True, min_entries=1, window="00:00-24:00")
    with a_workspace(tmp_path / "one", profile=school, settings={"store": {"url": store_url}}) as client:
        a_micro_base(client.workspace.root / "models" / "teacher")
        add_dates(client, dict(list(DATES.items())[:1]))
        with database.write() as tx:
            task_id = tasks.add(tx, TaskKind.CURRICULUM, actor=ACTOR, profile=PROFILE)
            claim = claim_of(tx, task_id)
            a_server(tx)
        settings = Settings(serve=ServeSettings(hand_over=HandOverSettings(shares_device="always")))
        end = curriculum(StageContext(database, client.workspace, settings, claim, WORKER, Pulse()), check_now)
    with database.write() as tx:
        lifecycle.settle(tx, claim, end, actor=WORKER)
        task = tasks.get(tx, task_id)
        assert (task.state, task.reason) == (TaskState.WAITING, HELD)
        assert seconds_until_due(tx, task_id) > 0, "it would ask again and again without a pause"
        a_worker(tx)
        [asked] = hand_overs.open_on(tx, HOST)
        assert hand_overs.taker_of(tx, asked).workers != ()


@pytest.mark.parametrize(
    ("state", "kind", "wish", "then"),
    [
        (RunState.TRAINING, TaskKind.TRAIN, RequestKind.CANCEL, RunState.CANCELLED),
        (RunState.TRAINING, TaskKind.TRAIN, RequestKind.PAUSE, RunState.PAUSED),
        (RunState.EVALUATING, TaskKind.EVALUATE, RequestKind.CANCEL, RunState.CANCELLED),
    ],
)
def test_wish_on_a_task_that_waits_for_the_device_is_heard(
    database: Database, state: RunState, kind: TaskKind, wish: RequestKind, then: RunState
) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, state, kind)
        requests.add(tx, run.id, wish, actor=ACTOR)
        lifecycle.settle(tx, claim, StageEnd.device_busy(DeviceBusy(HELD, 1.0)), actor=WORKER)
        assert runs.get(tx, run.id).state is then


def test_task_without_any_server_takes_the_device_and_says_so(database: Database, tmp_path: Path) -> None:
    claim = claimed(database)
    assert take_device(a_context(database, claim, tmp_path), "sim") is None
    with database.read() as tx:
        [taken] = hand_overs.open_on(tx, HOST)
    assert (taken.state, taken.server_id) == (H.GIVEN, None)


@pytest.mark.parametrize(("rule", "trainer"), [("never", "native"), ("auto", "sim")])
def test_task_that_shares_nothing_never_asks(database: Database, tmp_path: Path, rule: str, trainer: str) -> None:
    claim = claimed(database)
    with database.write() as tx:
        a_server(tx)
    assert take_device(a_context(database, claim, tmp_path, rule), trainer) is None
    with database.read() as tx:
        assert hand_overs.open_on(tx, HOST) == []


def test_killed_server_holds_nothing(database: Database, tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    claim = claimed(database)
    with database.write() as tx:
        a_server(tx, pid=process.pid)
    context = a_context(database, claim, tmp_path)
    assert take_device(context, "sim") is not None
    killed(process)
    assert take_device(context, "sim") is None


def test_server_that_is_silent_but_lives_is_waited_for(database: Database, tmp_path: Path) -> None:
    claim = claimed(database)
    with database.write() as tx:
        a_server(tx, state=S.ASIDE, alive_s=-1.0)
        asked = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason=HELD)
        hand_overs.give(tx, asked.id, server_id="sv-1", actor="sv-1", reason="aside")
    held = take_device(a_context(database, claim, tmp_path), "sim")
    assert held is not None
    assert "does not report" in held.reason


def test_evaluation_takes_the_device_at_once_where_training_of_its_run_has_it(
    database: Database, tmp_path: Path
) -> None:
    with database.write() as tx:
        run, training = a_claimed_run(tx, RunState.EVALUATING, TaskKind.TRAIN)
        asked = hand_overs.request(tx, training.task.id, HOST, actor=WORKER, reason=HELD)
        hand_overs.give(tx, asked.id, server_id="sv-1", actor="sv-1", reason="aside")
        tasks.end_attempt(tx, training.lease, AttemptState.SUCCEEDED, actor=WORKER)
        task_id = tasks.add(tx, TaskKind.EVALUATE, actor=WORKER, run_id=run.id, profile=run.profile)
        claim = claim_of(tx, task_id)
        a_server(tx, state=S.ASIDE)
    assert take_device(a_context(database, claim, tmp_path), "sim") is None


# --- the server -------------------------------------------------------------------------------------------------------


class Engines:
    """One engine as a process of its own; it can be told to answer for ever, or not to end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.num_active = 0
        self.mode: Literal["unload", "cpu"] | None = None
        self.fails = 0

    async def release_device(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        end_at = boot_seconds() + drain_s
        while self.num_active and boot_seconds() < end_at:
            await asyncio.sleep(0.01)
        if self.fails:
            self.fails -= 1
            raise EngineError("the engine does not end")
        if self.process is not None:
            killed(self.process)
        self.mode = mode

    async def reclaim_device(self) -> None:
        if self.fails:
            self.fails -= 1
            raise EngineError("not now")
        self.mode = None

    async def answer(self, name: str, asked: GenerationRequest) -> str:
        raise NotImplementedError


class World:
    """A server that follows, beside a run whose training needs the device."""

    def __init__(self, database: Database, **policy: Any) -> None:
        self.database = database
        self.engines = Engines()
        changes = {"shares_device": "always", "unused_timeout_s": 0.5, "drain_s": 0.3, **policy}
        self.settings = ServeSettings(follow_s=0.02, timeout_s=0.3, hand_over=HandOverSettings(**changes))
        following = Following("sv-1", "cpu", reported_s=0.2)
        self.hand_over = DeviceHandOver(database, self.settings, self.engines, following)
        with database.write() as tx:
            a_server(tx)

    def ask(self) -> str:
        with self.database.write() as tx:
            a_worker(tx)
            self.run = a_run(tx)
            self.task_id = tasks.add(tx, TaskKind.TRAIN, actor=ACTOR, run_id=self.run.id, profile=self.run.profile)
            return hand_overs.request(tx, self.task_id, HOST, actor=WORKER, reason=HELD).id

    def claim(self, lease_s: float = 30.0) -> Claim:
        with self.database.write() as tx:
            return claim_of(tx, self.task_id, lease_s=lease_s)

    async def until(self, state: ServerState, timeout_s: float = 5.0) -> None:
        end_at = boot_seconds() + timeout_s
        while self.hand_over.state is not state:
            assert boot_seconds() < end_at, f"it is {self.hand_over.state}, not {state}"
            await asyncio.sleep(0.01)

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def both() -> None:
            following = asyncio.create_task(self.hand_over.run())
            try:
                await self.until(S.SERVING)
                await story()
            finally:
                following.cancel()

        asyncio.run(both())

    def told(self) -> ServerState:
        with self.database.read() as tx:
            [server] = servers.alive(tx)
        return server.state


def test_server_gives_the_device_only_after_its_engine_is_gone_and_takes_it_back(
    database: Database, process: subprocess.Popen[bytes]
) -> None:
    world = World(database, unused_timeout_s=1.0)
    world.engines.process = process
    world.engines.num_active = 1
    engine = identify(process.pid)

    async def story() -> None:
        asked = world.ask()
        await world.until(S.STEPPING_ASIDE)
        assert is_alive(engine)
        assert state_of(database, asked) is H.REQUESTED
        world.engines.num_active = 0
        await world.until(S.ASIDE)
        assert not is_alive(engine)
        assert (state_of(database, asked), world.told()) == (H.GIVEN, S.ASIDE)
        claim = world.claim()
        await asyncio.sleep(1.5 * world.settings.hand_over.unused_timeout_s)  # it trains longer than anybody's patience
        assert world.hand_over.state is S.ASIDE
        with database.write() as tx:
            tasks.end_attempt(tx, claim.lease, AttemptState.FAILED, actor=WORKER, error_class=ErrorClass.DATA)
        await world.until(S.SERVING)
        assert state_of(database, asked) is H.OVER
        end_at = boot_seconds() + 5.0
        while world.told() is not S.SERVING:  # the store is told a moment after requests may come in
            assert boot_seconds() < end_at
            await asyncio.sleep(0.01)

    world.play(story)


def test_server_takes_back_what_nobody_takes(database: Database) -> None:
    world = World(database)

    async def story() -> None:
        began = boot_seconds()
        asked = world.ask()
        await world.until(S.ASIDE)
        await world.until(S.SERVING)
        assert boot_seconds() - began >= world.settings.hand_over.unused_timeout_s
        with database.read() as tx:
            assert hand_overs.get(tx, asked).reason == "nobody took it within 0.5 s"

    world.play(story)


def test_server_returns_at_once_when_worker_and_trainer_are_dead_though_the_lease_lives(
    database: Database, process: subprocess.Popen[bytes]
) -> None:
    world = World(database, unused_timeout_s=60.0)

    async def story() -> None:
        asked = world.ask()
        await world.until(S.ASIDE)
        with database.write() as tx:
            workers.leave(tx, WORKER)
            a_worker(tx, pid=process.pid)
        world.claim(lease_s=3600.0)
        await asyncio.sleep(0.1)
        assert world.hand_over.state is S.ASIDE
        killed(process)
        await world.until(S.SERVING)
        with database.read() as tx:
            assert "no worker of this machine is left" in hand_overs.get(tx, asked).reason

    world.play(story)


def test_server_that_starts_while_somebody_trains_begins_aside(database: Database) -> None:
    world = World(database)
    with database.write() as tx:
        a_worker(tx)
        world.run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        taken = hand_overs.request(tx, claim.task.id, HOST, actor=WORKER, reason="no server")
        hand_overs.give(tx, taken.id, server_id=None, actor=WORKER, reason="no server")

    async def story() -> None:
        following = asyncio.create_task(world.hand_over.run())
        await world.until(S.ASIDE)
        with database.write() as tx:
            tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER)
        await world.until(S.SERVING)
        following.cancel()

    asyncio.run(story())


def test_server_stays_aside_between_training_and_evaluation_of_one_run(database: Database) -> None:
    world = World(database, unused_timeout_s=60.0)

    async def story() -> None:
        world.ask()
        await world.until(S.ASIDE)
        claim = world.claim()
        with database.write() as tx:
            tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER)
            evaluate = tasks.add(
                tx, TaskKind.EVALUATE, actor=WORKER, run_id=world.run.id, profile=world.run.profile
            )  # fmt: skip
        await asyncio.sleep(0.2)
        assert world.hand_over.state is S.ASIDE
        with database.write() as tx:
            tasks.move(tx, evaluate, TaskState.CANCELLED, actor=ACTOR, reason="enough")
        await world.until(S.SERVING)

    world.play(story)


def test_engine_that_does_not_end_keeps_serving_until_it_does(database: Database) -> None:
    world = World(database)
    world.engines.fails = 1

    async def story() -> None:
        asked = world.ask()
        await world.until(S.STEPPING_ASIDE)
        await world.until(S.SERVING)
        assert state_of(database, asked) is H.REQUESTED
        await world.until(S.ASIDE)

    world.play(story)


def test_return_that_fails_is_tried_again(database: Database) -> None:
    world = World(database, unused_timeout_s=0.1)

    async def story() -> None:
        world.ask()
        await world.until(S.ASIDE)
        world.engines.fails = 2
        await world.until(S.SERVING)
        assert world.engines.fails == 0

    world.play(story)


@pytest.mark.parametrize("policy", ["queue", "refuse"])
def test_requests_while_serving_is_aside_wait_or_are_refused_with_retry_after(database: Database, policy: str) -> None:
    world = World(database, when_released=policy, unused_timeout_s=2.0)

    async def story() -> None:
        await world.hand_over.admit()  # at once
        world.ask()
        await world.until(S.ASIDE)
        began = boot_seconds()
        with pytest.raises(EngineError) as refused:
            await world.hand_over.admit()
        waited_s = boot_seconds() - began
        assert refused.value.http_status == 503
        assert refused.value.retry_after_s
        assert waited_s < 0.2 if policy == "refuse" else waited_s >= 0.25
        while policy == "queue" and boot_seconds() < began + 10.0:
            with suppress(EngineError):
                await world.hand_over.admit()  # patience ends, and it comes back while this one waits
                break
        if policy == "queue":
            assert world.hand_over.state is S.SERVING

    world.play(story)


def test_requests_are_answered_on_the_cpu_where_the_policy_says_so(database: Database) -> None:
    world = World(database, mode="cpu", when_released="refuse", unused_timeout_s=5.0)

    async def story() -> None:
        world.ask()
        await world.until(S.ASIDE)
        assert world.engines.mode == "cpu"
        await world.hand_over.admit()

    world.play(story)


@pytest.mark.parametrize("is_training", [True, False])
def test_server_without_its_store_comes_back_when_the_trainer_is_gone(
    database: Database, process: subprocess.Popen[bytes], is_training: bool
) -> None:
    world = World(database, unused_timeout_s=1.0)
    store = Unreachable(database)
    world.hand_over.database = store  # type: ignore[assignment]

    async def story() -> None:
        world.ask()
        await world.until(S.ASIDE)
        if is_training:
            claim = world.claim()
            with database.write() as tx:
                tasks.note_process(tx, claim.lease, identify(process.pid, claim.attempt.id).to_json())
            while not world.hand_over._programs:  # it has not seen it yet
                await asyncio.sleep(0.01)
        store.is_down = True
        if is_training:
            await asyncio.sleep(1.0)
            assert world.hand_over.state is S.ASIDE, "it came back beside a trainer"
            killed(process)
        await world.until(S.SERVING)

    world.play(story)


@pytest.mark.parametrize("error", [StoreError("the store cannot be used"), RuntimeError("a bug")])
def test_server_that_cannot_read_hand_overs_when_it_starts_serves(database: Database, error: Exception) -> None:
    world = World(database)

    class Broken:
        def read(self) -> Any:
            raise error

    world.hand_over.database = Broken()  # type: ignore[assignment]

    async def story() -> None:
        await asyncio.wait_for(world.hand_over.admit(), 1.0)

    world.play(story)
