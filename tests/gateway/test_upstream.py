"""Servers behind the gateway: what passes through, what who asks is told, replicas, losses, cancellation."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from support.json_server import Answered, JsonServer
from support.vllm_server import VllmServer
from tunesmith.deployment.targets.base import Endpoint, ServedAdapter, TargetError
from tunesmith.serving.gateway import upstream as module
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.upstream import UpstreamServer

CHAT = "/v1/chat/completions"
ADAPTER = ServedAdapter("support@v7", Path("/nowhere"), "0" * 64)
ASKED = {"messages": [{"role": "user", "content": "hi"}]}
Play = Callable[[BaseHTTPRequestHandler, Any], Any]


class Doors:
    """The part of a target that the gateway uses, over servers of the test."""

    def __init__(self, *servers: JsonServer, key: str = "sesame", **endpoint: Any) -> None:
        self.servers, self.key, self.endpoint = list(servers), key, endpoint
        self.loads: list[str] = []

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        name = "tiny" if adapter is None else adapter.name
        headers = {"Authorization": f"Bearer {self.key}"}
        return [Endpoint(server.url, name, headers=headers, **self.endpoint) for server in self.servers]

    def load(self, adapter: ServedAdapter) -> None:
        self.loads.append(adapter.name)
        for server in self.servers:
            if isinstance(server, VllmServer):
                server.adapters[adapter.name] = str(adapter.path)


class Player(JsonServer):
    """Answers as a test says."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self.play = play

    def answer(self, method: str, path: str, body: Any, call: BaseHTTPRequestHandler) -> Any:
        return self.play(call, body)


async def asked(
    target: Any, body: Mapping[str, Any] = ASKED, adapter: ServedAdapter | None = ADAPTER, timeout_s: float = 10.0
) -> list[dict[str, Any]]:
    upstream = UpstreamServer(target, timeout_s)
    try:
        return [said async for said in upstream.ask(CHAT, body, adapter)]
    finally:
        await upstream.close()


def ask(target: Any, body: Mapping[str, Any] = ASKED, **more: Any) -> list[dict[str, Any]]:
    return asyncio.run(asked(target, body, **more))


def whole(text: str, model: str = ADAPTER.name, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"object": "chat.completion", "model": model, "choices": [choice], **more}


def begin(call: BaseHTTPRequestHandler) -> None:
    call.send_response(200)
    call.send_header("Content-Type", "text/event-stream")
    call.send_header("Connection", "close")
    call.end_headers()


def chunk(text: str, model: str = ADAPTER.name) -> bytes:
    said = {"object": "chat.completion.chunk", "model": model, "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def test_answer_passes_through_under_the_exact_name_with_the_key() -> None:
    with VllmServer(key="sesame") as server:
        server.adapters[ADAPTER.name] = "/nowhere"
        (said,) = ask(Doors(server), {**ASKED, "temperature": 0.5, "model": "support"})
        assert said["choices"][0]["message"]["content"] == "support@v7: hi"
        assert server.calls[-1][2] == {**ASKED, "temperature": 0.5, "model": "support@v7"}
        (said,) = ask(Doors(server), adapter=None)
        assert said["model"] == "tiny"


def test_limit_of_tokens_is_told_by_the_name_that_every_server_knows() -> None:
    with VllmServer() as server:
        ask(Doors(server), {**ASKED, "max_completion_tokens": 5}, adapter=None)
        assert server.calls[-1][2] == {**ASKED, "max_tokens": 5, "model": "tiny"}


def test_stream_passes_chunk_by_chunk_and_done_ends_it() -> None:
    with VllmServer() as server:
        server.adapters[ADAPTER.name] = "/nowhere"
        chunks = ask(Doors(server), {**ASKED, "stream": True})
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == "support@v7: hi"
    assert len(chunks) == len("support@v7: hi") + 1  # the last one says how it ended


def test_fields_that_choose_the_version_cannot_be_set_by_who_asks() -> None:
    said: list[Any] = []

    def play(call: BaseHTTPRequestHandler, body: Any) -> Any:
        said.append(body)
        return whole("fine", model="whatever")

    lora = [{"id": 1, "scale": 1.0}]
    with Player(play) as server:
        target = Doors(server, extra={"lora": lora}, defaults={"top_k": 0, "top_p": 1.0}, is_named=False)
        ask(target, {**ASKED, "lora": [{"id": 0, "scale": 9.0}], "top_p": 0.5})
    assert (said[0]["lora"], said[0]["top_k"], said[0]["top_p"]) == (lora, 0, 0.5)


def test_lost_version_is_loaded_once_for_all_who_ask_and_asked_again() -> None:
    async def many(target: Doors) -> list[list[dict[str, Any]]]:
        upstream = UpstreamServer(target, 10.0)  # type: ignore[arg-type]

        async def one() -> list[dict[str, Any]]:
            return [said async for said in upstream.ask(CHAT, ASKED, ADAPTER)]

        try:
            return await asyncio.gather(*(one() for _ in range(8)))
        finally:
            await upstream.close()

    with VllmServer() as server:
        target = Doors(server)
        answers = asyncio.run(many(target))
    assert [each[0]["model"] for each in answers] == ["support@v7"] * 8
    assert target.loads == ["support@v7"]


def test_load_that_fails_is_tried_once_for_all_who_ask() -> None:
    tried: list[str] = []

    def cannot(adapter: ServedAdapter) -> None:
        tried.append(adapter.name)
        time.sleep(0.3)
        raise TargetError("out of memory")

    async def many(target: Doors) -> list[Any]:
        upstream = UpstreamServer(target, 10.0)  # type: ignore[arg-type]

        async def one() -> None:
            async for _ in upstream.ask(CHAT, ASKED, ADAPTER):
                pass

        try:
            return await asyncio.gather(*(one() for _ in range(8)), return_exceptions=True)
        finally:
            await upstream.close()

    with VllmServer() as server:
        target = Doors(server)
        target.load = cannot  # type: ignore[method-assign]
        answers = asyncio.run(many(target))
    assert [getattr(each, "http_status", None) for each in answers] == [503] * 8
    assert tried == ["support@v7"]


def test_version_that_stays_lost_is_503_with_retry_after() -> None:
    with VllmServer() as server:
        target = Doors(server)
        target.load = lambda adapter: None  # type: ignore[method-assign]
        with pytest.raises(EngineError) as caught:
            ask(target)
        assert (caught.value.http_status, caught.value.retry_after_s) == (503, 5.0)

        def cannot(adapter: ServedAdapter) -> None:
            raise TargetError(f"{server.url} is out of memory")

        target.load = cannot  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"lost support@v7") as caught:
            ask(target)
        assert server.url not in caught.value.message


