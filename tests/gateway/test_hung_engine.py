"""An engine that hangs, wholly or in one of its threads, is noticed within seconds, told, and replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.gateway import (
    CHAT,
    ServerProcess,
    a_served_workspace,
    a_server,
    ask,
    engine_of,
    in_background,
    num_in_use,
    warm,
)
from support.stuck_threads import stuck_thread
from support.workspaces import wait_for
from tunesmith.client import Client

HANG_S = 2.0
_START_S = 110.0
"""For a new engine on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def workspace(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    serve = {"engine_hang_s": HANG_S, "max_tokens": 200}
    client = a_served_workspace(tmp_path_factory.mktemp("hung") / "ws", base, serve=serve, num_versions=2)
    yield client
    client.close()


@pytest.fixture(scope="module")
def server(workspace: Client) -> Iterator[ServerProcess]:
    with a_server(workspace.workspace.root) as process:
        warm(process, workspace)
        yield process


def hang(pid: int, how: str, held: ExitStack) -> None:
    """`SIGSTOP`, or the name of the thread that stands still."""
    if how == "SIGSTOP":
        os.kill(pid, signal.SIGSTOP)
    else:
        held.enter_context(stuck_thread(pid, how))


def engine_state(server: ServerProcess) -> dict[str, Any]:
    (state,) = server.health()["engines"]
    return dict(state)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def ask_patiently(server: ServerProcess, asked: dict[str, Any]) -> Any:
    """Once: the client itself tries nothing again."""
    return server.openai(timeout=_START_S).chat.completions.create(**asked)


def check_replaced(server: ServerProcess, how: str) -> float:
    """Seconds from the hang until it is noticed; whoever asks meanwhile is answered by the next engine."""
    old, before = engine_of(server), engine_state(server)["num_hung"]
    with ExitStack() as held:
        hang(old, how, held)
        begun = time.monotonic()
        thread, results = in_background(ask_patiently, server, CHAT)
        wait_for(lambda: engine_state(server)["num_hung"] == before + 1, 30.0)
        took = time.monotonic() - begun
        wait_for(lambda: is_gone(old), 10.0)
        thread.join(_START_S)
    (answer,) = results
    assert not isinstance(answer, Exception), f"{how}: {answer}"
    assert answer.model == "support@v1"
    assert engine_of(server) != old
    wait_for(lambda: server.health()["status"] == "ok", 10.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGCONT)
        raise AssertionError("the old process could have gone on")
    return took


@pytest.mark.parametrize("how", ["compute", "listener"])
def test_an_engine_with_one_hung_thread_is_replaced_within_seconds_and_asked_again(
    server: ServerProcess, how: str
) -> None:
    assert check_replaced(server, how) < HANG_S + 4.0
    told = server.log.read_text()
    assert "engine_is_ended" in told
    assert "engine_replaced" in told


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_hangs_of_every_kind_lose_no_request(server: ServerProcess) -> None:
    hows = ["SIGSTOP"] * 4 + ["compute"] * 3 + ["listener", "writer", "messages"]
    took = {f"{number} {how}": round(check_replaced(server, how), 1) for number, how in enumerate(hows)}
    print(took)
    assert max(took.values()) < HANG_S + 4.0


def test_an_idle_engine_that_hangs_is_told_and_replaced_before_anybody_asks(server: ServerProcess) -> None:
    wait_for(lambda: engine_state(server)["is_ready"], _START_S)
    old = engine_of(server)
    os.kill(old, signal.SIGSTOP)
    told = wait_for(lambda: server.health()["status"] == "degraded" and engine_state(server), 10.0)
    assert "no sign of life" in told["problem"] or "replaced" in told["problem"]
    wait_for(lambda: engine_state(server)["is_ready"] and engine_of(server) != old, _START_S)
    wait_for(lambda: is_gone(old))
    wait_for(lambda: server.health()["status"] == "ok")
    assert "answered no ping" in engine_state(server)["last_hang"]


def test_a_stream_in_the_middle_ends_with_an_error_and_a_whole_answer_is_asked_again(server: ServerProcess) -> None:
    long = {**CHAT, "max_tokens": 200, "temperature": 1.5, "seed": 2}
    with (
        server.http(timeout=60.0) as http,
        http.stream("POST", "/v1/chat/completions", json={**long, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        os.kill(engine_of(server), signal.SIGSTOP)
        thread, results = in_background(ask_patiently, server, long)
        rest = [line for line in lines if line]
    if rest[-1] != "data: [DONE]":  # it may have been complete before the engine was stopped
        assert '"code":"engine_hung"' in rest[-1]
    thread.join(_START_S)
    assert results[0].choices[0].message.content
    assert num_in_use(server) == 0


def test_an_engine_that_hangs_while_it_reads_an_adapter_is_replaced(server: ServerProcess) -> None:
    wait_for(lambda: engine_state(server)["is_ready"], _START_S)
    with stuck_thread(engine_of(server), "loader"):
        thread, results = in_background(ask_patiently, server, {**CHAT, "model": "support@v2"})
        thread.join(_START_S)
    assert results[0].model == "support@v2"
    assert "'loader'" in engine_state(server)["last_hang"]


def test_an_engine_stopped_for_less_than_the_limit_goes_on(server: ServerProcess) -> None:
    wait_for(lambda: engine_state(server)["is_ready"], _START_S)
    pid = engine_of(server)
    os.kill(pid, signal.SIGSTOP)
    thread, results = in_background(ask, server)
    time.sleep(HANG_S / 2)
    os.kill(pid, signal.SIGCONT)
    thread.join(120)
    assert results[0].choices
    assert engine_of(server) == pid


def test_a_gateway_that_was_suspended_does_not_blame_its_engine(server: ServerProcess) -> None:
    wait_for(lambda: engine_state(server)["is_ready"], _START_S)
    before = engine_state(server)["num_hung"]
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(HANG_S + 1.5)
    server.process.send_signal(signal.SIGCONT)
    for _ in range(5):
        assert ask(server).choices
        time.sleep(0.3)
    assert engine_state(server)["num_hung"] == before


def test_an_engine_that_hangs_as_it_starts_is_given_up_and_started_again(server: ServerProcess) -> None:
    wait_for(lambda: engine_state(server)["is_ready"], _START_S)
    old = engine_of(server)
    os.kill(old, signal.SIGKILL)
    thread, results = in_background(
        lambda: server.openai(max_retries=5, timeout=_START_S).chat.completions.create(**CHAT)
    )
    starting = wait_for(lambda: next((pid for pid in engines_of(server) if pid != old), None), 30.0)
    os.kill(starting, signal.SIGSTOP)
    wait_for(lambda: is_gone(starting), HANG_S + 10.0)
    thread.join(_START_S)
    assert results[0].choices
    assert engine_of(server) != starting


def engines_of(server: ServerProcess) -> list[int]:
    """Its engine processes. One that does not run our program yet holds up the process that forks it."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"tunesmith.serving.engine.main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
