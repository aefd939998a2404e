"""A drop folder that others can write to, and processes that are killed between any two of its steps."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.quick_processes import run_code
from support.workspaces import PROFILE, a_jsonl, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import NotFound, Refused
from tunesmith.orchestration.file_drop.rules import Answer
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.runs import Run

KILLED = """
import os, signal, sys
from tunesmith.client import Client

root, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = 0
MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")

def look(event, args):
    global seen
    if event in MOVES or (event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT):
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)

with Client(root, actor="user:test") as client:
    client._session.database
    sys.addaudithook(look)
    client.file_drops.answer(folder, once=True)
print(seen)
"""
"""One call that is killed just before the file operation of that number; else it tells how many there were."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path, options={"quality": 0.3, "steps": 2}) as made:
        made.campaigns.create(PROFILE, name="helpdesk")
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shared"
    made.mkdir(mode=0o750)
    a_jsonl(made / "data" / "new.jsonl")
    return made


def ask(folder: Path, request_id: str = "one", **changed: Any) -> Path:
    """As a program does that knows the rules: a whole file, renamed into place."""
    request = {"v": 1, "id": request_id, "campaign": "helpdesk", "data": "data/new.jsonl", **changed}
    (folder / "pending.tmp").write_text(json.dumps(request))
    return (folder / "pending.tmp").rename(folder / "pending.json")


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def refused(client: Client, folder: Path) -> str:
    """Why the one request was refused; nothing was opened, and it lies in the archive."""
    assert client.file_drops.answer(folder, once=True)
    answer = result(folder)
    assert (answer["state"], answer["is_final"], answer["run"]) == ("refused", True, None)
    assert all_runs(client) == []
    assert not os.path.lexists(folder / "pending.json")
    assert not os.path.lexists(folder / "working.json")
    [kept] = (folder / "archive").iterdir()
    assert json.loads((kept / "result.json").read_text()) == answer
    assert os.path.lexists(kept / "pending.json")
    return str(answer["reason"])


def all_runs(client: Client) -> list[Run]:
    with client._session.database.read() as tx:
        return runs.listing(tx)