@pytest.mark.parametrize(
    ("status", "body", "expected", "retry_after"),
    [
        (400, {"error": {"message": "max_tokens=4000 is too many"}}, (400, "max_tokens=4000 is too many"), None),
        (401, {"error": "Unauthorized"}, (502, "rejected the API key"), None),
        (429, {"error": {"message": "slow down"}}, (429, "is busy"), 7.0),
        (503, b"loading", (503, "is not ready"), 7.0),
        (500, {"error": {"message": "CUDA error at http://host:1"}}, (502, "failed with status 500"), None),
        (302, b"", (502, "failed with status 302"), None),
    ],
)
def test_status_of_the_server_is_told_in_our_words(
    status: int, body: Any, expected: tuple[int, str], retry_after: float | None
) -> None:
    def play(call: BaseHTTPRequestHandler, asked: Any) -> Any:
        raise Answered(status, body, {"Retry-After": "7", "Location": "http://127.0.0.1:1/"})

    with Player(play) as server, pytest.raises(EngineError, match=expected[1]) as caught:
        ask(Doors(server))
    assert caught.value.http_status == expected[0]
    if retry_after is not None:
        assert caught.value.retry_after_s == retry_after


@pytest.mark.parametrize(
    ("said", "waits"), [("nan", 300.0), ("inf", 300.0), ("-3", 0.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 1.0), ("", 1.0)]
)
def test_odd_retry_after_becomes_a_time_that_can_be_told(said: str, waits: float) -> None:
    def play(call: BaseHTTPRequestHandler, asked: Any) -> Any:
        raise Answered(429, {}, {"Retry-After": said})

    with Player(play) as server, pytest.raises(EngineError, match="is busy") as caught:
        ask(Doors(server))
    assert caught.value.retry_after_s == waits


def test_complaint_is_told_without_address_and_key() -> None:
    def play(call: BaseHTTPRequestHandler, asked: Any) -> Any:
        message = f"bad request\x07 to {servers[0].url}/v1 with sesame: content is missing"
        raise Answered(400, {"error": {"message": message}})

    servers: list[Player] = []
    with Player(play) as server:
        servers.append(server)
        with pytest.raises(EngineError, match="content is missing") as caught:
            ask(Doors(server))
    assert "sesame" not in caught.value.message
    assert "127.0.0.1" not in caught.value.message
    assert "\x07" not in caught.value.message


def test_answer_of_another_version_is_not_passed_on() -> None:
    with (
        Player(lambda call, body: whole("from the old one", model="support@v6")) as server,
        pytest.raises(EngineError, match="another version") as caught,
    ):
        ask(Doors(server))
    assert caught.value.http_status == 502


def _cut(call: BaseHTTPRequestHandler) -> None:
    begin(call)
    call.wfile.write(chunk("half "))
    call.wfile.flush()


def _error_inside(call: BaseHTTPRequestHandler) -> None:
    _cut(call)
    call.wfile.write(b'data: {"error": {"message": "out of memory at http://secret:1"}}\n\ndata: [DONE]\n\n')


def _garbage(call: BaseHTTPRequestHandler) -> None:
    begin(call)
    call.wfile.write(b": a comment\n\ndata: [1, 2\n\n")


