"""What a name means: moved only to what is ready, never to what was revoked; and the control routes of a server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from support import tables
from support.gateway import (
    PROFILE,
    ServerProcess,
    a_served_workspace,
    a_server,
    ask,
    engine_of,
    frozen_engine,
    in_background,
    make_live,
    num_in_use,
)
from support.rows import force
from support.workspaces import wait_for
from tunesmith.cli.system import _show_ready
from tunesmith.client import Client
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.serving.gateway.server import Ready


def serving(server: ServerProcess) -> str:
    return str(server.health()["serving"][PROFILE])


def refused(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with server.http(headers={"Authorization": f"Bearer {server.token}"}) as http:
        answer = http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["code"]


def test_nothing_is_loaded_before_it_is_asked_for(base: Path, tmp_path: Path) -> None:
    with a_served_workspace(tmp_path / "ws", base) as client, a_server(client.workspace.root) as fresh:
        health = fresh.health()
        assert health["serving"] == {PROFILE: "support@v1"}
        assert health["engines"] == []
        assert fresh.control("/control/state")["loaded"] == []


def test_a_version_that_cannot_be_loaded_never_gets_the_name(server: ServerProcess, client: Client) -> None:
    database = client.serving.session.database
    assert ask(server).model == "support@v1"
    weights = client.workspace.data_dir / "adapters" / "support-3" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    make_live(database, 3)
    wait_for(lambda: PROFILE in server.health()["problems"])
    assert refused(server, "/control/flip", {"profile": PROFILE}) == (503, "not_flipped")
    assert (serving(server), ask(server).model) == ("support@v1", "support@v1")
    weights.write_bytes(whole)
    wait_for(lambda: serving(server) == "support@v3")
    assert server.health()["problems"] == {}
    assert ask(server).model == "support@v3"
    make_live(database, 1)
    wait_for(lambda: serving(server) == "support@v1")


def test_an_answer_under_way_is_finished_by_the_version_it_began_with(server: ServerProcess, client: Client) -> None:
    alone = ask(server, model="support@v1").choices[0].message.content
    with frozen_engine(server):
        thread, results = in_background(ask, server)
        wait_for(lambda: num_in_use(server) == 1)
        make_live(client.serving.session.database, 2)
        status = refused(server, "/control/drain", {"name": "support@v1", "timeout_s": 0.2})
        assert status == (504, "not_drained")
    thread.join(120)
    assert results[0].model == "support@v1"
    assert results[0].choices[0].message.content == alone
    wait_for(lambda: serving(server) == "support@v2")
    assert server.control("/control/drain", {"name": "support@v1", "timeout_s": 5})["drained"]
    assert ask(server).model == "support@v2"
    make_live(client.serving.session.database, 1)
    wait_for(lambda: serving(server) == "support@v1")


def test_control_routes_load_probe_and_unload_exact_versions(server: ServerProcess, client: Client) -> None:
    adapter = client.adapters.show("support@v2")
    about = {"profile": PROFILE, "name": "support@v2", "path": str(adapter.path), "digest": adapter.digest}
    server.control("/control/load", about)
    assert "support@v2" in server.control("/control/state")["loaded"]
    prompts = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    body = {"profile": PROFILE, "name": "support@v2", "prompts": prompts, "max_tokens": 8}
    readings = server.control("/control/probe", body)["readings"]
    assert (
        next(reading["answer_text"] for reading in readings)
        == ask(server, model="support@v2", max_tokens=8).choices[0].message.content
    )
    assert all(len(reading["log_probs"]) == len(reading["answer_ids"]) for reading in readings)
    server.control("/control/unload", {"name": "support@v2"})
    assert "support@v2" not in server.control("/control/state")["loaded"]
    assert ask(server, model="support@v2").model == "support@v2", "it comes back when it is asked for"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("load", {"profile": PROFILE, "name": "support@v2", "path": "/x", "digest": "0"}, (400, "digest_mismatch")),
        ("load", {"profile": "other", "name": "support@v2", "path": "/x", "digest": "0"}, (400, "invalid_value")),
        ("load", {"profile": PROFILE, "name": "support", "path": "/x", "digest": "0"}, (400, "invalid_value")),
        ("load", {"profile": PROFILE, "name": "support@v77", "path": "/x", "digest": "0"}, (404, "model_not_found")),
        ("load", {"profile": PROFILE}, (400, "invalid_value")),
        ("flip", {"profile": "nobody"}, (404, "not_found")),
        ("flip", {"profile": PROFILE, "to": "support@v2"}, (400, "unknown_parameter")),
        ("drain", {"name": "support@v1", "timeout_s": -1}, (400, "invalid_value")),
        ("probe", {"profile": PROFILE, "name": "support@v1", "prompts": [], "max_tokens": 1}, (400, "invalid_value")),
        ("unload", {"name": "support@v1"}, (422, "is_live")),
    ],
)
def test_control_routes_refuse_what_the_store_does_not_say(
    server: ServerProcess, path: str, body: dict[str, Any], expected: tuple[int, str]
) -> None:
    assert refused(server, f"/control/{path}", body) == expected


def test_a_revoked_version_is_served_to_nobody_also_where_it_was_live(server: ServerProcess, client: Client) -> None:
    database = client.serving.session.database

    def set_state(name: str, state: AdapterState) -> AdapterState:
        """Returns the state before."""
        with database.write() as tx:
            adapter = adapters.find(tx, name)
            force(tx, tables.adapters, adapter.id, state=state)
        return adapter.state

    ask(server, model="support@v3")
    before = set_state("support@v3", AdapterState.REVOKED)
    server.control("/control/flip", {"profile": PROFILE})
    with pytest.raises(openai.NotFoundError, match="revoked"):
        ask(server, model="support@v3")
    set_state("support@v1", AdapterState.REVOKED)
    wait_for(lambda: serving(server) == "support@base")
    assert ask(server).model == "support@base"
    set_state("support@v3", before)  # other tests of this module have the same server
    set_state("support@v1", AdapterState.LIVE)
    wait_for(lambda: serving(server) == "support@v1")


def test_a_killed_engine_comes_back_with_its_adapters(server: ServerProcess) -> None:
    before = ask(server, model="support@v2").choices[0].message.content
    os.kill(engine_of(server), signal.SIGKILL)
    assert ask(server, model="support@v2").choices[0].message.content == before


def test_a_name_that_means_nothing_is_answered_with_what_to_do(server: ServerProcess, client: Client) -> None:
    broken = client.workspace.profiles_dir / "bad.yaml"
    broken.write_text("base: {path: 7\n")
    try:
        wait_for(lambda: "bad" in server.health()["problems"])
        for model, told in (
            ("bad", "tunesmith profile check bad"),
            ("support@v9", "GET /v1/models"),
            ("suport", "did you mean"),
        ):
            with pytest.raises(openai.NotFoundError, match=told) as caught:
                ask(server, model=model)
            assert "adapter list" not in str(caught.value)
            assert caught.value.code == "model_not_found"
    finally:
        broken.unlink()
    wait_for(lambda: server.health()["status"] == "ok")


def test_the_first_lines_of_a_server_say_what_is_wrong_and_how_others_ask(capsys: pytest.CaptureFixture[str]) -> None:
    _show_ready(Ready("srv-1", "http://127.0.0.1:1", {}, True, {"support": "it is broken"}, 0))
    told = capsys.readouterr().out
    assert "support is not served: it is broken" in told
    assert "serve.allowed_hosts; it is empty" in told
    assert "no profile yet" not in told
    _show_ready(Ready("srv-1", "http://127.0.0.1:1", {}, False, {}))
    told = capsys.readouterr().out
    assert "no profile yet" in told
    assert "allowed_hosts" not in told


def test_what_cannot_be_served_is_told_before_and_after_it_is_asked_for(base: Path, tmp_path: Path) -> None:
    root = tmp_path / "ws"
    client = a_served_workspace(root, base, num_versions=1)
    model, adapter = root / "models" / "tiny", client.workspace.data_dir / "adapters" / "support-1"
    model.rename(tmp_path / "gone")
    with a_server(root) as server:
        health = server.health()
        assert (health["status"], "missing" in health["problems"][PROFILE]) == ("degraded", True)
        wait_for(lambda: "support cannot answer: its base model" in server.log.read_text())
        told = server.log.read_text()
        assert f"the folder {model}, is missing; put it there, or set base.path in the profile" in told
        assert "support = support" not in told
        assert str(model) not in str(health), "callers are not told where the files of the server are"
        assert [each.state for each in client.system.doctor() if each.name == "base of support"] == ["broken"]
        (tmp_path / "gone").rename(model)
        wait_for(lambda: server.health()["status"] == "ok")
        adapter.rename(tmp_path / "adapter")
        wait_for(lambda: "support@v1 (support-1) is missing" in server.health()["problems"].get(PROFILE, ""))
        assert [each.state for each in client.system.doctor() if each.name == "adapter support@v1"] == ["broken"]
        (tmp_path / "adapter").rename(adapter)
        wait_for(lambda: server.health()["status"] == "ok")
        weights = adapter / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-8])
        for _ in range(3):
            with pytest.raises(openai.APIStatusError):
                ask(server)
        assert (server.health()["status"], list(server.health()["problems"])) == ("degraded", [PROFILE])
        assert server.log.read_text().count('version_unavailable version="support@v1"') == 1
        weights.write_bytes(whole)
        wait_for(lambda: in_background(ask, server)[0].join(120) or server.health()["status"] == "ok")
    client.close()
