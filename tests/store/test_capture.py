"""`client.capture`: never in the application's way, nothing kept twice, everything counted, on both databases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.databases import Postgres
from support.workspaces import PROFILE, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import NotFound, UsageError
from tunesmith.experience.capture_queue import CaptureQueue
from tunesmith.experience.queries import candidates
from tunesmith.store.database import Database


def _client(folder: Path, store_url: str, **capture: Any) -> Client:
    policy = {"experience": {"capture": capture}}
    return a_workspace(folder, profile=policy, settings={"store": {"url": store_url}})


def _talk(number: int, answer: str = "Yes.") -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"{number}: {answer}"}]


def _keys(database: Database) -> list[str]:
    with database.read() as tx:
        return list(tx.conn.execute(sa.select(tables.experiences.c.natural_key)).scalars())


def test_what_flush_counts_as_stored_is_in_the_store(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        assert all(client.capture(PROFILE, _talk(n), key=str(n), session="s") for n in range(300))
        assert client.capture(PROFILE, _talk(0), key="0")
        counts = client.capture.flush(60)
        assert (counts.num_accepted, counts.num_stored, counts.num_known, counts.num_pending) == (301, 300, 1, 0)
        assert sorted(map(int, _keys(database))) == list(range(300))
        first = client.experiences.list(limit=1)[0]
        assert (first.source, first.session) == ("capture", "s")


def test_closing_the_client_flushes(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        for number in range(20):
            client.capture(PROFILE, _talk(number))
    assert len(_keys(database)) == 20
    assert client.capture(PROFILE, _talk(99)) is False
    assert client.capture.counts.num_dropped == 1


def test_what_is_wrong_is_refused_counted_and_spoils_nothing_else(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        wrong: list[Any] = [[], [{"role": "user"}], [{"role": "user", "content": "a\0"}], _talk(1)[:1]]
        for messages in wrong:
            client.capture(PROFILE, messages)
        assert client.capture(PROFILE, 5) is False  # type: ignore[arg-type]
        client.capture("nobody", _talk(1))
        client.capture(PROFILE, _talk(1), sesion="s")  # type: ignore[call-arg]
        client.capture(PROFILE, _talk(1), key="k")
        client.capture(PROFILE, _talk(2), key="k")  # the same key with another conversation
        client.capture(PROFILE, _talk(3))
        counts = client.capture.flush(60)
    assert (counts.num_accepted, counts.num_refused, counts.num_pending) == (10, 8, 0)
    assert counts.num_stored == 2
    assert counts.last_problem
    assert len(_keys(database)) == 2


def test_full_queue_drops_at_once_and_counts(tmp_path: Path, sqlite_store: Path) -> None:
    url = f"sqlite:///{sqlite_store}"
    client = _client(tmp_path, url)
    client.experiences.add(PROFILE, _talk(0))
    queue = CaptureQueue(client._session, max_pending=10)
    with client._session.database.write():  # nobody else can write: the thread waits, the application does not
        begun = time.monotonic()
        accepted = [queue(PROFILE, _talk(n)) for n in range(1, 200)]
        assert time.monotonic() - begun < 1.0
        assert 10 <= sum(accepted) <= 10 + 64  # what waits, and one batch that the thread has taken
        assert queue.counts.num_dropped == accepted.count(False)
        assert "wait already" in str(queue.counts.last_problem)
    counts = queue.close(30)
    assert counts.num_stored == sum(accepted)
    assert counts.num_pending == 0
    assert len(client.experiences.list(limit=300)) == 1 + sum(accepted)
    client.close()


def test_store_that_is_down_costs_the_captures_and_nothing_else(
    tmp_path: Path, postgres: Postgres, postgres_store: str
) -> None:
    client = _client(tmp_path, postgres.url(postgres_store))
    client.experiences.add(PROFILE, _talk(0))
    with CaptureQueue(client._session, patience_s=0.3) as queue:
        queue(PROFILE, _talk(1))
        assert queue.flush(30).num_stored == 1
        postgres.stop()
        try:
            begun = time.monotonic()
            assert all(queue(PROFILE, _talk(n)) for n in range(2, 12))
            assert time.monotonic() - begun < 0.5
            down = queue.flush(60)
        finally:
            postgres.start()
        assert (down.num_stored, down.num_dropped, down.num_pending) == (1, 10, 0)
        assert "cannot be used" in str(down.last_problem)
        queue(PROFILE, _talk(12))
        assert queue.flush(60).num_stored == 2  # it has come back
    client.close()


def test_short_outage_loses_nothing(tmp_path: Path, postgres: Postgres, postgres_store: str) -> None:
    client = _client(tmp_path, postgres.url(postgres_store))
    client.experiences.add(PROFILE, _talk(0))
    with CaptureQueue(client._session, patience_s=30) as queue:
        postgres.stop()
        timer = threading.Timer(0.5, postgres.start)
        timer.start()
        for number in range(1, 6):
            queue(PROFILE, _talk(number))
        counts = queue.flush(60)
        timer.join()
    assert (counts.num_stored, counts.num_dropped) == (5, 0)
    client.close()


def test_policy_decides_by_key_what_is_captured(tmp_path: Path, sqlite_store: Path) -> None:
    with _client(tmp_path / "half", f"sqlite:///{sqlite_store}", share=0.5) as client:
        for _ in range(2):  # the same ones both times
            for number in range(200):
                client.capture(PROFILE, _talk(number), key=f"key {number}")
            counts = client.capture.flush(60)
        assert 70 <= counts.num_stored <= 130
        assert (counts.num_known, counts.num_skipped) == (counts.num_stored, 2 * (200 - counts.num_stored))
    with _client(tmp_path / "off", f"sqlite:///{sqlite_store}", enabled=False) as client:
        client.capture(PROFILE, _talk(1))
        assert client.capture.flush(60).num_skipped == 1


def test_application_may_change_its_messages_after_the_call(tmp_path: Path, sqlite_store: Path) -> None:
    with _client(tmp_path, f"sqlite:///{sqlite_store}") as client:
        messages = _talk(1)
        client.capture(PROFILE, messages)
        messages[1]["content"] = "changed"
        messages.append({"role": "user", "content": "more"})
        client.capture.flush(60)
        assert client.experiences.list()[0].answer == "1: Yes."


@pytest.mark.slow
def test_captures_of_a_process_that_just_ends_are_stored(tmp_path: Path, store_url: str, database: Database) -> None:
    client = _client(tmp_path, store_url)
    code = (
        "import sys; from tunesmith import Client; client = Client(sys.argv[1])\n"
        "for n in range(5): client.capture('support', [{'role': 'user', 'content': f'{n}?'},"
        " {'role': 'assistant', 'content': 'yes'}])"
    )
    subprocess.run([sys.executable, "-c", code, client.workspace.root], check=True, timeout=60)
    assert len(_keys(database)) == 5
    client.close()


@pytest.mark.slow
def test_forked_process_stores_its_own_captures_once(tmp_path: Path, sqlite_store: Path) -> None:
    client = _client(tmp_path, f"sqlite:///{sqlite_store}")
    code = (
        "import os, sys; from tunesmith import Client; client = Client(sys.argv[1])\n"
        "talk = lambda q: [{'role': 'user', 'content': q}, {'role': 'assistant', 'content': 'yes'}]\n"
        "client.capture('support', talk('parent')); child = os.fork()\n"
        "if not child:\n"
        "    client.capture('support', talk('child')); print(client.capture.flush(30).num_stored); os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-u", "-c", code, client.workspace.root],
        check=True, timeout=60, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "1\n"
    assert sorted(found.question for found in client.experiences.list()) == ["child", "parent"]
    client.close()


@pytest.mark.parametrize("profile", [5, ["support"], "\ud800", "", "no such"], ids=repr)
def test_capture_for_what_is_no_profile_is_refused_alone(tmp_path: Path, store_url: str, profile: Any) -> None:
    with _client(tmp_path, store_url) as client:
        for number in range(6):
            client.capture(PROFILE, _talk(number))
            client.capture(profile, _talk(number))
        counts = client.capture.flush()
    assert (counts.num_stored, counts.num_refused, counts.num_dropped) == (6, 6, 0)


@pytest.mark.parametrize(
    "captured_at",
    [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=2))),
        datetime(9999, 1, 1, tzinfo=UTC),
        datetime(2026, 1, 1),
        "2026-01-01",
    ],
    ids=str,
)
def test_capture_at_an_instant_that_cannot_be_is_refused(tmp_path: Path, store_url: str, captured_at: Any) -> None:
    with _client(tmp_path, store_url) as client:
        with pytest.raises(UsageError, match="captured_at"):
            client.experiences.add(PROFILE, _talk(1), captured_at=captured_at)
        assert client.experiences.list() == []


def test_instant_that_no_calendar_shows_can_still_be_read(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        added = client.experiences.add(PROFILE, _talk(1))
        with database.write() as tx:
            tx.execute(f"UPDATE experiences SET captured_at = {2**62}")
        assert client.experiences.show(added.id).experience.captured_at.year == 9999
        assert client.experiences.forget([added.id], reason="asked").ids == (added.id,)


@pytest.mark.parametrize(
    ("answer", "why"),
    [("Order 17 is", "was cut short"), ("", "is empty"), (" \u200b\n", "is empty"), ("a\0b", "no database stores"),
     ("a\x1b[31mb", "was cut short")],
)  # fmt: skip
def test_an_answer_that_is_no_example_is_kept_and_its_correction_is_learnt(
    tmp_path: Path, store_url: str, database: Database, answer: str, why: str
) -> None:
    with _client(tmp_path, store_url) as client:
        said = [{"role": "user", "content": "Where is order 17?"}, {"role": "assistant", "content": answer}]
        client.capture(PROFILE, said, key="cut", is_cut=True)
        assert client.capture.flush(30).num_stored == 1
        rated = client.feedback.add(f"{PROFILE}:cut", "helpful")
        assert (rated.class_name, why in " ".join(rated.reasons)) == ("ambiguous", True)
        client.feedback.add(f"{PROFILE}:cut", correction="Order 17 is in Rome.")
        with database.read() as tx:
            (candidate,) = candidates.page(tx, PROFILE, 0, 10)
        assert (candidate.class_name, candidate.correction) == ("ambiguous", "Order 17 is in Rome.")


def test_feedback_right_after_a_capture_waits_until_it_is_stored(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        for number in range(3):
            client.capture(PROFILE, _talk(number), key=f"request-{number}")
            rated = client.feedback.add(f"{PROFILE}:request-{number}", "helpful", rater="ann")
            assert (rated.is_new, rated.feedback.mean) == (True, 1.0)


def test_readmes_lines_about_capture_run_as_they_stand(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    [lines] = [block for block in blocks if "client.capture(" in block]
    _client(tmp_path, store_url).close()
    (tmp_path / "ws").rename(tmp_path / "my-models")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(lines, names)
    client: Client = names["client"]
    [stored] = client.experiences.list()
    client.close()
    assert stored.feedback.num == 1


def test_feedback_waits_for_an_answer_that_another_process_is_just_storing(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client, Client(tmp_path / "ws") as server:
        client.experiences.add(PROFILE, _talk(0))  # the store is there
        timer = threading.Timer(0.5, lambda: server.experiences.add(PROFILE, _talk(1), key="chatcmpl-1"))
        timer.start()
        rated = client.feedback.add(f"{PROFILE}:chatcmpl-1", correction="It left on Monday.")
        timer.join()
        assert rated.feedback.num_corrections == 1


def test_feedback_about_an_answer_that_never_comes_is_refused_after_a_while(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        started = time.monotonic()
        with pytest.raises(NotFound, match=r"stored a moment later.*client\.capture\.flush.*`tunesmith serve`"):
            client.feedback.add(f"{PROFILE}:nobody", "helpful")
        assert time.monotonic() - started >= 3
        started = time.monotonic()
        for name in ("xp-nobody", "no-profile:nobody"):
            with pytest.raises(NotFound):
                client.feedback.add(name, "helpful")
        assert time.monotonic() - started < 3, "these can never come"
