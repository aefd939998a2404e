"""Which requests the gateway counts for the watch, and that none is lost while the store is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import Unreachable
from support.workspaces import a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import StoreError
from tunesmith.experience.rules.traffic import FAILED, range_of
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.bodies import ClientDisconnected
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.traffic import TrafficCounter


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path) as client:
        yield client


def stored(client: Client) -> dict[tuple[str, int], int]:
    with client.serving.session.database.read() as tx:
        return {(row["version"], row["range"]): row["num"] for row in tx.all(sa.select(tables.traffic))}


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (EngineError("it broke"), True),
        (EngineError("x", code="upstream", http_status=502), True),
        (ApiError(504, "too late", code="timeout"), True),
        (RuntimeError("a bug"), True),
        (EngineError("x", code="engine_died", http_status=503), True),
        (EngineError("x", code="busy", http_status=503), False),
        (EngineError("x", code="upstream", http_status=503), False),
        (EngineError("x", code="upstream", http_status=429), False),
        (EngineError("x", code="invalid_prompt", http_status=400), False),
        (ClientDisconnected(), False),
        (ConnectionResetError(), False),
    ],
)
def test_failures_that_speak_against_a_version_are_counted(client: Client, error: Exception, counts: bool) -> None:
    counter = TrafficCounter(client.serving.session)
    counter.failed("support", "support@v1", error)
    counter.flush()
    assert stored(client) == ({("support@v1", FAILED): 1} if counts else {})


def test_answers_that_end_with_one_engine_are_one_failure(client: Client) -> None:
    counter = TrafficCounter(client.serving.session)
    for _ in range(30):
        counter.failed("support", "support@v1", EngineError("x", code="engine_died", http_status=503))
    counter.flush()
    assert stored(client) == {("support@v1", FAILED): 1}


def test_counts_wait_while_the_store_is_away(client: Client) -> None:
    database = Unreachable(client.serving.session.database)
    session: Any = SimpleNamespace(database=database)
    counter = TrafficCounter(session)
    counter.answered("support", "support@v1", 0.25)
    database.is_down = True
    with pytest.raises(StoreError):
        counter.flush()
    counter.answered("support", "support@v1", 0.25)
    counter.answered("support", "support@v2", 4.0)
    database.is_down = False
    counter.flush()
    counter.flush()
    assert stored(client) == {("support@v1", range_of(0.25)): 2, ("support@v2", range_of(4.0)): 1}
