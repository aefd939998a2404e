"""A workspace: a folder with tunesmith.yaml, profiles/ and .tunesmith/; how it is found, made, and never left."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.disk import shortage
from tunesmith.core.errors import ConfigError, NotFound, Refused, UsageError, quoted
from tunesmith.core.files import write_atomic

PROJECT_FILE = "tunesmith.yaml"
DATA_FOLDER = ".tunesmith"
ENVIRONMENT_VARIABLE = "TUNESMITH_WORKSPACE"
PLAIN_VARIABLES = frozenset({ENVIRONMENT_VARIABLE, "TUNESMITH_DEBUG", "TUNESMITH_ATTEMPT"})
"""Variables that are no settings."""
SAMPLE_FILE = "example.yaml.sample"
MIN_FREE_MB = 8.0
"""The default of worker.min_free_mb."""
_OWN = 0o700
_MAX_PATH = 4096


@dataclass(frozen=True)
class Workspace:
    """The one place that knows what lies where."""

    root: Path

    @property
    def project_file(self) -> Path:
        return self.root / PROJECT_FILE

    @property
    def profiles_dir(self) -> Path:
        return self.root / "profiles"

    @property
    def data_dir(self) -> Path:
        """What tunesmith itself writes; nothing in it is edited by hand."""
        return self.root / DATA_FOLDER

    @property
    def store_file(self) -> Path:
        return self.data_dir / "store.db"

    @property
    def datasets_dir(self) -> Path:
        return self.data_dir / "datasets"

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def adapters_dir(self) -> Path:
        return self.data_dir / "adapters"

    @property
    def cache_dir(self) -> Path:
        """What can be computed again, and may be removed at any time."""
        return self.data_dir / "cache"

    def make_private(self) -> None:
        """Have the folders that hold what people said, for their owner alone; also those of an earlier version."""
        self.data_dir.mkdir(mode=_OWN, exist_ok=True)
        for folder in (self.datasets_dir, self.runs_dir):
            folder.mkdir(mode=_OWN, exist_ok=True)
            about = folder.stat()
            if about.st_mode & 0o077 and about.st_uid == os.geteuid():
                folder.chmod(_OWN)

    def shortage(self, min_free_mb: float) -> str | None:
        """Why nothing that needs room on the disk may begin here; None if there is enough."""
        return shortage((self.data_dir, self.runs_dir, self.adapters_dir, self.datasets_dir), int(min_free_mb * 1e6))

    def locate(self, text: str) -> Path:
        """A path that the owner of the workspace wrote, such as base.path: relative to the workspace, or absolute."""
        _check_text(text)
        path = Path(text)
        try:
            return (self.root / path.expanduser()).resolve()
        except (OSError, RuntimeError):
            raise ConfigError(f"the path {quoted(text)} cannot be followed") from None


def is_workspace(folder: Path) -> bool:
    """Whether a workspace is there now."""
    return (folder / PROJECT_FILE).is_file()


def is_this_one(said: str, root: Path) -> bool:
    """Whether what was written for the workspace at `said` is for the one at `root`: it is there, or was moved there.

    Where the one at `said` is still there, `root` is a copy, and has no say about processes and servers of that one.
    """
    return said == str(root) or not is_workspace(Path(said))


def find_workspace(
    start: Path | None = None, explicit: Path | None = None, environ: Mapping[str, str] | None = None
) -> Workspace:
    """--workspace, else TUNESMITH_WORKSPACE, else the nearest folder from `start` upwards that is one."""
    named = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE)
    if explicit is not None:
        return _named_workspace(explicit, f"--workspace {quoted(str(explicit))}")
    if named:
        return _named_workspace(Path(named), f"{ENVIRONMENT_VARIABLE}={quoted(named)}")
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / PROJECT_FILE).is_file():
            return Workspace(folder)
    raise NotFound(
        f"no {PROJECT_FILE} in {here} or any folder above it; "
        "make a workspace with `tunesmith init`, or name one with --workspace"
    )


def _named_workspace(folder: Path, said: str) -> Workspace:
    _check_text(str(folder))
    try:
        root = folder.expanduser().resolve()
        if (root / PROJECT_FILE).is_file():
            return Workspace(root)
        reason = (
            f"holds no {PROJECT_FILE}; make it a workspace with `tunesmith init`" if root.is_dir() else "no such folder"
        )
    except (OSError, RuntimeError):
        reason = "cannot be followed"
    raise NotFound(f"{said}: {reason}")


def init_workspace(folder: Path) -> Workspace:
    """Make a workspace; refuses where one is. The project file comes last, so a half-made one is not found."""
    _check_text(str(folder))
    workspace = Workspace(folder.expanduser().resolve())
    if workspace.project_file.exists() or workspace.project_file.is_symlink():
        raise Refused(f"{workspace.root} is a workspace already: {PROJECT_FILE} is there, and nothing was changed")
    try:
        workspace.root.mkdir(parents=True, exist_ok=True)
        workspace.profiles_dir.mkdir(exist_ok=True)
        workspace.make_private()
        _write_new(workspace.data_dir / ".gitignore", "# Written by tunesmith, not meant for version control.\n*\n")
        from tunesmith.profiles.sample import sample_profile, sample_project  # the whole schema: needed only here

        _write_new(workspace.profiles_dir / SAMPLE_FILE, sample_profile())
        _write_new(workspace.project_file, sample_project())
    except OSError as error:
        raise Refused(f"cannot make a workspace in {workspace.root}: {error.strerror}; choose another folder") from None
    return workspace


def _write_new(path: Path, text: str) -> None:
    if not path.exists():
        write_atomic(path, text)


def _check_text(text: str) -> None:
    if not text or len(text) > _MAX_PATH or "\x00" in text:
        raise UsageError(f"{quoted(text)} cannot be a path: it is empty, too long, or holds a NUL character")
