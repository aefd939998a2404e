"""Paths in a run's spec: relative to the workspace where they lie in it, so that a workspace can be copied or moved.

The store keeps a spec `with_stored_paths`, a program is given one `with_absolute_paths`. Specs of an older tunesmith
hold absolute paths: what lay in the workspace of that time is looked for in this one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tunesmith.profiles.workspace import DATA_FOLDER, Workspace
from tunesmith.runs.spec import RunSpec


def with_stored_paths(workspace: Workspace, spec: RunSpec) -> RunSpec:
    """As the store keeps it."""
    return _with_paths(spec, lambda path: path_in(workspace.root, Path(path)))


def with_absolute_paths(workspace: Workspace, spec: RunSpec) -> RunSpec:
    """With absolute paths, in this workspace."""
    former = _former_root(Path(spec.dataset.path))
    return _with_paths(spec, lambda path: str(_located(workspace.root, former, Path(path))))


def path_in(root: Path, path: Path) -> str:
    """Relative to the workspace where it lies inside it, else as it is."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def path_from(root: Path, text: str) -> Path:
    """What `path_in` wrote; also an absolute path of this workspace before it was copied or moved."""
    return _located(root, _former_root(Path(text)), Path(text))


def _located(root: Path, former: Path | None, path: Path) -> Path:
    if former is not None and path.is_relative_to(former):
        return root / path.relative_to(former)
    return root / path  # an absolute one stays as it is


def _former_root(path: Path) -> Path | None:
    """The workspace in which an absolute path of our own data lay; None for a relative one, and for other paths."""
    parts = path.parts
    if not path.is_absolute() or DATA_FOLDER not in parts:
        return None
    return Path(*parts[: len(parts) - 1 - parts[::-1].index(DATA_FOLDER)])


def _with_paths(spec: RunSpec, change: Callable[[str], str]) -> RunSpec:
    named = {"base": spec.base, "dataset": spec.dataset, "start": spec.start, "deploys": spec.deploys}
    return spec.model_copy(
        update={
            name: each.model_copy(update={"path": change(each.path)})
            for name, each in named.items()
            if each is not None
        }
    )
