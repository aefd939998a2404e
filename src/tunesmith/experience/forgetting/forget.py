"""Forget: what was said in an experience leaves the store at once, and the files as soon as no run reads them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from tunesmith.core import logs
from tunesmith.core.errors import Refused, StoreError, TunesmithError
from tunesmith.core.files import fsync_folder, write_atomic
from tunesmith.core.ids import new_token
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.prepare import heldout_cases
from tunesmith.datasets.queries import HeldoutCase
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries.erasures import Pending
from tunesmith.profiles.workspace import Workspace
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

Step = Callable[[str], None]
log = logs.logger("forget")
_LOCK = ".erasing.lock"
_FAILED = "erasure_failed"
_TOGETHER = 50  # experiences in one transaction
_MANY_CASES = 10_000  # a dataset brings the first thousand to the pool, unless told otherwise


@dataclass(frozen=True)
class RewriteResult:
    """The result of rewriting one dataset that contained an erased experience."""

    dataset_id: str
    state: Literal["done", "waits", "failed"]
    why: str
    runs: tuple[str, ...] = ()
    """The runs that it waits for."""


def forget(database: Database, ids: Sequence[str], *, actor: str, reason: str) -> list[str]:
    """Leave tombstones in place of these experiences; those that were none before. Durable when it returns."""
    new: list[str] = []
    for start in range(0, len(ids), _TOGETHER):
        with database.write() as tx:
            some = sorted(ids[start : start + _TOGETHER])  # everybody locks in this order, to avoid a deadlock
            new += [each for each in some if erasures.forget(tx, each, actor=actor, reason=reason)]
    return new


def finish(
    database: Database,
    workspace: Workspace,
    *,
    actor: str,
    wait: bool = False,
    on_step: Step = lambda step: None,
) -> list[RewriteResult]:
    """Rewrite the datasets that still hold what was forgotten, where no run reads them.

    Killed at any point, each dataset is the old one or the new one, and the next call goes on. One process at a time
    does it; with `wait` we wait for the other.
    """
    with database.read() as tx:
        todo, owes_rewrite = erasures.pending(tx), erasures.needs_vacuum(tx)
    if owes_rewrite and not wait:  # who waits for us does it afterwards
        erasures.vacuum(database)
    if not todo:
        return []
    try:
        with _alone(workspace.datasets_dir, wait) as is_ours:
            return [_finish_one(database, workspace, each, actor, on_step) for each in todo] if is_ours else []
    except OSError as error:  # not even the lock can be taken
        return [_failed(database, each.dataset_id, None, error, actor) for each in todo]


@contextmanager
def _alone(folder: Path, wait: bool) -> Iterator[bool]:
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except BlockingIOError:
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(handle)


def readers_of(tx: Tx, todo: Pending) -> list[str]:
    """The unfinished runs that a rewrite waits for."""
    groups = erasures.groups_of(tx, todo)
    return erasures.readers(tx, todo.dataset_id, judges=Split.HELDOUT in groups)


def _finish_one(database: Database, workspace: Workspace, todo: Pending, actor: str, on_step: Step) -> RewriteResult:
    with database.read() as tx:
        dataset = datasets.get(tx, todo.dataset_id)
        groups = erasures.groups_of(tx, todo)
        reading = readers_of(tx, todo)
        ours = erasures.runs_of_profile(tx, dataset.profile)
    if reading:
        return RewriteResult(dataset.id, "waits", f"{', '.join(reading[:3])} still reads it", tuple(reading))
    try:
        cases = _rewrite(database, workspace, dataset, todo, groups.get(Split.HELDOUT, set()), on_step)
        on_step("attempts")
        _clear_cases(workspace, ours, groups.get(Split.HELDOUT, set()))
        if Split.VALIDATION in groups:
            _clear_samples(workspace, [run_id for run_id, read in ours.items() if read == dataset.id])
    except StoreError:
        raise
    except Exception as error:  # one dataset that cannot be rewritten keeps nobody from the others, or from its work
        return _failed(database, dataset.id, workspace.data_dir / dataset.path, error, actor)
    on_step("settle")
    with database.write() as tx:
        erasures.settle(tx, todo, actor=actor, cases=cases)
    return RewriteResult(dataset.id, "done", f"{len(todo.experience_ids)} taken out")


def _failed(database: Database, dataset_id: str, folder: Path | None, error: Exception, actor: str) -> RewriteResult:
    log.warning("erasure_failed", dataset=dataset_id, reason=f"{type(error).__name__}: {error}")
    is_ours = isinstance(error, TunesmithError | OSError)  # what others say may quote what was said
    why = f"{error if is_ours else type(error).__name__}{f'; its folder is {folder}' if folder else ''}"
    with database.write() as tx:
        if last_failure(tx, dataset_id, None) != why:  # a sweep that fails as the last one did says nothing new
            events.record(tx, "dataset", dataset_id, _FAILED, actor=actor, reason=why)
    return RewriteResult(dataset_id, "failed", why)


def last_failure(tx: Tx, dataset_id: str, since: datetime | None) -> str:
    """Why the last rewrite of a dataset failed; empty if none did, or since then."""
    told = [event for event in events.of_entity(tx, "dataset", dataset_id) if event.action in (_FAILED, "erased")]
    if not told or told[-1].action != _FAILED or (since is not None and told[-1].at < since):
        return ""
    return told[-1].reason


def _rewrite(
    database: Database, workspace: Workspace, dataset: Dataset, todo: Pending, heldout: set[str], on_step: Step
) -> list[HeldoutCase]:
    """Publish the dataset anew beside itself, point to it, remove what it was; what still answers its old cases."""
    from tunesmith.experience.forgetting.dataset_files import erase

    folder = workspace.data_dir / dataset.path
    if folder.exists():
        final = workspace.datasets_dir / f"{dataset.id}.{new_token()[:8]}"
        erased = erase(folder, final, todo.hashes, todo.experience_ids, on_step=on_step)
        if erased is not None:
            path = final.relative_to(workspace.data_dir).as_posix()
            with database.write() as tx:
                is_ours = erasures.point_to(tx, dataset, path, erased.fingerprint, erased.counts)
            if not is_ours:
                shutil.rmtree(final, ignore_errors=True)
                raise Refused(f"dataset {dataset.id} was rewritten by somebody else at this moment")
            folder = final
    on_step("pointed")
    for left in [workspace.datasets_dir / dataset.id, *workspace.datasets_dir.glob(f"{dataset.id}.*")]:
        if left != folder and left.exists():
            shutil.rmtree(left)
    fsync_folder(workspace.datasets_dir)
    on_step("removed")
    return _cases_left(folder, heldout) if heldout and folder.exists() else []


def _cases_left(folder: Path, groups: set[str]) -> list[HeldoutCase]:
    """One case for each prompt that another experience has asked too, and whose answer is still held out."""
    left = [case for case in heldout_cases(folder, _MANY_CASES) if case.id in groups]
    return list({case.id: case for case in reversed(left)}.values())


def _clear_cases(workspace: Workspace, run_ids: Iterable[str], groups: set[str]) -> None:
    """Evaluations were given the cases of the pool as a file each; their scores do not need it any more."""
    for path in _files_of(workspace, run_ids, "cases.jsonl") if groups else ():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _case_id(line) not in {None, *groups}]
        if len(kept) < len(lines):
            write_atomic(path, b"".join(kept))


def _case_id(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, KeyError, TypeError):
        return None  # no case, so nobody misses it


def _clear_samples(workspace: Workspace, run_ids: Iterable[str]) -> None:
    """Trainings showed a few answers to validation cases; whose they were is not written there, so all of them go."""
    for path in _files_of(workspace, run_ids, "events.jsonl"):
        lines = path.read_bytes().splitlines()
        kept = [_without_samples(line) for line in lines]
        if kept != lines:
            write_atomic(path, b"".join(line + b"\n" for line in kept))


def _without_samples(line: bytes) -> bytes:
    if b'"samples"' not in line:
        return line
    try:
        event = json.loads(line)
    except ValueError:
        return b""  # half a line of a program that was killed
    if not isinstance(event, dict) or not event.get("samples"):
        return line
    return json.dumps({**event, "samples": []}, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _files_of(workspace: Workspace, run_ids: Iterable[str], name: str) -> Iterator[Path]:
    for run_id in run_ids:
        yield from sorted((workspace.runs_dir / run_id).glob(f"*/{name}"))
