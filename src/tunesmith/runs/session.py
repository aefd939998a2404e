"""What every noun of the client shares: the workspace, its settings, the open store, and who is asking."""

from __future__ import annotations

import getpass
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.core.errors import NotFound, StoreError, UsageError
from tunesmith.core.files import sha256_text, write_atomic
from tunesmith.core.ids import is_id
from tunesmith.profiles import listings as profiles
from tunesmith.profiles.plain_settings import read_plainly, says_nothing, settings_of
from tunesmith.profiles.workspace import MIN_FREE_MB, Workspace
from tunesmith.store.lock_holder import Patience
from tunesmith.store.reader import NotQuick, Reader, read_sqlite

if TYPE_CHECKING:
    from tunesmith.profiles.checks import ProfileCheck
    from tunesmith.profiles.settings import Settings
    from tunesmith.store.database import Database

_Answer = TypeVar("_Answer")
_MARKER = "store.json"
"""In the data folder: which stores were made for this workspace."""
_opening = threading.Lock()


def _start_anew() -> None:
    """A forked process has none of the threads that may hold the lock."""
    global _opening  # noqa: PLW0603 - the one lock of the process
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_start_anew)


class Session:
    def __init__(
        self,
        workspace: Workspace,
        actor: str | None,
        environ: Mapping[str, str] | None,
        check_profile: ProfileCheck,
        patience: Patience | None = None,
    ) -> None:
        self.workspace = workspace
        self.environ = environ
        self.patience = patience
        self.check_profile = check_profile
        self.actor = actor or _user()
        self._database: Database | None = None
        self._was_open = False

    def another(self) -> Session:
        """One with a store connection of its own, for another thread."""
        other = Session(self.workspace, self.actor, self.environ, self.check_profile, self.patience)
        other._was_open = self._was_open
        return other

    @cached_property
    def settings(self) -> Settings:
        plain = None if self._said is None else settings_of(self._said)
        if plain is not None:
            return plain
        from tunesmith.profiles.resolve import resolve_settings  # the schema of profiles: half of what a command costs

        return resolve_settings(self.workspace, self.environ)

    @cached_property
    def _said(self) -> dict[str, Any] | None:
        return read_plainly(self.workspace, self.environ)

    @property
    def _has_defaults(self) -> bool:
        """Whether no setting was changed; then the two that a listing needs are known without building any."""
        return self._said is not None and says_nothing(self._said)

    @property
    def _store_setting(self) -> str | None:
        return None if self._has_defaults else self.settings.store.url

    @property
    def store_url(self) -> str:
        """A relative SQLite file is the workspace's own, wherever the command is given."""
        url = self._store_setting or f"sqlite:///{self.workspace.store_file}"
        file = url.removeprefix("sqlite:///")
        return f"sqlite:///{self.workspace.root / file}" if file not in (url, "", ":memory:") else url

    @property
    def no_room(self) -> str | None:
        """Why the disk keeps workers from training and evaluating; None if there is room."""
        return self.workspace.shortage(MIN_FREE_MB if self._has_defaults else self.settings.worker.min_free_mb)

    def look(self, question: Callable[[Reader], _Answer]) -> _Answer:
        """The answer to a question that only reads, and may be asked twice.

        Until the store has been opened, a sound SQLite store is read without opening it, and without SQLAlchemy, whose
        import takes longer than a listing. Every other store is opened, which also says what is wrong with it.
        """
        if self._database is None:
            with suppress(NotQuick), read_sqlite(self._known_file()) as reader:
                self.workspace.make_private()
                return question(reader)
        with self.database.read() as tx:
            return question(tx)

    def _known_file(self) -> Path:
        """The file of a SQLite store that was opened before. Raises NotQuick if there is none."""
        marker = self.workspace.data_dir / _MARKER
        try:
            known = json.loads(marker.read_text()) if marker.is_file() else None  # reading a pipe would never end
        except (OSError, ValueError, RecursionError):
            raise NotQuick from None
        file = self.store_url.removeprefix("sqlite:///")
        if file == self.store_url or not isinstance(known, list) or self._store_name() not in known:
            raise NotQuick
        return Path(file)

    def _store_name(self) -> str:
        return sha256_text(self._store_setting or "the workspace's own")  # a moved workspace keeps its own store

    @property
    def database(self) -> Database:
        """Opened at first use. A store that was made once is never made again: gone or empty is an error."""
        if self._database is None:
            with _opening:  # threads of an application may all come first
                if self._database is None:
                    self._database = self._open()
                    if self._database.reserve is not None:
                        self._database.reserve.fill_up()
                    self._was_open = True
        return self._database

    def _open(self) -> Database:
        from tunesmith.store.schema import open_store

        marker, name = self.workspace.data_dir / _MARKER, self._store_name()
        try:
            if marker.exists() and not marker.is_file():
                raise ValueError("it is not an ordinary file; move it away and restore a backup")
            known = json.loads(marker.read_text()) if marker.exists() else []
            if not isinstance(known, list):
                raise ValueError("it holds no list; restore a backup")
            if self._was_open:  # the whole folder may have been moved away since: that makes no new store either
                return open_store(self.store_url, patience=self.patience)
            self.workspace.make_private()
            database = open_store(self.store_url, create=name not in known, patience=self.patience)
            if name not in known:
                write_atomic(marker, json.dumps([*known, name]))
        except (OSError, ValueError) as error:
            raise StoreError(f"{marker} cannot be read or written: {error}") from error
        return database

    def known_profile(self, name: str | None) -> str | None:
        """The name again; refuses one that neither a file nor the store knows, where a filter would find nothing."""
        if name is None:
            return None
        files = [path.stem for path in self.workspace.profiles_dir.glob("*.yaml")]
        if name not in files and not self.look(lambda reader: profiles.is_locked(reader, name)):
            raise NotFound.named("profile", name, files)
        return name

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _user() -> str:
    try:
        return f"user:{getpass.getuser()}"
    except (OSError, KeyError):
        return "user:unknown"


def data_source(data: str | Path | Sequence[Path]) -> str | list[Path]:
    """A dataset id, or files: anything that is there on disk, or cannot be an id, is a file."""
    if isinstance(data, Path):
        return [data]
    if not isinstance(data, str):
        return list(data)
    if not data:
        raise UsageError("the data is an empty text; name a dataset id or JSONL files")
    return data if is_id(data) and not Path(data).exists() else [Path(data)]
