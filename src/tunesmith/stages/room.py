"""Room on the disk for what a stage writes: whether there is enough, and what a stage that ran out of it means.

Disk trouble is nobody's error: the task waits at no cost and is tried again when there is room.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

from tunesmith.config.workspace import Workspace
from tunesmith.disk import shortage
from tunesmith.domain.task import AttemptState, ErrorClass, TaskKind
from tunesmith.errors import DataError
from tunesmith.files import read_manifest
from tunesmith.programs.protocol import ARTIFACT, CHECKPOINTS
from tunesmith.settings import WorkerSettings
from tunesmith.stages.context import StageContext, StageEnd

NEEDS_ROOM = frozenset({TaskKind.TRAIN, TaskKind.EVALUATE, TaskKind.CURRICULUM})
"""What no worker begins on a full disk; a rollback, a deployment and a watch are tried all the same."""
_EXCUSED = frozenset({ErrorClass.CRASH, ErrorClass.TRANSIENT, ErrorClass.PROTOCOL, ErrorClass.MISMATCH, ErrorClass.BUG})
"""How programs fail that do not say that the disk is full."""


def shortage_in(workspace: Workspace, timing: WorkerSettings) -> str | None:
    """Why nothing that needs room may begin in this workspace; None if there is enough."""
    folders = (workspace.data_dir, workspace.runs_dir, workspace.adapters_dir, workspace.datasets_dir)
    return shortage(folders, int(timing.min_free_mb * 1e6))


def excused(context: StageContext, end: StageEnd) -> StageEnd:
    """The end of an attempt, but with the disk to blame where it failed on a full one."""
    why = None
    if end.error_class is ErrorClass.DISK or (end.outcome is AttemptState.FAILED and end.error_class in _EXCUSED):
        why = shortage_in(context.workspace, context.settings.worker)
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
