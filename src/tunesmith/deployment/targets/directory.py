"""The `directory` target: versions side by side in a folder, and one link, `current`, that moves atomically.

PATH/versions/dates@v7/    a published copy of the adapter
PATH/current               → versions/dates@v7; absent while the bare base is live
PATH/.tunesmith-target/    whose folder it is, which versions we put there, the youngest flip

The folder belongs to one profile. Whatever else lies in it was made by somebody else, and stays.
`for: vllm` says who reads the folder; then an adapter that this server cannot load is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.disk import is_disk_trouble
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.core.files import copy_published, fsync_folder, publish_folder, verify_folder
from tunesmith.deployment.targets.adapter_files import read_config
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.owned_folder import OwnedFolder
from tunesmith.profiles.base_model import ADAPTER_CONFIG
from tunesmith.profiles.profile import TargetSettings
from tunesmith.profiles.rules.target_limits import (
    FOR,
    MAX_RANK,
    adapter_violations,
    option_problem,
    whole_model_refusal,
)
from tunesmith.programs.readings import ProbeResult

READABLE_BY = "readable_by"
_MODES = {"owner": (0o700, 0o600), "group": (0o750, 0o640), "everyone": (0o755, 0o644)}
"""Of folders and of files, by who may read them."""


class DirectoryTarget:
    """Anything that can watch a link can serve from it."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        known = ("path", READABLE_BY, FOR, MAX_RANK)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"targets: a directory target has no option {unknown[0]!r}; known: {', '.join(known)}")
        problem = option_problem("directory", options)
        if problem is not None:
            raise ConfigError(f"targets: {problem}")
        self._served = TargetSettings(kind="directory", options=options)
        path = options.get("path", f".tunesmith/live/{profile}")
        if not isinstance(path, str) or not path.strip() or "\x00" in path:
            raise ConfigError("targets: path of a directory target must be the name of a folder")
        readable_by = options.get(READABLE_BY, "owner")
        if readable_by not in _MODES:
            raise ConfigError(f"targets: {READABLE_BY} of a directory target must be one of {', '.join(_MODES)}")
        self._modes = _MODES[readable_by]
        self.path = (root / path).resolve()
        self._refuse_workspace(root.resolve())
        self.current = self.path / "current"
        self.versions = self.path / "versions"
        self._owned = OwnedFolder(self.path, root.resolve(), profile)
        self._order = Order(self._owned.about / "order")

    def refusal(self, adapter: ServedAdapter) -> str | None:
        if os.path.lexists(self.current) and not self.current.is_symlink():
            return f"{self.current} is not a link of ours; move it away"
        try:
            self._owned.refuse_others()
            verify_folder(adapter.path, adapter.digest)
            violations = self._violations(adapter.path)
            if not violations:
                self._copy(adapter)
        except (DataError, OSError) as error:
            if is_disk_trouble(error):  # says nothing about the adapter
                raise TargetError(f"{self.path}: {error}") from error
            return str(error)
        return "; ".join(violations) or None

    def load(self, adapter: ServedAdapter) -> None:
        try:
            self._copy(adapter)
        except (OSError, DataError) as error:
            raise TargetError(f"{self.path}: {error}") from error

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        return None  # a folder answers nothing

    def flip(self, adapter: ServedAdapter | None) -> None:
        self._flip(adapter, contextlib.nullcontext())

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        self._flip(adapter, self._order.entering(order))

    def _flip(self, adapter: ServedAdapter | None, turn: contextlib.AbstractContextManager[None]) -> None:
        """All that takes time is done before it is our turn: whoever hangs there keeps others from flipping."""
        try:
            self._owned.take()
            if adapter is None:
                with turn:
                    self.current.unlink(missing_ok=True)
            else:
                self.versions.mkdir(parents=True, exist_ok=True)
                with self._in_use():
                    self._copy(adapter)
                    self._point(self.versions / adapter.name, turn)
            fsync_folder(self.path)
        except (OSError, DataError) as error:
            raise TargetError(f"{self.path}: {error}") from error

    def drain(self, name: str, timeout_s: float) -> None:
        """Who reads the folder keeps what it has open."""

    def unload(self, name: str) -> None:
        if name not in self._owned.made():
            return  # not there, or not ours
        folder = self.versions / name
        if self.current.is_symlink() and self.current.resolve() == folder.resolve():
            raise TargetError(f"{name} is served; flip to another version first")
        if folder.is_dir():
            with self._in_use(alone=True):
                shutil.rmtree(folder, ignore_errors=True)
                self._owned.forget(name)

    def loaded(self) -> frozenset[str]:
        try:
            return self._owned.made()
        except DataError as error:
            raise TargetError(str(error)) from error

    def observe(self) -> str | None:
        try:
            self._owned.refuse_others()
            if not os.path.lexists(self.current):
                return None
            return verify_folder(self.current.resolve(strict=True)).digest
        except (OSError, DataError) as error:
            raise TargetError(f"{self.current} is not healthy: {error}") from error

    def _violations(self, folder: Path) -> list[str]:
        """What of the adapter cannot be served by whom the folder is for; the bytes are verified already."""
        if FOR not in self._served.options:
            return []
        if not (folder / ADAPTER_CONFIG).exists():
            return [whole_model_refusal(self._served.name)]
        return adapter_violations(read_config(folder), self._served)

    @contextlib.contextmanager
    def _in_use(self, *, alone: bool = False) -> Iterator[None]:
        """Nothing is removed while somebody moves the link, be it a worker that hung and has lost its task since."""
        with (self.path / ".in_use").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
            except BlockingIOError:
                raise TargetError(f"{self.path} is being moved to another version") from None
            yield

    def _copy(self, adapter: ServedAdapter) -> None:
        """Copy the adapter below `versions`, whole or not at all; a damaged earlier copy of ours is replaced."""
        self._owned.take()
        final = self.versions / adapter.name
        if os.path.lexists(final):
            try:
                verify_folder(final, adapter.digest)
                self._owned.note(adapter.name)
                return
            except DataError:
                if not self._owned.is_made(adapter.name):
                    raise DataError(f"{final} is there already, and tunesmith did not make it; move it away") from None
                shutil.rmtree(final)
        self._owned.note(adapter.name)
        staged = self.versions / f".{adapter.name}.{os.getpid()}"
        shutil.rmtree(staged, ignore_errors=True)
        try:
            meta = copy_published(adapter.path, staged).meta
            if publish_folder(staged, final, meta).digest != adapter.digest:
                raise DataError(f"{adapter.path} changed while it was copied")
            self._open_up(final)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _open_up(self, version: Path) -> None:
        """Let those read it for whom the folder is; nothing above `path` is touched."""
        for_folders, for_files = self._modes
        for folder in (self.path, self.versions):
            if folder.stat().st_uid == os.geteuid() and folder.stat().st_mode & for_folders != for_folders:
                folder.chmod(folder.stat().st_mode | for_folders)
        for path in (version, *version.rglob("*")):
            path.chmod(for_folders if path.is_dir() else for_files)

    def _refuse_workspace(self, root: Path) -> None:
        """What tunesmith itself keeps in a workspace is no place for versions, but for `.tunesmith/live`."""
        data = root / ".tunesmith"
        is_inside = self.path.is_relative_to(data) and not self.path.is_relative_to(data / "live")
        if is_inside or root.is_relative_to(self.path) or self.path == data / "live":
            raise ConfigError(f"targets: path of a directory target: {self.path} holds the workspace; name another")

    def _point(self, folder: Path, turn: contextlib.AbstractContextManager[None]) -> None:
        """Replace the link in one step: readers see the old version or the new one, never none."""
        link = self.path / f".current.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.relative_to(self.path))
        try:
            with turn:
                os.replace(link, self.current)
        except (OSError, TargetError):
            link.unlink(missing_ok=True)
            raise
