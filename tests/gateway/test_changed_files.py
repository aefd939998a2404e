"""Files that change under a server: nothing wrong is answered under a version's name, and no path is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from support.gateway import ServerProcess, a_served_workspace, a_server, ask, engine_of, warm
from support.workspaces import wait_for
from tunesmith.client import Client


@pytest.fixture(scope="module")
def doomed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, ServerProcess]]:
    client = a_served_workspace(tmp_path_factory.mktemp("changed") / "ws", base, num_versions=2)
    with a_server(client.workspace.root) as server:
        warm(server, client)
        yield client, server
    client.close()


def end_engine(server: ServerProcess) -> None:
    num_before = server.log.read_text().count("engine_died")
    os.kill(engine_of(server), signal.SIGKILL)
    wait_for(lambda: server.log.read_text().count("engine_died") > num_before)


def test_damaged_version_is_the_servers_fault_and_tells_no_path(doomed: tuple[Client, ServerProcess]) -> None:
    client, server = doomed
    weights = client.adapters.show("support@v2").path / "adapter_model.safetensors"
    weights.write_bytes(b"\0" * 100)
    with pytest.raises(openai.InternalServerError) as told:
        ask(server, model="support@v2")
    assert told.value.status_code == 503
    assert str(client.workspace.root) not in str(told.value)
    assert "/" not in told.value.body["message"]  # type: ignore[index]
    assert ask(server, model="support@v1").model == "support@v1"
    assert "adapter_model.safetensors" in server.log.read_text()


def test_base_changed_under_an_engine_that_restarts_is_never_asked(doomed: tuple[Client, ServerProcess]) -> None:
    client, server = doomed
    template = client.workspace.root / "models" / "tiny" / "chat_template.jinja"
    template.write_text(template.read_text() + " EVIL")
    assert ask(server, model="support@v1").model == "support@v1", "what is in memory is what it was"
    end_engine(server)
    with pytest.raises(openai.InternalServerError, match="different base model") as told:
        ask(server, model="support@v1")
    assert told.value.code == "base_changed"
    with pytest.raises(openai.InternalServerError, match="different base model"):
        ask(server, model="support@base")
    [finding] = [check for check in client.system.doctor() if check.name == "base of support"]
    assert finding.state == "broken"


def test_broken_base_tells_no_traceback_and_no_path(doomed: tuple[Client, ServerProcess]) -> None:
    client, server = doomed
    weights = client.workspace.root / "models" / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    end_engine(server)
    with pytest.raises(openai.InternalServerError) as told:
        ask(server, model="support@base")
    assert told.value.status_code == 503
    for secret in ("Traceback", "site-packages", ".py", str(client.workspace.root)):
        assert secret not in str(told.value)
    assert "engine_not_started" in server.log.read_text()