def a_link(folder: Path) -> None:
    (folder / "elsewhere").write_text(json.dumps({"v": 1, "id": "one", "campaign": "helpdesk"}))
    (folder / "pending.json").symlink_to("elsewhere")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "huge": (lambda folder: (folder / "pending.json").write_bytes(b" " * 70_000), "it has more than 65536 bytes"),
    "pipe": (lambda folder: os.mkfifo(folder / "pending.json"), "it is not a plain file"),
    "folder": (lambda folder: (folder / "pending.json").mkdir(), "it is not a plain file"),
    "link": (a_link, "it is a symbolic link"),
    "dangling link": (lambda folder: (folder / "pending.json").symlink_to("/nowhere"), "it is a symbolic link"),
    "not UTF-8": (lambda folder: (folder / "pending.json").write_bytes(b'{"v": 1, "id": "\xff"}'), "it is not UTF-8"),
    "never finished": (lambda folder: (folder / "pending.json").write_text('{"v": 1, "id'), "it is not JSON: "),
    "key twice": (lambda folder: (folder / "pending.json").write_text('{"v": 1, "v": 1}'), "'v' stands there twice"),
    "out of the folder": (lambda folder: ask(folder, data="../ws/tunesmith.jsonl"), "data: must be a relative path"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_file_that_is_no_request_is_refused_and_archived(client: Client, folder: Path, kind: str) -> None:
    place, reason = HOSTILE[kind]
    place(folder)
    begun = time.monotonic()
    assert reason in refused(client, folder)
    assert time.monotonic() - begun < 10, "it never waits for a pipe"


def data_link(folder: Path) -> None:
    (folder / "data" / "new.jsonl").rename(folder / "secret.jsonl")
    (folder / "data" / "new.jsonl").symlink_to("../secret.jsonl")


def folder_link(folder: Path) -> None:
    (folder / "data").rename(folder.parent / "elsewhere")
    (folder / "data").symlink_to(folder.parent / "elsewhere")


def data_pipe(folder: Path) -> None:
    (folder / "data" / "new.jsonl").unlink()
    os.mkfifo(folder / "data" / "new.jsonl")


DATA: dict[str, tuple[Callable[[Path], Any], str]] = {
    "link": (data_link, "it is a symbolic link"),
    "link on the way": (folder_link, "has no plain folder 'data' on its way"),
    "pipe": (data_pipe, "it is not a plain file"),
    "gone": (lambda folder: (folder / "data" / "new.jsonl").unlink(), "No such file"),
    "no JSONL": (lambda folder: (folder / "data" / "new.jsonl").write_text("hello\n" * 9), "data.jsonl"),
    "hard link": (lambda folder: os.link(folder / "data" / "new.jsonl", folder / "x"), "it has a second name"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_not_a_plain_file_in_the_folder_is_refused(client: Client, folder: Path, kind: str) -> None:
    place, reason = DATA[kind]
    place(folder)
    ask(folder)
    assert reason in refused(client, folder)
    left = [path for path in (client.workspace.data_dir / "file_drop").iterdir() if path.suffix != ".lock"]
    assert left == [], "no copy stays behind"


def test_data_that_is_not_the_one_that_was_meant_is_refused(client: Client, folder: Path) -> None:
    ask(folder, data_sha256="0" * 64)
    assert "and not the one of data_sha256" in refused(client, folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_file_of_a_user_who_may_not_ask_is_refused(client: Client, folder: Path) -> None:
    os.chown(ask(folder), 4242, -1)
    assert "it belongs to user 4242, who may not ask here" in refused(client, folder)
    os.chown(ask(folder, data=None), 4242, -1)
    assert client.file_drops.answer(folder, once=True, allow_users=["4242"])
    assert "minimum new" in result(folder)["reason"], "it was read"
    with pytest.raises(NotFound, match="no user 'nobdy'; did you mean 'nobody'"):
        client.file_drops.answer(folder, once=True, allow_users=["nobdy"])


def test_folder_that_everybody_may_write_to_is_not_used(client: Client, folder: Path) -> None:
    ask(folder)
    folder.chmod(0o777)
    with pytest.raises(Refused, match="everybody may write"):
        client.file_drops.answer(folder, once=True)
    folder.chmod(0o750)
    with pytest.raises(NotFound, match="No such file"):
        client.file_drops.answer(folder / "none", once=True)
    assert (folder / "pending.json").is_file()


def test_links_that_lie_where_answers_go_are_replaced_and_never_followed(client: Client, folder: Path) -> None:
    precious = folder.parent / "precious"
    precious.write_text("mine")
    (folder / "result.json").symlink_to(precious)
    ask(folder, data=None)
    assert "minimum new" in refused(client, folder)
    assert precious.read_text() == "mine"
    kept = folder.parent / "kept"
    (folder / "archive").rename(kept)
    (folder / "archive").symlink_to(folder.parent)
    ask(folder, "two", data=None)
    with pytest.raises(OSError, match="shared/archive"):
        client.file_drops.answer(folder, once=True)
    (folder / "archive").unlink()
    kept.rename(folder / "archive")
    assert client.file_drops.answer(folder, once=True)
    assert len(list((folder / "archive").iterdir())) == 2


def test_answer_that_others_wrote_is_not_believed(client: Client, folder: Path) -> None:
    ask(folder)
    assert client.file_drops.answer(folder, once=True)
    [run] = all_runs(client)
    whole = result(folder)
    for changed in ({"is_final": True}, {"id": "../../x"}, {"taken_at": "never"}, {"more": 1}):
        (folder / "result.json").write_text(json.dumps({**whole, **changed}))
        assert client.file_drops.answer(folder, once=True)
        assert {**result(folder), "taken_at": ""} == {**whole, "taken_at": ""}
    assert all_runs(client) == [run]


def test_request_while_another_folder_opens_its_round_is_refused(client: Client, folder: Path) -> None:
    other = folder.parent / "other"
    other.mkdir()
    a_jsonl(other / "data" / "new.jsonl")
    ask(folder)
    ask(other)

    def meanwhile(answer: Answer) -> None:
        if answer.state == "taken":  # nothing is opened yet
            assert client.file_drops.answer(other, once=True)

    assert client.file_drops.answer(folder, once=True, tell=meanwhile)
    [run] = all_runs(client)
    assert (result(other)["run"], result(other)["state"]) == (run.id, "queued")
    assert (result(folder)["state"], result(folder)["run"]) == ("refused", None)


def test_half_written_request_gets_the_time_to_be_finished(client: Client, folder: Path) -> None:
    whole = json.dumps({"v": 1, "id": "slow", "campaign": "helpdesk"})
    with (folder / "pending.json").open("w") as sink:
        sink.write(whole[:9])
        sink.flush()

        def finish() -> None:
            time.sleep(0.3)
            sink.write(whole[9:])
            sink.flush()

        writer = threading.Thread(target=finish)
        writer.start()
        assert client.file_drops.answer(folder, once=True)
        writer.join()
    assert (result(folder)["id"], result(folder)["state"]) == ("slow", "refused")
    assert "minimum new" in result(folder)["reason"]


def test_archive_keeps_so_many_and_nothing_that_is_not_ours_goes(client: Client, folder: Path) -> None:
    (folder / "archive").mkdir()
    (folder / "archive" / "notes").write_text("of a person")
    for number in range(5):
        ask(folder, f"r{number}", campaign="none")
        assert client.file_drops.answer(folder, once=True, keep=2)
    names = sorted(path.name for path in (folder / "archive").iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["r3", "r4", "notes"]


def killed_at(client: Client, folder: Path, number: int) -> int:
    """How many file operations there were, if it was not killed."""
    ended = run_code(KILLED, client.workspace.root, folder, str(number))
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return int(ended.stdout) if ended.returncode == 0 else 0


def drill(client: Client, folder: Path, number: int) -> bool:
    """A request whose process is killed at that operation, when it opens the round and when it tells its end.

    False: there were fewer operations.
    """
    request_id = f"kill-{number}"
    before = {run.id for run in all_runs(client)}
    ask(folder, request_id)
    first = killed_at(client, folder, number)
    assert client.file_drops.answer(folder, once=True)
    [run] = [run for run in all_runs(client) if run.id not in before]
    answer = result(folder)
    assert (answer["id"], answer["run"], answer["state"]) == (request_id, run.id, "queued"), "neither lost nor doubled"
    client.runs.cancel(run.id)
    second = killed_at(client, folder, number)
    assert client.file_drops.answer(folder, once=True)
    assert len([each for each in all_runs(client) if each.id not in before]) == 1
    [kept] = [path for path in (folder / "archive").iterdir() if (path / "pending.json").exists()
              and path.name.endswith(f"Z-{request_id}")]  # fmt: skip
    assert json.loads((kept / "result.json").read_text())["state"] == "cancelled"
    assert json.loads((kept / "pending.json").read_text())["id"] == request_id
    assert result(folder)["state"] == "cancelled"
    assert not (folder / "working.json").exists()
    return not (first and second)


@pytest.mark.parametrize("number", [1, 3, 5, 9])
def test_process_killed_between_two_steps_neither_loses_nor_doubles_a_request(
    client: Client, folder: Path, number: int
) -> None:
    assert drill(client, folder, number)


@pytest.mark.soak
def test_process_killed_at_every_file_operation(client: Client, folder: Path) -> None:
    number = 1
    while drill(client, folder, number):
        number += 1
    assert number > 15
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
