"""Folders of datasets that are published and not yet recorded: a mark lies beside each until its row is there.

A process that is killed in between leaves folder and mark; whoever sweeps finds that nobody holds the mark's lock, and
removes the folder unless the row is there after all. A folder without a mark is never touched: it may belong to another
store, or to one that was restored from a backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tunesmith.core.files import sha256_text, write_atomic
from tunesmith.datasets import queries as datasets
from tunesmith.profiles.workspace import Workspace
from tunesmith.store.database import Database

_END = ".unrecorded"
_YOUNG_S = 60.0  # a mark is made a moment before it is locked


@contextlib.contextmanager
def unrecorded(database: Database, folder: Path) -> Iterator[None]:
    """While a dataset's folder is published and recorded. Where that fails, the folder is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = folder.with_name(f".{folder.name}{_END}")
    write_atomic(mark, _store(database))
    with mark.open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            mark.unlink(missing_ok=True)


def remove_unrecorded(database: Database, workspace: Workspace) -> list[str]:
    """Remove what killed processes published and never recorded; the ids of these datasets."""
    removed = []
    for mark in sorted(workspace.datasets_dir.glob(f".*{_END}")):
        with contextlib.suppress(OSError), mark.open() as handle:
            if time.time() - mark.stat().st_mtime < _YOUNG_S or handle.read() != _store(database):
                continue
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its owner is alive
            dataset_id = mark.name.removesuffix(_END)[1:]
            folder = mark.with_name(dataset_id)
            with database.read() as tx:
                is_known = datasets.is_known_path(tx, folder.relative_to(workspace.data_dir).as_posix())
            if not is_known:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(dataset_id)
            mark.unlink(missing_ok=True)
    return removed


def _store(database: Database) -> str:
    return sha256_text(database.where)
