"""The SQLite file: survives kill -9 and contention; damaged, empty, newer or foreign ones are refused untouched."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import a_task
from support.store_processes import (
    broken_invariants,
    create_store,
    end_all,
    fail_then_add,
    kill_amid,
    start,
    write_for_ever,
    write_transactions,
)
from tunesmith.client import Client
from tunesmith.core.errors import StoreCorrupt, StoreError, StoreTooNew, UsageError
from tunesmith.store.database import Database, connect
from tunesmith.store.schema import HEAD, integrity_problem, open_store
from tunesmith.store.sqlite_files import file_system_of
from tunesmith.store.sqlite_library import sqlite_module, wal_is_safe


def _url(path: Path) -> str:
    return f"sqlite:///{path}"


def _task_ids(database: Database) -> set[str]:
    with database.read() as tx:
        return {row["id"] for row in tx.all(sa.select(tables.tasks.c.id))}


def _contend(store: Path, folder: Path, num_processes: int, num_transactions: int, timeout_s: float) -> None:
    notes = [folder / f"acknowledged-{number}" for number in range(num_processes)]
    processes = [start(write_transactions, _url(store), num_transactions, str(note)) for note in notes]
    assert end_all(processes, timeout_s) == [0] * num_processes  # an error such as "locked" would end one with 1
    database = open_store(_url(store))
    acknowledged = {line for note in notes for line in note.read_text().split()}
    assert len(acknowledged) == num_processes * -(-num_transactions // 3)
    assert _task_ids(database) == acknowledged
    assert (integrity_problem(database), broken_invariants(database)) == (None, [])
    database.close()


def test_eight_processes_write_at_once_and_nobody_sees_locked(sqlite_store: Path, tmp_path: Path) -> None:
    _contend(sqlite_store, tmp_path, 8, 100, timeout_s=120)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thirty_two_processes_write_a_thousand_transactions_each(sqlite_store: Path, tmp_path: Path) -> None:
    _contend(sqlite_store, tmp_path, 32, 1000, timeout_s=7000)


def _kill_again_and_again(template: Path, folder: Path, times: int) -> None:
    """A fresh store for every fifty kills: each kill checks every row."""
    rng = random.Random(20261115)
    for number in range(times):
        store, note = folder / f"store-{number // 50}.db", folder / f"acknowledged-{number // 50}"
        if number % 50 == 0:
            shutil.copy(template, store)
        process = start(write_for_ever, _url(store), str(note))
        kill_amid(process, note, rng)
        database = open_store(_url(store))
        lines = note.read_text().split("\n")
        assert set(lines[:-1]) <= _task_ids(database)  # acknowledged is kept; a half-written note does not count
        assert (integrity_problem(database), broken_invariants(database)) == (None, [])
        fail_then_add(database)
        database.close()


def test_killed_writer_loses_nothing_acknowledged_and_leaves_nothing_half_done(
    sqlite_template: Path, tmp_path: Path
) -> None:
    _kill_again_and_again(sqlite_template, tmp_path, 10)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thousand_killed_writers_lose_nothing(sqlite_template: Path, tmp_path: Path) -> None:
    _kill_again_and_again(sqlite_template, tmp_path, 1000)


def test_two_processes_creating_the_same_store_make_one(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    processes = [start(create_store, _url(path)) for _ in range(4)]
    assert end_all(processes, 60) == [0] * 4
    database = open_store(_url(path))
    assert integrity_problem(database) is None
    fail_then_add(database)
    database.close()


def _filled(store: Path, num: int = 300) -> bytes:
    """Put rows into a store, close it, return its bytes."""
    database = open_store(_url(store))
    with database.write() as tx:
        for _ in range(num):
            a_task(tx)
    database.close()
    assert not store.with_name(f"{store.name}-wal").exists()
    return store.read_bytes()


def _use(store: Path) -> None:
    """Everything a command does: open, read, write."""
    database = open_store(_url(store))
    try:
        with database.read() as tx:
            for table in tables.metadata.sorted_tables:
                tx.all(sa.select(table))
        with database.write() as tx:
            a_task(tx)
    finally:
        database.close()


DAMAGES = {
    "header flipped": lambda raw: bytes(byte ^ 0xFF for byte in raw[:100]) + raw[100:],
    "magic gone": lambda raw: b"\0" * 16 + raw[16:],
    "all zero": lambda raw: b"\0" * len(raw),
    "half": lambda raw: raw[: len(raw) // 2],
    "one page": lambda raw: raw[:4096],
    "a few bytes": lambda raw: raw[:50],
    "text": lambda raw: b"this was once a database\n" * 100,
    "pages swapped": lambda raw: raw[:4096] + raw[8192:12288] + raw[4096:8192] + raw[12288:],
    "every tree page broken": lambda raw: raw[:4096] + b"".join(
        b"\xff" * 8 + raw[start + 8 : start + 4096] for start in range(4096, len(raw), 4096)
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_store_stops_everything_and_stays_as_it_is(sqlite_store: Path, damage: str) -> None:
    broken = DAMAGES[damage](_filled(sqlite_store))
    sqlite_store.write_bytes(broken)
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=r"[Rr]estore a backup"):
            _use(sqlite_store)
        assert sqlite_store.read_bytes() == broken
    with pytest.raises(StoreCorrupt):  # nor is it ever made anew in its place
        open_store(_url(sqlite_store), create=True).close()
    assert sqlite_store.read_bytes() == broken


def test_flipped_bytes_deep_in_a_page_are_found_by_the_full_check(sqlite_store: Path) -> None:
    raw = _filled(sqlite_store)
    pages = [raw[start : start + 4096] for start in range(0, len(raw), 4096)]
    rows = next(number for number, page in enumerate(pages) if page[:1] == b"\x0d" and b"task-" in page)
    pages[rows] = pages[rows].replace(b"task-", b"tusk-")  # a leaf of a table no longer agrees with its index
    raw = b"".join(pages)
    sqlite_store.write_bytes(raw)
    database = open_store(_url(sqlite_store))
    assert integrity_problem(database) is not None
    database.close()
    assert sqlite_store.read_bytes() == raw


def test_sound_store_passes_the_full_check(sqlite_store: Path) -> None:
    _filled(sqlite_store)
    database = open_store(_url(sqlite_store))
    assert integrity_problem(database) is None
    database.close()


def test_missing_store_is_refused_without_create_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing.*restore a backup"):
        open_store(_url(tmp_path / "store.db"))
    assert list(tmp_path.iterdir()) == []


def test_emptied_store_is_refused_without_create_and_left_empty(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    with pytest.raises(StoreCorrupt, match="empty"):
        open_store(_url(path))
    assert path.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [path]


def test_store_that_lost_all_tables_is_refused_without_create(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    module = sqlite_module()
    connection = module.connect(str(path))
    connection.execute("PRAGMA user_version = 1")  # a valid database file without a table
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreCorrupt):
        open_store(_url(path))
    assert path.read_bytes() == before


def test_store_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="tunesmith init"):
        open_store(_url(tmp_path / "nowhere" / "store.db"), create=True)
    assert list(tmp_path.iterdir()) == []


def test_newer_store_is_refused_and_left_as_it_is(sqlite_store: Path) -> None:
    database = open_store(_url(sqlite_store))
    with database.write() as tx:
        tx.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    before = sqlite_store.read_bytes()
    for create in (False, True):
        with pytest.raises(StoreTooNew, match=f"9999.*{HEAD}.*upgrade tunesmith"):
            open_store(_url(sqlite_store), create=create)
    assert sqlite_store.read_bytes() == before


def test_store_without_its_version_is_refused(sqlite_store: Path) -> None:
    database = open_store(_url(sqlite_store))
    with database.write() as tx:
        tx.execute("DELETE FROM alembic_version")
    database.close()
    with pytest.raises(StoreCorrupt, match="lost its schema version"):
        open_store(_url(sqlite_store))


def test_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = sqlite_module().connect(str(path))
    connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()
    before = path.read_bytes()
    for create in (False, True):
        with pytest.raises(StoreError, match="another program's tables"):
            open_store(_url(path), create=create)
    assert path.read_bytes() == before


def test_read_only_store_can_be_read_and_says_why_it_cannot_be_written(sqlite_store: Path, tmp_path: Path) -> None:
    _filled(sqlite_store, 1)
    database = connect(_url(sqlite_store))
    with database.write() as tx:
        tx.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreError, match="disk full or read-only"), database.write() as tx:
        a_task(tx)
    database.close()


def test_full_disk_is_an_error_that_says_so_and_changes_nothing(sqlite_store: Path) -> None:
    before = _filled(sqlite_store, 1)
    database = connect(_url(sqlite_store))
    with database.write() as tx:
        tx.execute(f"PRAGMA max_page_count = {len(before) // 4096}")
    with pytest.raises(StoreError, match="full"), database.write() as tx:
        _ = [a_task(tx) for _ in range(2000)]
    database.close()
    assert sqlite_store.read_bytes() == before


def test_linked_sqlite_is_one_whose_wal_is_safe_or_wal_is_off(sqlite_store: Path) -> None:
    database = open_store(_url(sqlite_store))
    with database.write() as tx:
        journal = tx.execute("PRAGMA journal_mode").fetchone()[0]
        synchronous = tx.execute("PRAGMA synchronous").fetchone()[0]
        foreign_keys = tx.execute("PRAGMA foreign_keys").fetchone()[0]
    database.close()
    assert journal == ("wal" if wal_is_safe(sqlite_module().sqlite_version_info) else "delete")
    assert (synchronous, foreign_keys) == (2, 1)  # FULL, on


def test_only_leases_may_be_less_than_durable(sqlite_store: Path) -> None:
    database = open_store(_url(sqlite_store))
    seen = []
    for durable in (True, False, False, True, True):
        with database.write(durable=durable) as tx:
            seen.append(tx.execute("PRAGMA synchronous").fetchone()[0])
    database.close()
    assert seen == ([2, 1, 1, 2, 2] if wal_is_safe(sqlite_module().sqlite_version_info) else [2] * 5)


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 7, 0), False),
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 44, 99), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 0), False),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), True),
        ((3, 53, 4), True),
        ((4, 0, 0), True),
    ],
)
def test_wal_is_used_only_where_its_reset_bug_is_fixed(version: tuple[int, int, int], safe: bool) -> None:
    assert wal_is_safe(version) is safe


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /run tmpfs rw 0 0
server:/export /home nfs4 rw 0 0
/dev/vdb /home/local ext4 rw 0 0
//server/share /mnt/with\\040space cifs rw 0 0
user@host:/ /mnt/ssh fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/store.db", "ext4"),
        ("/home/me/store.db", "nfs4"),
        ("/homes/me/store.db", "ext4"),
        ("/home/local/store.db", "ext4"),
        ("/mnt/with space/store.db", "cifs"),
        ("/mnt/ssh/a/b/store.db", "fuse.sshfs"),
        ("/run/store.db", "tmpfs"),
    ],
)
def test_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
def test_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from tunesmith.store import sqlite_files

    monkeypatch.setattr(
        sqlite_files, "_mounts", lambda: f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\n"
    )
    with pytest.raises(StoreError, match=f"network file system \\({kind}\\).*PostgreSQL"):
        open_store(_url(tmp_path / "store.db"), create=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["", "nonsense", "sqlite://", "sqlite:///:memory:", "mysql://host/db", "redis://host"])
def test_url_of_something_else_is_refused_with_what_can_be_used(url: str) -> None:
    with pytest.raises(UsageError, match="sqlite:///path or postgresql://host/name"):
        connect(url)


def test_copy_of_a_closed_store_is_a_store(sqlite_store: Path, tmp_path: Path) -> None:
    _filled(sqlite_store, 5)
    copy = Path(shutil.copy(sqlite_store, tmp_path / "copy.db"))
    database = open_store(_url(copy))
    assert len(_task_ids(database)) == 5
    database.close()


def test_what_people_said_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    with Client.init(tmp_path / "w") as client:
        client.runs.list()
        for path in client.workspace.data_dir.glob("store.db*"):
            assert path.stat().st_mode & 0o077 == 0, path
        assert list(client.workspace.data_dir.glob("store.db"))
        assert client.workspace.datasets_dir.stat().st_mode & 0o077 == 0
