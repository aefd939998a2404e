"""kill -9 of a server between any two steps of a flip: what it serves afterwards is the old version or the new one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import drill_target
import pytest
import sqlalchemy as sa

from support import tables
from support.candidates import a_candidate
from support.flips import LETTERS, a_workspace_of_letters, letter_of, references_of
from support.gateway import PROFILE, ServerProcess, a_server, ask
from support.native import a_base_ref
from tunesmith.client import Client

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

TARGETS = [{"name": "engine", "kind": "drill-embedded"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Version 1 is live."""
    with a_workspace_of_letters(tmp_path_factory.mktemp("killed") / "ws", 1) as client:
        yield client


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drill_target.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()


def a_letter_to_deploy(client: Client, targets: Sequence[dict[str, Any]] = TARGETS, like: str = "") -> tuple[str, str]:
    """The next version, promoted against what is live; its name and its run. `like`: judged with another's answers."""
    with client.serving.session.database.read() as tx:
        version = tx.conn.execute(sa.select(sa.func.max(tables.adapters.c.version))).scalar_one() + 1
    base = client.workspace.root / "models" / "tiny"
    folder = client.workspace.adapters_dir / letter_of(f"@v{version}")
    references = references_of(base, client.workspace.adapters_dir / like if like else folder)
    made = a_candidate(client, targets=targets, folder=folder, references=references, base=a_base_ref(base))
    assert made.version == version
    return made.name, str(made.run_id)


def deploy_while_the_server_is_killed(client: Client, at: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Deploy one version with a server that is killed in front of the step with that number; the steps until then."""
    live = client.adapters.live(PROFILE)
    assert live is not None
    old, (new, run_id) = live.name, a_letter_to_deploy(client)
    worker = client.system.worker(["deploy", "watch"])
    with a_server(client.workspace.root) as server:
        assert answer(server) == (old, letter_of(old) * 6)
        victim = drill_target.Victim(server.process, at, worker.stop)
        monkeypatch.setattr(drill_target, "victim", victim)
        worker.run(until_idle=True)
    made = victim.steps[:at]
    if len(made) < at:
        assert client.runs.get(run_id).state == "deployed", client.runs.get(run_id).reason
        return made
    wanted = client.adapters.live(PROFILE)
    assert wanted is not None
    assert wanted.name in (old, new)
    with a_server(client.workspace.root) as server:
        assert answer(server) == (wanted.name, letter_of(wanted.name) * 6), made
        client.system.worker(["deploy", "watch"]).run(until_idle=True)
        assert client.runs.get(run_id).state == "deployed", client.runs.get(run_id).reason
        assert answer(server) == (new, letter_of(new) * 6)
    return made


def answer(server: ServerProcess) -> tuple[str, str]:
    said = ask(server, max_tokens=6)
    return said.model, said.choices[0].message.content


def test_server_that_merely_runs_is_checked_and_brought_along(client: Client) -> None:
    """The profile names a directory only; but `tunesmith serve` answers for it, so it has to agree."""
    with a_server(client.workspace.root) as server:
        before = answer(server)
        _, refused = a_letter_to_deploy(client, [{}], like=LETTERS[-1])
        client.system.worker().run(until_idle=True)
        run = client.runs.get(refused)
        assert run.state == "held"
        assert run.reason.startswith("target tunesmith serve does not answer as it was trained"), run.reason
        assert answer(server) == before
        new, run_id = a_letter_to_deploy(client, [{}])
        client.system.worker().run(until_idle=True)
        assert client.runs.get(run_id).state == "deployed", client.runs.get(run_id).reason
        assert answer(server) == (new, letter_of(new) * 6)
        seen = {each["target"]: each["observed"] for each in client.adapters.deployment(PROFILE).targets}
        assert seen == {"directory": new, "tunesmith serve": new}
        [told] = [each.reason for each in client.adapters.show(new).events if "parity" in each.reason]
        assert "directory cannot be asked" in told
        assert "0.001 allowed (the same libraries in float32)" in told
    client.system.worker().run(until_idle=True)
    [left] = client.adapters.deployment(PROFILE).targets
    assert (left["target"], left["error"]) == ("directory", None), "a server that is gone is nobody's trouble"


def test_server_killed_between_the_flip_in_the_store_and_its_own_serves_the_new_version(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the steps; all of them are a drill of `make soak`."""
    steps = deploy_while_the_server_is_killed(client, 6, monkeypatch)
    assert steps == ["refusal", "load", "probe", "loaded", "load", "flip"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_server_killed_in_front_of_every_step_of_a_flip_serves_old_or_new(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, steps = 0, []
    while len(steps := deploy_while_the_server_is_killed(client, at := at + 1, monkeypatch)) == at:
        print(f"killed in front of step {at}, {steps[-1]}")
    assert at > 8, steps
