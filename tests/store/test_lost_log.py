"""SQLite's other files: a removed or swapped log loses nothing in silence; what is no file is refused at once."""

from __future__ import annotations

import os
import random
import shutil
import socket
import time
from pathlib import Path

import pytest

from support.rows import a_task
from support.store_processes import kill_amid, start, write_for_ever
from support.workspaces import a_workspace, cli
from tunesmith.core.errors import StoreCorrupt, StoreError
from tunesmith.store.database import Database
from tunesmith.store.schema import open_store
from tunesmith.store.sqlite_library import sqlite_module, wal_is_safe

needs_wal = pytest.mark.skipif(not wal_is_safe(sqlite_module().sqlite_version_info), reason="no WAL with this SQLite")


def _log(store: Path) -> Path:
    return store.with_name(f"{store.name}-wal")


def _mark(store: Path) -> Path:
    return store.with_name(f"{store.name}-mark")


def _killed(store: Path, folder: Path) -> None:
    """A process commits a few tasks and is killed: they are in the log alone."""
    note = folder / f"{store.stem}.acknowledged"
    kill_amid(start(write_for_ever, f"sqlite:///{store}", str(note)), note, random.Random(1))
    assert _log(store).stat().st_size > 0


def _open(store: Path) -> Database:
    return open_store(f"sqlite:///{store}")


@pytest.mark.slow
@needs_wal
def test_removed_log_of_a_killed_process_is_told_by_every_command_and_by_the_doctor(tmp_path: Path) -> None:
    with a_workspace(tmp_path / "w") as client:
        root, store = client.workspace.root, client.workspace.store_file
    _killed(store, tmp_path)
    _log(store).unlink()
    before = store.read_bytes()
    for words in (["run", "list"], ["estop", "on"]):
        ended = cli(*words, cwd=root)
        assert ended.code == 1
        assert "has lost committed rows" in ended.err
    ended = cli("doctor", cwd=root)
    assert ended.code == 1
    assert "has lost committed rows" in " ".join(ended.out.split())
    assert store.read_bytes() == before
    _mark(store).unlink()  # as the message says: the person wants what is left
    assert cli("estop", "on", cwd=root).code == 0


@needs_wal
def test_log_of_another_store_is_refused(sqlite_template: Path, tmp_path: Path) -> None:
    ours, other = (Path(shutil.copy(sqlite_template, tmp_path / f"{name}.db")) for name in ("ours", "other"))
    _killed(ours, tmp_path)
    _killed(other, tmp_path)
    shutil.copy(_log(other), _log(ours))
    with pytest.raises(StoreCorrupt):
        _open(ours).close()


@needs_wal
def test_kept_log_and_removed_shm_lose_nothing(sqlite_store: Path, tmp_path: Path) -> None:
    _killed(sqlite_store, tmp_path)
    sqlite_store.with_name(f"{sqlite_store.name}-shm").unlink()
    _open(sqlite_store).close()


def test_older_copy_in_place_of_the_store_is_refused(sqlite_store: Path, tmp_path: Path) -> None:
    old = shutil.copy(sqlite_store, tmp_path / "old.db")
    database = _open(sqlite_store)
    with database.write() as tx:
        a_task(tx)
    database.close()
    _open(sqlite_store).close()
    shutil.copy(old, sqlite_store)
    with pytest.raises(StoreCorrupt, match=r"ends at event 0.*remove .*-mark"):
        _open(sqlite_store)


@needs_wal
@pytest.mark.parametrize("ends", [("-wal",), ("-wal", "-shm"), ("-shm",)])
def test_log_removed_below_a_live_process_is_brought_in_by_it(sqlite_store: Path, ends: tuple[str, ...]) -> None:
    live = _open(sqlite_store)
    with live.write() as tx:
        first = a_task(tx)
    for end in ends:
        sqlite_store.with_name(f"{sqlite_store.name}{end}").unlink()
    with live.write() as tx:
        second = a_task(tx)
    other = _open(sqlite_store)
    with other.read() as tx:
        found = {row[0] for row in tx.execute("SELECT id FROM tasks")}
    assert found >= {first, second}
    other.close()
    live.close()


@needs_wal
def test_store_whose_log_was_removed_below_an_idle_process_is_not_opened(sqlite_store: Path) -> None:
    live = _open(sqlite_store)
    with live.write() as tx:
        a_task(tx)
    _log(sqlite_store).unlink()
    with pytest.raises(StoreError, match="removed while other processes use the store"):
        _open(sqlite_store)
    with live.read():
        pass  # and brings it in
    _open(sqlite_store).close()
    live.close()


KINDS = ("fifo", "folder", "socket", "device", "dangling link", "loop")


def _put(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to("nowhere" if kind == "dangling link" else path.name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["", "-wal", "-mark"])
def test_what_is_no_file_is_refused_at_once(sqlite_store: Path, kind: str, end: str) -> None:
    path = sqlite_store.with_name(f"{sqlite_store.name}{end}")
    path.unlink(missing_ok=True)
    _put(path, kind)
    begun = time.monotonic()
    for create in (False, True):
        with pytest.raises(StoreError, match=path.name):
            open_store(f"sqlite:///{sqlite_store}", create=create)
    assert time.monotonic() - begun < 2


def test_linked_store_is_the_store_it_is_linked_to(sqlite_store: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(sqlite_store)
    through, direct = _open(link), _open(sqlite_store)
    with through.write() as tx:
        task = a_task(tx)
    with direct.read() as tx:
        assert tx.execute("SELECT id FROM tasks").fetchall() == [(task,)]
    through.close()
    direct.close()


@pytest.mark.slow
def test_doctor_tells_of_a_store_with_two_names_and_a_marker_that_is_no_file(tmp_path: Path) -> None:
    with a_workspace(tmp_path / "w") as client:
        os.link(client.workspace.store_file, tmp_path / "second.db")
        (check,) = [each for each in client.system.doctor() if each.name == "store"]
        assert (check.state, "hard link" in check.finding) == ("warning", True)
        root, marker = client.workspace.root, client.workspace.data_dir / "store.json"
    marker.unlink()
    os.mkfifo(marker)
    ended = cli("run", "list", cwd=root, timeout_s=20)
    assert (ended.code, "not an ordinary file" in ended.err) == (1, True)
