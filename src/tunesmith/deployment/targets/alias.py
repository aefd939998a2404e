"""What a profile's name means at a target whose server knows only exact versions; kept in a file of the workspace."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_text, verify_folder, write_atomic
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.runs.spec_paths import path_from, path_in

_OWN = 0o700


@dataclass(frozen=True)
class StateFile:
    """A JSON object that is whole or absent, changed by one process at a time."""

    path: Path

    @classmethod
    def at(cls, root: Path, profile: str, kind: str, which: str) -> StateFile:
        """`which` tells two targets of one kind apart: what they talk to."""
        folder = root.resolve() / ".tunesmith" / "targets" / profile
        return cls(folder / f"{kind}-{sha256_text(which)[:8]}.json")

    @property
    def root(self) -> Path:
        """The workspace that it lies in."""
        return next(folder.parent for folder in self.path.parents if folder.name == ".tunesmith")

    def read(self) -> dict[str, Any]:
        try:
            said = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            reason = type(error).__name__
            raise TargetError(f"{self.path} cannot be read ({reason}); remove it and deploy again") from None
        if not isinstance(said, dict):
            raise TargetError(f"{self.path} is not what tunesmith writes; remove it and deploy again")
        return said

    def write(self, state: dict[str, Any]) -> None:
        self._make()
        write_atomic(self.path, json.dumps(state, sort_keys=True))
        self.path.chmod(0o600)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the system lets the lock go when its holder dies."""
        self._make()
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=_OWN)


class Alias:
    """`support` means `support@v7`, or the bare base."""

    def __init__(self, file: StateFile) -> None:
        self._file = file

    def set(self, adapter: ServedAdapter | None) -> None:
        about = None
        if adapter is not None:
            about = adapter_to_json(adapter, self._file)
        try:
            self._file.write({"v": 1, "live": about})
        except OSError as error:
            raise TargetError(f"{self._file.path}: {error.strerror}") from error

    def get(self) -> ServedAdapter | None:
        return adapter_of(self._file.read().get("live"), self._file)

    def refuse_if_served(self, name: str) -> None:
        live = self.get()
        if live is not None and live.name == name:
            raise TargetError(f"{name} is served; flip to another version first")


def adapter_to_json(adapter: ServedAdapter, file: StateFile) -> dict[str, str]:
    """For a state file: the workspace may be copied or moved."""
    return {"name": adapter.name, "path": path_in(file.root, adapter.path), "digest": adapter.digest}


def adapter_of(about: Any, file: StateFile) -> ServedAdapter | None:
    """An adapter out of a state file."""
    if about is None:
        return None
    try:
        return ServedAdapter(str(about["name"]), path_from(file.root, about["path"]), str(about["digest"]))
    except (KeyError, TypeError):
        raise TargetError(f"{file.path} is not what tunesmith writes; remove it and deploy again") from None


def verified(adapter: ServedAdapter) -> str:
    """The digest of the adapter's folder, computed from its bytes now."""
    try:
        return verify_folder(adapter.path, adapter.digest).digest
    except (DataError, OSError) as error:
        raise TargetError(f"{adapter.name} is not healthy on disk: {error}") from error
