"""A server's life: signals, a second server, a dead one, what it leaves behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from support.gateway import (
    PROFILE,
    ServerProcess,
    a_served_workspace,
    a_server,
    ask,
    frozen_engine,
    in_background,
    make_live,
    num_in_use,
    warm,
)
from support.workspaces import cli, wait_for
from tunesmith.client import Client


@pytest.fixture(scope="module")
def small(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = a_served_workspace(tmp_path_factory.mktemp("life") / "ws", base, num_versions=1)
    yield client
    client.close()


@pytest.fixture
def mortal(small: Client) -> Iterator[ServerProcess]:
    with a_server(small.workspace.root) as process:
        yield process


def test_term_finishes_what_is_under_way_and_leaves_nothing_behind(mortal: ServerProcess, small: Client) -> None:
    warm(mortal, small)
    num_before = len(small.experiences.list(limit=1000))
    with frozen_engine(mortal) as engine:
        thread, results = in_background(ask, mortal)
        wait_for(lambda: num_in_use(mortal) == 1)
        mortal.process.terminate()
        wait_for(lambda: "stopping" in mortal.log.read_text().rpartition("serving at")[2])
    thread.join(120)
    assert results[0].choices[0].message.content
    assert mortal.process.wait(30) == 0
    with pytest.raises(openai.APIConnectionError):
        ask(mortal)
    assert not list((mortal.root / ".tunesmith" / "serve").glob("*.json"))
    assert mortal.id not in [server.id for server in small.serving.list()]
    assert len(small.experiences.list(limit=1000)) == num_before + 1, "what was answered last is kept"
    assert not Path(f"/proc/{engine}").exists()


def test_a_second_term_ends_it_now_and_its_engine_with_it(mortal: ServerProcess, small: Client) -> None:
    warm(mortal, small)
    with frozen_engine(mortal) as engine:
        in_background(ask, mortal)
        wait_for(lambda: num_in_use(mortal) == 1)
        begun = time.monotonic()
        mortal.process.terminate()
        wait_for(lambda: "stopping" in mortal.log.read_text().rpartition("serving at")[2])
        mortal.process.terminate()
        assert mortal.process.wait(10) == 1
        assert time.monotonic() - begun < 5.0, "an orderly stop would have waited for the frozen engine"
        wait_for(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text(), 5.0)


def test_a_second_server_is_refused_with_the_address_of_the_first_and_a_dead_one_is_replaced(
    mortal: ServerProcess,
) -> None:
    refused = cli("serve", cwd=mortal.root)
    assert refused.code == 1
    assert mortal.url in refused.err
    assert "served already" in refused.err
    assert mortal.health()["status"] == "ok"
    mortal.process.kill()
    mortal.process.wait()
    with a_server(mortal.root) as after:
        assert after.id != mortal.id
        assert [path.stem for path in (mortal.root / ".tunesmith" / "serve").glob("*.json")] == [after.id]
        assert after.health()["serving"] == {PROFILE: "support@v1"}


def test_feedback_that_was_acknowledged_survives_a_kill(mortal: ServerProcess, small: Client) -> None:
    warm(mortal, small)
    answers = [
        ask(mortal, user=f"u{number}", messages=[{"role": "user", "content": f"say {number}"}]) for number in range(8)
    ]
    acknowledged: list[str] = []

    def rate(response_id: str) -> None:
        with mortal.http() as http:
            for number in range(1000):
                body = {"response_id": response_id, "rating": "up", "rater": f"rater-{number}"}
                answer = http.post("/v1/feedback", json=body)
                assert answer.status_code == 200, answer.text
                acknowledged.append(answer.json()["id"])

    threads = [in_background(rate, answer.id)[0] for answer in answers]
    wait_for(lambda: len(acknowledged) > 40, 60)
    mortal.process.kill()
    for thread in threads:
        thread.join(120)
    stored: set[str] = set()
    for experience in small.experiences.list(limit=1000):
        stored |= {said.id for said in small.experiences.show(experience.id).feedback}
    assert len(acknowledged) > 40
    assert set(acknowledged) <= stored


def test_a_store_that_is_moved_away_or_replaced_under_a_server_is_noticed_and_followed_again(
    base: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ws"
    a_served_workspace(root, base, num_versions=2).close()
    away = tmp_path / "away"
    away.mkdir()
    with a_server(root) as server:
        answer = ask(server)
        body = {"response_id": answer.id, "rating": "up"}
        with server.http() as http:
            assert http.post("/v1/feedback", json=body).status_code == 200
            for file in filter(Path.is_file, (root / ".tunesmith").glob("store.db*")):
                file.rename(away / file.name)
            wait_for(lambda: "missing" in server.health()["store"])
            refused = http.post("/v1/feedback", json=body)
            assert (refused.status_code, bool(refused.headers.get("retry-after"))) == (503, True)
            assert ask(server).model == "support@v1", "answers flow"
            wait_for(lambda: server.health()["capture"]["num_dropped"] == 1, 20)
            assert not (root / ".tunesmith" / "store.db").exists(), "no new one is made in its place"
            for file in away.iterdir():
                shutil.copy2(file, root / ".tunesmith" / file.name)
            wait_for(lambda: server.health()["store"] == "ok")
            assert http.post("/v1/feedback", json={**body, "rater": "ann"}).json()["is_new"]
        after = ask(server)
        with Client(root, actor="user:test", environ={}) as client:
            wait_for(lambda: any(each.key == after.id for each in client.experiences.list(limit=10)))
            rated = next(each for each in client.experiences.list(limit=10) if each.key == answer.id)
            assert {said.rater for said in client.experiences.show(rated.id).feedback} == {"client", "ann"}
            make_live(client.serving.session.database, 2)
        wait_for(lambda: server.health()["serving"] == {PROFILE: "support@v2"})


def test_feedback_on_an_answer_that_a_locked_store_has_not_taken_yet_is_to_be_sent_again(
    mortal: ServerProcess, small: Client
) -> None:
    warm(mortal, small)
    with small.serving.session.database.write(), mortal.http() as http:
        answer = ask(mortal)
        early = http.post("/v1/feedback", json={"response_id": answer.id, "rating": "up"})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_kept_yet"), early.text
        assert int(early.headers["retry-after"]) > 0
        wait_for(lambda: "accepted no writes" in mortal.health()["store"])
        assert mortal.health()["status"] == "degraded"
    with mortal.http() as http:
        wait_for(lambda: mortal.health()["capture"]["num_pending"] == 0)
        assert http.post("/v1/feedback", json={"response_id": answer.id, "rating": "up"}).status_code == 200
    wait_for(lambda: mortal.health()["status"] == "ok")
