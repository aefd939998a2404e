"""Thousands of connections on which nothing is asked: whoever asks is answered, nobody is cut off in an answer."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.gateway import ServerProcess, a_served_workspace, ask, frozen_engine, in_background, num_in_use, warm
from support.workspaces import wait_for
from tunesmith.client import Client

FILES = 256
"""The server's limit of open files."""


@pytest.fixture(scope="module")
def crowded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Client]]:
    """A server that may open few files, and a test that may open many."""
    client = a_served_workspace(tmp_path_factory.mktemp("crowded") / "ws", base, num_versions=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, hard))
    try:
        server = ServerProcess(client.workspace.root)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 10_000 else 10_000, hard))
    yield server, client
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server.end()
    client.close()


@contextmanager
def idle_connections(
    server: ServerProcess, num: int, *, source: str = "127.0.0.1", says: bytes = b""
) -> Iterator[None]:
    """So many of them, opened again and again: whoever is hung up on is followed by a new one."""
    where = urlsplit(server.url)
    held: deque[socket.socket] = deque()
    is_over, are_there = threading.Event(), threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                one = socket.create_connection((where.hostname or "", where.port or 0), 5.0, (source, 0))
                held.append(one)
                one.sendall(says)
            if len(held) >= num:
                are_there.set()
                held.popleft().close()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        assert are_there.wait(60.0)
        yield
    finally:
        is_over.set()
        thread.join()
        for one in held:
            one.close()


def check_served(server: ServerProcess, num: int) -> None:
    for _ in range(num):
        with server.http(timeout=10.0) as http:
            assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("says", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Drip: "])
def test_more_idle_connections_than_files_leave_the_server_answering(
    crowded: tuple[ServerProcess, Client], says: bytes
) -> None:
    server, _ = crowded
    with idle_connections(server, 600, says=says):
        check_served(server, 20)
    assert server.health()["status"] == "ok"
    told = server.log.read_text()
    assert "Traceback" not in told
    assert len(told.splitlines()) < 30


@pytest.mark.soak
@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n"])
def test_four_thousand_idle_connections_fail_no_request(crowded: tuple[ServerProcess, Client], says: bytes) -> None:
    server, _ = crowded
    with idle_connections(server, 4000, says=says):
        check_served(server, 200)


def test_an_answer_under_way_is_never_cut_off_for_the_idle(crowded: tuple[ServerProcess, Client]) -> None:
    server, client = crowded
    warm(server, client)
    with frozen_engine(server):
        thread, results = in_background(ask, server)
        wait_for(lambda: num_in_use(server) == 1)
        with idle_connections(server, 400):
            check_served(server, 3)
    thread.join(120)
    assert results[0].choices[0].message.content


def test_the_idle_of_one_address_do_not_push_out_those_of_another(crowded: tuple[ServerProcess, Client]) -> None:
    """Ours is idle longer than all of theirs, and is still there."""
    server, _ = crowded
    where = urlsplit(server.url)
    asked = f"GET /v1/models HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode()
    with socket.create_connection((where.hostname or "", where.port or 0), 10.0, ("127.0.0.2", 0)) as ours:
        ours.sendall(asked)
        assert whole_answer(ours).startswith(b"HTTP/1.1 200")
        with idle_connections(server, 600):
            check_served(server, 3)
            ours.sendall(asked)
            assert whole_answer(ours).startswith(b"HTTP/1.1 200")


def whole_answer(connection: socket.socket) -> bytes:
    """Head and body, which may come apart."""
    told = b""
    while (length := re.search(rb"(?i)content-length: (\d+)(?s:.*?)\r\n\r\n", told)) is None:
        told += more_of(connection)
    while len(told) < length.end() + int(length[1]):
        told += more_of(connection)
    return told


def more_of(connection: socket.socket) -> bytes:
    received = connection.recv(4096)
    assert received, "the server has closed the connection"
    return received