def _endless_line(call: BaseHTTPRequestHandler) -> None:
    begin(call)
    for _ in range(6):
        call.wfile.write(b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("play", "told"),
    [
        (_cut, "broke off"),
        (_error_inside, "broke off"),
        (_garbage, "not a JSON object"),
        (_endless_line, "more than the maximum"),
    ],
)
def test_stream_that_goes_wrong_ends_in_a_clean_error(play: Callable[[Any], None], told: str) -> None:
    def answer(call: BaseHTTPRequestHandler, body: Any) -> Any:
        play(call)
        return ...

    with Player(answer) as server, pytest.raises(EngineError, match=told) as caught:
        ask(Doors(server), {**ASKED, "stream": True})
    assert caught.value.http_status == 502
    assert "secret" not in caught.value.message


def test_whole_answer_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER", 1000)
    with Player(lambda call, body: whole("x" * 2000)) as server, pytest.raises(EngineError, match="more than"):
        ask(Doors(server))


def test_silent_server_is_504_after_the_time_given() -> None:
    done = threading.Event()

    def play(call: BaseHTTPRequestHandler, body: Any) -> Any:
        done.wait(10.0)
        return whole("too late")

    with Player(play) as server:
        begun = time.monotonic()
        with pytest.raises(EngineError, match="took too long") as caught:
            ask(Doors(server), timeout_s=0.3)
        done.set()
    assert caught.value.http_status == 504
    assert time.monotonic() - begun < 5.0


def test_stream_that_stops_in_the_middle_is_504_long_before_the_time_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.3)
    is_over = threading.Event()

    def play(call: BaseHTTPRequestHandler, body: Any) -> Any:
        begin(call)
        call.wfile.write(chunk("a"))
        call.wfile.flush()
        is_over.wait(10.0)
        return ...

    async def story() -> list[str]:
        upstream = UpstreamServer(Doors(hanging, other), 10.0)  # type: ignore[arg-type]
        try:
            with pytest.raises(EngineError, match="stopped in the middle of the answer") as caught:
                _ = [said async for said in upstream.ask(CHAT, {**ASKED, "stream": True}, ADAPTER)]
            assert caught.value.http_status == 504
            (said,) = [said async for said in upstream.ask(CHAT, ASKED, ADAPTER)]
            return [said["choices"][0]["message"]["content"]]
        finally:
            await upstream.close()

    with Player(play) as hanging, Player(lambda call, body: whole("fine")) as other:
        begun = time.monotonic()
        assert asyncio.run(story()) == ["fine"], "the next one is asked of the other replica"
        is_over.set()
    assert time.monotonic() - begun < 5.0


def test_dead_replica_is_passed_over_and_left_alone_for_a_while() -> None:
    async def several(target: Doors) -> list[str]:
        upstream = UpstreamServer(target, 10.0)  # type: ignore[arg-type]
        try:
            return [
                said["choices"][0]["message"]["content"]
                for _ in range(4)
                async for said in upstream.ask(CHAT, ASKED, ADAPTER)
            ]
        finally:
            await upstream.close()

    with VllmServer() as dead, VllmServer() as alive:
        alive.adapters[ADAPTER.name] = "/nowhere"
        target = Doors(dead, alive)
        dead.stop()
        begun = time.monotonic()
        assert asyncio.run(several(target)) == ["support@v7: hi"] * 4
        assert target.loads == []
        assert time.monotonic() - begun < 3.0


def test_least_busy_replica_is_asked() -> None:
    go = threading.Event()
    servers: list[Player] = []

    def play(call: BaseHTTPRequestHandler, body: Any) -> Any:
        go.wait(10.0)
        return whole("fine")

    async def several(target: Doors) -> list[int]:
        upstream = UpstreamServer(target, 10.0)  # type: ignore[arg-type]

        async def one() -> None:
            async for _ in upstream.ask(CHAT, ASKED, ADAPTER):
                pass

        waiting = [asyncio.create_task(one()) for _ in range(6)]
        while sum(len(server.calls) for server in servers) < 6:
            await asyncio.sleep(0.01)
        found = [len(server.calls) for server in servers]
        go.set()
        await asyncio.gather(*waiting)
        await upstream.close()
        return found

    with Player(play) as one, Player(play) as two:
        servers += [one, two]
        assert asyncio.run(several(Doors(one, two))) == [3, 3]


def test_closing_the_answer_closes_the_request_behind() -> None:
    closed = threading.Event()

    def play(call: BaseHTTPRequestHandler, body: Any) -> Any:
        begin(call)
        try:
            while True:
                call.wfile.write(chunk("on and on "))
                call.wfile.flush()
                time.sleep(0.005)
        except OSError:
            closed.set()
        return ...

    async def first_words(target: Doors) -> None:
        upstream = UpstreamServer(target, 10.0)  # type: ignore[arg-type]
        chunks: AsyncIterator[dict[str, Any]] = upstream.ask(CHAT, {**ASKED, "stream": True}, ADAPTER)
        await anext(chunks)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(closed.wait, 5.0)
        assert upstream._num_active[target.servers[0].url] == 0
        await upstream.close()

    with Player(play) as server:
        asyncio.run(first_words(Doors(server)))
