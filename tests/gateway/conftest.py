"""One tiny base for all tests of the gateway, and one server per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.databases import postgres, sqlite_template  # noqa: F401 - fixtures
from support.engine import a_lively_base
from support.gateway import ServerProcess, a_served_workspace, a_server
from tunesmith.client import Client


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_lively_base(tmp_path_factory.mktemp("gateway") / "base")


@pytest.fixture(scope="module")
def client(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A workspace with three versions, the first of them live."""
    client = a_served_workspace(tmp_path_factory.mktemp("served") / "ws", base)
    yield client
    client.close()


@pytest.fixture(scope="module")
def server(client: Client) -> Iterator[ServerProcess]:
    with a_server(client.workspace.root) as process:
        yield process
