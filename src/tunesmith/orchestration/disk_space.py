"""Room on the disk for what a stage writes: whether there is enough, and what a stage that ran out of it means.

Disk trouble is nobody's error: the task waits at no cost and is tried again when there is room.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

from tunesmith.core.errors import DataError
from tunesmith.core.files import read_manifest
from tunesmith.programs.protocol import ARTIFACT, CHECKPOINTS
from tunesmith.programs.stage import StageContext, StageEnd
from tunesmith.runs.rules.task import AttemptState, ErrorClass

_EXCUSED = frozenset({ErrorClass.CRASH, ErrorClass.TRANSIENT, ErrorClass.PROTOCOL, ErrorClass.MISMATCH, ErrorClass.BUG})
"""How programs fail that do not say that the disk is full."""


def excused(context: StageContext, end: StageEnd) -> StageEnd:
    """The end of an attempt, but with the disk to blame where it failed on a full one."""
    why = None
    if end.error_class is ErrorClass.DISK or (end.outcome is AttemptState.FAILED and end.error_class in _EXCUSED):
        why = context.workspace.shortage(context.settings.worker.min_free_mb)
    if end.error_class is not ErrorClass.DISK and why is None:
        return end
    if context.claim.task.run_id is not None:
        _tidy(context.attempt_dir)
    told = end.error or ""
    return replace(StageEnd.no_room(f"{why}\n{told}" if why else told), decided_by=end.decided_by)


def _tidy(attempt: Path) -> None:
    """Remove what the attempt wrote and nobody can use: half of a checkpoint, an adapter without its manifest."""
    with contextlib.suppress(OSError):
        for folder in [attempt / ARTIFACT, *(attempt / CHECKPOINTS).glob("*"), *attempt.glob(".*")]:
            if folder.is_symlink() or not folder.is_dir():
                continue
            try:
                read_manifest(folder)
            except DataError:
                shutil.rmtree(folder, ignore_errors=True)
