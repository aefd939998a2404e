"""Adapters flip while many clients ask: nobody is refused, and every answer is wholly from one version."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from support.flips import LETTERS, a_workspace_of_letters, flip, letter_of
from support.gateway import PROFILE, ServerProcess, a_server
from tunesmith.client import Client


@dataclass
class Drill:
    """What clients saw, and what was flipped so far."""

    seconds: list[float] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    num_flipped: int = 1
    is_over: bool = False

    def note(self, model: str, text: str, begun: float, at_least: int) -> None:
        """An answer must be of one version, of no older one than was live when it was asked for."""
        now = time.perf_counter()
        self.seconds.append(now - begun)
        self.ended_at.append(now)
        self.versions.add(model)
        if not text or set(text) != {letter_of(model)}:
            self.wrong.append(f"{model} wrote {text!r}")
        if int(model.rpartition("@v")[2]) < at_least:
            self.wrong.append(f"{model} answered after version {at_least} was live")

    def told(self, took_s: float) -> str:
        ordered = sorted(self.seconds)
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        pause = max(b - a for a, b in itertools.pairwise(sorted(self.ended_at)))
        return (
            f"{len(ordered)} answers by {len(self.versions)} versions in {took_s:.1f} s: "
            f"p50 {1000 * statistics.median(ordered):.0f} ms, p99 {1000 * p99:.0f} ms, slowest "
            f"{1000 * ordered[-1]:.0f} ms; longest time without any answer {1000 * pause:.0f} ms"
        )


async def ask_for_ever(api: AsyncOpenAI, drill: Drill, number: int) -> None:
    """One client: every other answer streamed, of different lengths."""
    for turn in itertools.count(number):
        if drill.is_over:
            return
        begun, at_least = time.perf_counter(), drill.num_flipped
        wish: dict[str, Any] = {
            "model": PROFILE,
            "messages": [{"role": "user", "content": f"client {number} says {turn}"}],
            "max_tokens": 4 + turn % 9,
            "temperature": 0,
        }
        if turn % 2:
            answer = await api.chat.completions.create(**wish)
            drill.note(answer.model, answer.choices[0].message.content or "", begun, at_least)
            continue
        chunks = [chunk async for chunk in await api.chat.completions.create(**wish, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        models = {chunk.model for chunk in chunks}
        assert len(models) == 1, models
        drill.note(models.pop(), text, begun, at_least)


async def ask_until_the_end(api: AsyncOpenAI, drill: Drill, number: int) -> None:
    try:
        await ask_for_ever(api, drill, number)
    except Exception as error:  # nobody may be refused or cut off; told with what came before it
        drill.wrong.append(f"client {number} after {len(drill.seconds)} answers: {error!r} from {error.__cause__!r}")


async def flip_all(control: httpx2.AsyncClient, client: Client, drill: Drill, num_flips: int) -> None:
    """As a deployment does: load, flip in the store, tell the server, let what is older than N−1 go."""
    database = client.serving.session.database
    for number in range(2, num_flips + 2):
        if drill.wrong:
            break
        await asyncio.to_thread(flip, database, number)
        if number % 4:  # the others are found by the server itself
            said = await told(control, "flip", profile=PROFILE)
            assert said["live"]["name"] == f"{PROFILE}@v{number}"
            drill.num_flipped = number
        if number > 2:
            await told(control, "drain", name=f"{PROFILE}@v{number - 2}", timeout_s=20.0)
            await told(control, "unload", name=f"{PROFILE}@v{number - 2}")


async def told(control: httpx2.AsyncClient, verb: str, **body: Any) -> dict[str, Any]:
    answer = await control.post(f"/control/{verb}", json=body)
    assert answer.status_code == 200, (verb, body, answer.text)
    return dict(answer.json())


async def run_drill(server: ServerProcess, client: Client, num_clients: int, num_flips: int) -> Drill:
    drill = Drill()
    said: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 60.0}
    key = {"Authorization": f"Bearer {server.token}"}
    async with AsyncOpenAI(**said) as api, httpx2.AsyncClient(base_url=server.url, headers=key, timeout=60) as control:
        await api.chat.completions.create(model=PROFILE, messages=[{"role": "user", "content": "wake up"}])
        clients = [asyncio.create_task(ask_until_the_end(api, drill, number)) for number in range(num_clients)]
        begun = time.perf_counter()
        try:
            await flip_all(control, client, drill, num_flips)
        finally:
            drill.is_over = True
            await asyncio.gather(*clients)
        print(f"\n{num_clients} clients, {num_flips} flips: {drill.told(time.perf_counter() - begun)}")
    return drill


def check(drill: Drill, num_answers: int, num_versions: int) -> None:
    assert drill.wrong == []
    assert len(drill.seconds) >= num_answers
    assert len(drill.versions) >= num_versions, "the flips were not seen by those who asked"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with a_workspace_of_letters(tmp_path_factory.mktemp("letters") / "ws", 12) as client:
        yield client


@pytest.fixture(scope="module")
def server(letters: Client) -> Iterator[ServerProcess]:
    with a_server(letters.workspace.root) as server:
        yield server


def test_failure_16_nothing_is_loaded_before_it_is_asked_for(server: ServerProcess) -> None:
    assert server.control("/control/state")["loaded"] == []
    assert "engine_started" not in server.log.read_text()


def test_adapters_flip_under_load_no_request_fails_and_no_answer_is_of_two_versions(
    letters: Client, server: ServerProcess
) -> None:
    """A short one; the full count is a drill of `make soak`."""
    drill = asyncio.run(run_drill(server, letters, num_clients=8, num_flips=10))
    check(drill, num_answers=30, num_versions=6)
    assert server.health()["serving"] == {PROFILE: f"{PROFILE}@v11"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_clients_and_two_hundred_flips(tmp_path: Path) -> None:
    with a_workspace_of_letters(tmp_path / "ws", 201, min_residency_s=60.0) as client:
        assert len(LETTERS) == 8
        with a_server(client.workspace.root) as server:
            drill = asyncio.run(run_drill(server, client, num_clients=50, num_flips=200))
            check(drill, num_answers=1000, num_versions=100)
            assert server.health()["serving"] == {PROFILE: f"{PROFILE}@v201"}
