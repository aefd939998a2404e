"""One server per workspace: its file lock, and the file by which other processes find and control it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tunesmith.core.errors import Refused
from tunesmith.core.files import write_atomic
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.process_identity import identify

_LOCK = "lock"
_OWN_FOLDER, _OWN_FILE = 0o700, 0o600


@dataclass(frozen=True)
class ServerFile:
    """The content of `.tunesmith/serve/SERVER_ID.json`; readable by its owner only."""

    id: str
    url: str
    token: str
    process: str
    """The server's process identity, as JSON."""


class ServerLock:
    """A file lock on the workspace; the kernel frees it when the process ends, however it ends."""

    def __init__(self, workspace: Workspace) -> None:
        self._root = workspace.root
        self.folder = workspace.data_dir / "serve"
        self.folder.mkdir(mode=_OWN_FOLDER, parents=True, exist_ok=True)
        self._handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWN_FILE)
        self._file: Path | None = None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            url = os.pread(self._handle, 4096, 0).decode(errors="replace").strip()
            os.close(self._handle)
            where = f" at {url}" if url else ""
            raise Refused(f"this workspace is served already{where}; stop that server first, or use it") from None
        for left_over in self.folder.glob("*.json"):  # of servers that were killed
            left_over.unlink(missing_ok=True)

    def publish(self, server_id: str, url: str, token: str) -> str:
        """Publish the address and token of this server; returns its process identity."""
        process = identify(os.getpid(), place=self._root).to_json()
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{url}\n".encode(), 0)
        path = self.folder / f"{server_id}.json"
        old = os.umask(0o077)  # it holds the token, also while it is half written
        try:
            write_atomic(path, json.dumps(asdict(ServerFile(server_id, url, token, process))))
        finally:
            os.umask(old)
        self._file = path
        return process

    def release(self) -> None:
        """Remove the published file and free the lock."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
