"""Overload, slowness, clients that leave, engines that die, signals: what is under way ends well or is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from support.gateway import (
    CHAT,
    ServerProcess,
    a_served_workspace,
    a_server,
    ask,
    engine_of,
    frozen_engine,
    in_background,
    memory_of,
    num_in_use,
    warm,
)
from support.workspaces import cli, wait_for
from tunesmith.client import Client


@pytest.fixture(scope="module")
def small(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with few places and little patience."""
    serve = {"max_batch": 1, "max_waiting": 2, "grace_s": 5.0}
    client = a_served_workspace(tmp_path_factory.mktemp("small") / "ws", base, serve=serve, num_versions=1)
    yield client
    client.close()


@pytest.fixture(scope="module")
def busy(small: Client) -> Iterator[ServerProcess]:
    """For the tests that leave it alive."""
    with a_server(small.workspace.root) as process:
        warm(process, small)
        yield process
    # the next ones have the workspace for themselves


def test_more_than_there_is_room_for_is_refused_with_the_time_to_wait_and_the_rest_is_answered(
    busy: ServerProcess,
) -> None:
    with frozen_engine(busy):
        waiting = [in_background(ask, busy) for _ in range(3)]
        wait_for(lambda: num_in_use(busy) == 3)
        for wishes in ({}, {"stream": True}, {"n": 8}):
            with pytest.raises(openai.RateLimitError) as caught:
                ask(busy, **wishes)
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert busy.health()["status"] == "ok"
    for thread, results in waiting:
        thread.join(120)
        assert results[0].choices[0].message.content
    assert num_in_use(busy) == 0
    assert ask(busy).model == "support@v1"


def test_ten_times_the_load_is_refused_not_fatal(busy: ServerProcess) -> None:
    """Each request is answered or refused with the time to wait; memory stays; the next one is served."""

    async def flood() -> list[tuple[int, bool]]:
        limits = httpx2.Limits(max_connections=100)
        async with httpx2.AsyncClient(base_url=busy.url, timeout=60.0, limits=limits) as http:

            async def one(number: int) -> tuple[int, bool]:
                answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": number % 2 == 0})
                return answer.status_code, "retry-after" in answer.headers

            return await asyncio.gather(*(one(number) for number in range(100)))

    before = memory_of(busy)
    seen = Counter(asyncio.run(flood()))
    assert set(seen) <= {(200, False), (429, True)}
    assert seen[200, False] >= 3
    assert seen[429, True] >= 10
    assert memory_of(busy) - before < 64 << 20
    assert num_in_use(busy) == 0
    assert ask(busy).model == "support@v1"


def test_a_client_that_leaves_frees_its_place_at_once_streamed_or_not(busy: ServerProcess) -> None:
    with frozen_engine(busy), busy.http(timeout=1.0) as http:
        for stream in (False, True):
            with pytest.raises(httpx2.TimeoutException):
                http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            wait_for(lambda: num_in_use(busy) == 0, 10.0)  # far sooner than the engine, which is frozen, or a timeout
    assert ask(busy).choices
    assert "request_failed" not in busy.log.read_text()


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_place(busy: ServerProcess) -> None:
    with busy.http() as http, http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        first = next(answer.iter_lines())
        assert first.startswith("data: ")
    wait_for(lambda: num_in_use(busy) == 0, 10.0)


def test_a_stream_that_breaks_in_the_middle_says_so_and_ends(busy: ServerProcess) -> None:
    with busy.http() as http, http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        os.kill(engine_of(busy), signal.SIGKILL)
        rest = [line for line in lines if line]
    if rest[-1] != "data: [DONE]":  # it may have been complete before the engine died
        assert '"error"' in rest[-1]
        assert '"code":"engine_died"' in rest[-1]
    assert ask(busy).choices, "a new engine answers"


def test_an_engine_killed_before_the_first_word_is_started_again_and_asked_once_more(busy: ServerProcess) -> None:
    pid = engine_of(busy)
    os.kill(pid, signal.SIGSTOP)
    thread, results = in_background(lambda: ask_patiently(busy))
    wait_for(lambda: num_in_use(busy) == 1)
    os.kill(pid, signal.SIGKILL)
    thread.join(120)
    assert results[0].choices[0].message.content
    assert engine_of(busy) != pid


def ask_patiently(server: ServerProcess) -> Any:
    """As the stock client does: it asks again after 503."""
    return server.openai(max_retries=5).chat.completions.create(**CHAT)


def test_an_upgrade_that_nobody_offers_is_no_news(busy: ServerProcess) -> None:
    with busy.http(headers={"Connection": "Upgrade", "Upgrade": "websocket"}) as http:
        assert http.get("/healthz").status_code == 200
    assert "pip install" not in busy.log.read_text()


def test_serving_to_others_without_keys_is_refused(small: Client) -> None:
    refused = cli("serve", "--host", "0.0.0.0", cwd=small.workspace.root)
    assert refused.code == 1
    assert "serve.key_file" in refused.err
    assert cli("serve", "--port", "70000", cwd=small.workspace.root).code != 0


def test_host_and_port_of_the_command_win_over_the_settings(small: Client) -> None:
    """They hold for one server; `--set serve.port=…` of a run is refused all the same."""
    found = small.serving.settings_for("127.0.0.2", 8400)
    assert (found.host, found.port, found.max_batch) == ("127.0.0.2", 8400, 1)
