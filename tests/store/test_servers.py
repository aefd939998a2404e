"""Servers in the store: heard of while they beat, forgotten when they stop, known again when they were forgotten."""

from __future__ import annotations

import time

import pytest
from sqlalchemy.exc import IntegrityError

from tunesmith.core.clock import utc_now
from tunesmith.programs.device.queries import servers
from tunesmith.programs.device.queries.servers import Server
from tunesmith.programs.device.rules import ServerState
from tunesmith.store.database import Database


def a_row(server_id: str = "srv-1") -> Server:
    return Server(
        id=server_id,
        host="here",
        process="{}",
        url="http://127.0.0.1:1",
        device="cpu",
        state=ServerState.SERVING,
        serving={},
        counts={},
        started_at=utc_now(),
    )


def test_a_server_is_alive_while_it_beats_and_says_what_it_serves(database: Database) -> None:
    with database.write() as tx:
        servers.register(tx, a_row(), 30.0)
        assert servers.heartbeat(
            tx, "srv-1", 30.0, state=ServerState.ASIDE, serving={"support": "support@v2"}, counts={"answers": 3}
        )
    with database.read() as tx:
        (found,) = servers.alive(tx)
    assert (found.state, found.serving, found.counts) == (ServerState.ASIDE, {"support": "support@v2"}, {"answers": 3})


def test_a_server_that_stopped_beating_is_forgotten_and_has_to_register_again(database: Database) -> None:
    with database.write() as tx:
        servers.register(tx, a_row("srv-dead"), 0.01)
        servers.register(tx, a_row("srv-alive"), 30.0)
    time.sleep(0.05)
    with database.write() as tx:
        assert [server.id for server in servers.alive(tx)] == ["srv-alive"]
        assert servers.remove_expired(tx) == 1
        assert not servers.heartbeat(tx, "srv-dead", 30.0, state=ServerState.SERVING, serving={}, counts={})
        assert [server.id for server in servers.alive(tx)] == ["srv-alive"]


def test_a_server_that_leaves_is_gone_and_an_id_is_used_once(database: Database) -> None:
    with database.write() as tx:
        servers.register(tx, a_row(), 30.0)
    with pytest.raises(IntegrityError), database.write() as tx:
        servers.register(tx, a_row(), 30.0)
    with database.write() as tx:
        servers.leave(tx, "srv-1")
        servers.leave(tx, "srv-1")
        assert servers.alive(tx) == []
