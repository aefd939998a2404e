"""The device between serving and training, with real processes that are really killed: serving always comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError
from openai.types.chat import ChatCompletion

from support.databases import Postgres
from support.engine import a_lively_base
from support.gateway import SERVE
from support.hand_over_world import HOST, SERVED, SHARED, World
from support.workspaces import wait_for, write_settings
from tunesmith.programs.device.queries import hand_overs
from tunesmith.programs.device.queries.hand_overs import HandOver
from tunesmith.programs.device.rules import HELD
from tunesmith.runs.queries import switches, tasks
from tunesmith.serving.engine_spec import EngineSpec
from tunesmith.serving.gateway.embedded_engine import EmbeddedEngine
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.store import events

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

LONG = ("trainer.options.script=slow", "trainer.options.fail_attempts=2", "trainer.options.steps=60")
"""The first attempt asks for the device; the second takes twelve seconds, so that something can happen to it."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_lively_base(tmp_path_factory.mktemp("hand-over") / "base")


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("shared"), base)
    yield world
    world.end()


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The same server for every story; its workers end with the story."""
    yield shared
    for worker in shared.fleet.processes:
        worker.kill()
        worker.wait()


def test_training_and_evaluation_get_the_device_once_and_requests_meanwhile_wait(world: World) -> None:
    assert world.ask().model == "support@v1"
    [engine] = world.engines()
    run_id = world.submit("trainer.options.steps=30", "trainer.options.step_s=0.05")
    world.fleet.start()
    world.fleet.wait_for_step(run_id, 1, attempt=1)
    assert world.state() == "aside"
    assert world.engines() == [], "it trains beside the engine"
    assert world.server.health()["engines"] == []
    answers: list[ChatCompletion] = []
    waiting = threading.Thread(target=lambda: answers.append(world.ask()))
    waiting.start()
    world.fleet.wait(run_id, "completed")
    world.is_back()
    waiting.join(30)
    assert [answer.model for answer in answers] == ["support@v1"]
    assert world.engines() != [engine]
    assert world.steps_aside() == 1, "it went back and forth between training and evaluation"
    first = world.fleet.attempts(run_id)[0]
    assert (first.outcome, first.error) == ("interrupted", HELD)
    with world.fleet.database.read() as tx:
        moved = [(e.new_state, e.reason) for e in events.of_entity(tx, "run", run_id)]
    assert ("queued", HELD) in moved


def test_trainer_killed_mid_training_is_tried_again_and_serving_comes_back(world: World) -> None:
    run_id = world.submit(*LONG)
    world.fleet.start()
    world.fleet.wait_for_step(run_id, 2, attempt=1)
    assert world.state() == "aside"
    for pid in world.trainers():
        os.kill(pid, signal.SIGKILL)
    world.fleet.wait(run_id, "completed")
    world.is_back()


def test_training_that_fails_for_good_gives_the_device_back_at_once(world: World) -> None:
    run_id = world.submit("trainer.options.script=fail", "trainer.options.error_class=data")
    world.fleet.start()
    world.fleet.wait(run_id, "failed")
    world.is_back()


def test_worker_killed_mid_training_serving_is_back_before_its_lease_is_over(world: World) -> None:
    write_settings_of(world, lease_s=30.0)
    run_id = world.submit(*LONG)
    doomed = world.fleet.start()
    world.fleet.wait_for_step(run_id, 2, attempt=1)
    assert world.state() == "aside"
    doomed.kill()
    killed_at = time.monotonic()
    world.is_back()
    assert time.monotonic() - killed_at < 15.0
    assert world.trainers() == [], "it serves beside a trainer"
    world.fleet.client.runs.cancel(run_id)
    write_settings_of(world)


def write_settings_of(world: World, **worker: Any) -> None:
    """For workers that start from now on; the server has read its own."""
    serve = {**SERVE, "timeout_s": 60.0, "hand_over": SHARED}
    write_settings(world.fleet.root, {"serve": serve, "worker": worker})


def test_device_that_was_asked_for_and_is_never_taken_is_taken_back(world: World) -> None:
    world.fleet.client.system.estop(True, "a drill")
    run_id = world.submit()
    world.fleet.start()
    wait_for(lambda: "worker_started" in world.fleet.log(len(world.fleet.processes) - 1).read_text())
    with world.fleet.database.write() as tx:
        assert switches.is_on(tx, switches.ESTOP)
        task = tasks.open_of_run(tx, run_id)
        assert task is not None
        asked = hand_overs.request(tx, task.id, HOST, actor="wk-gone", reason=HELD)
    world.until("aside")
    world.is_back()
    with world.fleet.database.read() as tx:
        over: HandOver = hand_overs.get(tx, asked.id)
    assert over.reason == "nobody took it within 1.5 s"
    world.fleet.client.runs.cancel(run_id)
    world.fleet.client.system.estop(False)


def test_server_killed_alone_begins_aside_and_everything_killed_serves_at_once(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path, base, when_released="refuse")
    try:
        run_id = world.submit(*LONG)
        worker = world.fleet.start()
        world.fleet.wait_for_step(run_id, 2, attempt=1)
        assert world.state() == "aside"
        with pytest.raises(APIStatusError) as refused:
            world.ask()
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) > 0
        world.restart()
        world.until("aside", 5.0)  # somebody trains
        assert len(world.fleet.attempts(run_id)) == 2, "the training was disturbed"
        worker.kill()
        world.server.process.kill()
        wait_for(lambda: world.trainers() == [], 20.0, "for the trainer to end itself")
        world.restart()
        world.until("serving", 3.0)
        assert world.ask().model == "support@v1"
        world.is_back()
        world.fleet.start()
        world.fleet.wait(run_id, "completed", timeout_s=60.0)
        world.is_back()
    finally:
        world.end()


@pytest.mark.soak
def test_store_down_while_serving_is_aside_does_not_keep_it_there(
    base: Path, tmp_path: Path, postgres: Postgres
) -> None:
    """Ten seconds after its last word in the store nobody may trust it any more; then a dead trainer is enough."""
    world = World(tmp_path, base, store=postgres.create("hand_over_drill", template="template_of_tests"))
    try:
        run_id = world.submit(*LONG)
        worker = world.fleet.start()
        world.fleet.wait_for_step(run_id, 2, attempt=1)
        assert world.state() == "aside"
        postgres.stop()
        worker.kill()
        down_at = time.monotonic()
        world.until("serving", 60.0)
        took_s = time.monotonic() - down_at
        assert world.ask().model == "support@v1"
        assert world.server.health()["serving"] == SERVED
        assert 8.0 < took_s < 30.0
        print(f"back {took_s:.1f} s after store and worker were gone")
        postgres.start()
        world.is_back()
    finally:
        world.end()


@pytest.mark.soak
def test_requests_are_answered_on_the_cpu_while_somebody_trains(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path, base, mode="cpu")
    try:
        assert world.ask().model == "support@v1"
        [before] = world.engines()
        run_id = world.submit(*LONG, "trainer.options.steps=200")
        world.fleet.start()
        world.fleet.wait_for_step(run_id, 2, attempt=1)
        assert before not in world.engines()
        assert world.ask().model == "support@v1"
        assert (world.state(), world.trainers() != []) == ("aside", True)
        [meanwhile] = world.engines()
        world.fleet.client.runs.cancel(run_id)
        world.is_back()
        assert world.ask().model == "support@v1"
        assert meanwhile not in world.engines(), "it still answers on the CPU"
    finally:
        world.end()


def test_engine_stopped_while_it_starts_is_not_started_by_who_waited(base: Path) -> None:
    async def story() -> None:
        engine = EmbeddedEngine(EngineSpec(base=str(base), device="cpu", max_batch=1))
        asking = [asyncio.create_task(engine.start()) for _ in range(3)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await engine.stop()
        assert time.monotonic() - began < 2.0, "it waited until the model was loaded"
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, EngineError) for end in ends)
        with pytest.raises(EngineError) as refused:
            await engine.start()
        assert (refused.value.code, engine.pid, engine.num_starts) == ("engine_stopped", None, 1)

    asyncio.run(story())
