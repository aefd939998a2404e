"""The files of a SQLite store: what may be one, which ones are in use, and the mark of the last durable commit.

SQLite keeps committed rows in the `-wal` file until a checkpoint writes them into the store. If that file is removed or
replaced by another store's, or an older store is put in place, what is left is a valid database without those rows.
So every durable commit is noted in a file beside the store, and a store that does not hold it is refused.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from tunesmith.core.errors import StoreCorrupt, StoreError
from tunesmith.store.lock_holder import is_in_use

_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse.sshfs", "glusterfs"})
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OWN = 0o600
_RESCUE_S = 3.0  # a live process notices within its next transaction that its log was removed
_LAST_EVENT = "SELECT seq, entity_id, at FROM events ORDER BY seq DESC LIMIT 1"
_EVENT = "SELECT seq, entity_id, at FROM events WHERE seq = ?"
Identity = tuple[int, int] | None
Event = tuple[Any, ...]
"""Number, entity and time of an event. Events are never changed or removed."""


def refuse_unusable(path: Path) -> None:
    """A network file system loses data; a pipe, a device or a folder is no database, and reading it may never end."""
    real = Path(os.path.realpath(path))
    _refuse_network_file_system(real)
    for each in (path, *(real.with_name(f"{real.name}{end}") for end in ("-wal", "-shm", "-journal", "-mark"))):
        kind = _kind(each)
        if kind is not None and kind != stat.S_IFREG:
            raise StoreError(
                f"{each} is {_KINDS.get(kind, 'not a file')}, where the store needs an ordinary file; remove it"
            )


def _kind(path: Path) -> int | None:
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise StoreError(f"{path} is a link to {target}, which does not exist; put that file back") from None
        return None
    except OSError as error:
        raise StoreError(f"the store {path} cannot be reached: {error.strerror}") from error


def _refuse_network_file_system(path: Path) -> None:
    kind = file_system_of(path, _mounts())
    if kind in _NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{path} is on a network file system ({kind}), where SQLite loses data; "
            "put the workspace on a local disk or set store.url to a PostgreSQL database"
        )


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text()
    except OSError:  # not Linux
        return ""


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system a path is on, by the kernel's list of mounts; empty where there is none."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, written, fs_type, *_ = line.split(" ")
        mount = written.replace(r"\040", " ")  # how the kernel writes a space
        inside = path == Path(mount) or Path(mount) in path.parents
        if inside and len(mount) >= len(best):
            best, kind = mount, fs_type
    return kind


def identity(path: str) -> Identity:
    """Which file that is now; None: there is none."""
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def num_names(path: str) -> int:
    """How many hard links a file has; 0: there is none."""
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0


class FilesInUse:
    """Which files a process has open for a store. SQLite keeps -wal and -shm while anybody has the store open."""

    def __init__(self, where: str) -> None:
        real = os.path.realpath(where)
        self._where, self._log = where, f"{real}-wal"
        log = (self._log, f"{real}-shm") if identity(f"{real}-shm") else ()  # else a rollback journal
        self._known = {path: identity(path) for path in (where, *log)}

    def have_changed(self) -> bool:
        return any(known is None or known != identity(path) for path, known in self._known.items())

    def log_was_removed(self) -> bool:
        """The store itself is the one we opened, its -wal file is gone, and nobody has made a new one."""
        is_same_store = self._known[self._where] == identity(self._where)
        return is_same_store and self._log in self._known and identity(self._log) is None


def wait_for_removed_log(store: Path) -> None:
    """Wait until the processes that use a store have written a removed log's rows into it, with their next transaction.

    SQLite removes the -shm file before the -wal file, so a -shm alone means that somebody else removed the log.
    """
    real = os.path.realpath(store)
    deadline = time.monotonic() + _RESCUE_S
    while identity(f"{real}-shm") is not None and identity(f"{real}-wal") is None and is_in_use(real):
        if time.monotonic() > deadline:
            raise StoreError(
                f"{real}-wal was removed while other processes use the store, and opening it now would lose its rows; "
                "end every process of this workspace with TERM, then try again"
            )
        time.sleep(0.05)


class CommitMark:
    """A file beside the store with the last event that a durable commit wrote.

    It is written after the commit has reached the disk, so it never promises more than the store holds.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.path = Path(f"{os.path.realpath(store)}-mark")
        self._noted: Event | None = None
        self._file: int | None = None

    def last_event(self, tx: Any) -> Event | None:
        """To be asked inside the transaction, before its commit."""
        row = tx.execute(_LAST_EVENT).fetchone()
        return None if row is None else tuple(row)

    def note(self, event: Event | None) -> None:
        """The commit that wrote this event is durable."""
        if event is None or event == self._noted:
            return
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWN)
            os.pwrite(self._file, f"{json.dumps(event)}\n".encode(), 0)  # what is left of a longer line is not read
            self._noted = event
        except OSError:  # a full disk: the mark stays older than the store, which promises less and is true
            self.close()

    def check(self, tx: Any) -> None:
        """Refuse a store that does not hold the marked event."""
        try:
            marked, _ = json.JSONDecoder().raw_decode(self.path.read_text(errors="replace"))
            seq, entity_id, at = marked
            row = tx.execute(_EVENT, (int(seq),)).fetchone()
        except (OSError, ValueError, TypeError, RecursionError):
            return  # there is none, or not one of ours: it promises nothing
        if row is not None and list(row) == marked:
            return
        (newest,) = tx.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        happened = f"it ends at event {newest}" if newest < seq else f"its event {seq} is another one"
        raise StoreCorrupt(
            f"the store {self.store} has lost committed rows: event {seq} ({entity_id}, {at} UTC) was written, "
            f"but {happened}. Its -wal file was removed or replaced, or an older store was put in its place. "
            "Put the right files back, or restore a backup; "
            f"if this older store is what you want, remove {self.path}"
        )

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file, self._noted = None, None
