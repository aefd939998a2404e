"""Train: one attempt of a run's training, from the stored spec to a verified adapter in the workspace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tunesmith.core.errors import DataError
from tunesmith.core.files import MANIFEST, copy_published, publish_folder, verify_folder
from tunesmith.experience.forgetting.queries import runs as forgotten_runs
from tunesmith.profiles.resolve import why_no_runs
from tunesmith.programs.device.take import take_device
from tunesmith.programs.process_identity import ProcessIdentity, kill_orphans
from tunesmith.programs.protocol import CHECKPOINTS, CheckpointEvent, Event, Result, ResultStatus
from tunesmith.programs.result_check import CheckedResult, check_train_result
from tunesmith.programs.stage import DryRunPassed, Forbidden, StageContext, StageEnd, Trained
from tunesmith.programs.supervise import ProgramEnd, Supervisor
from tunesmith.runs.base_check import base_trouble
from tunesmith.runs.queries import checkpoints, queue, requests, runs
from tunesmith.runs.queries.tasks import Attempt
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import ResumeSource, RunSpec, TrainSpec
from tunesmith.runs.spec_paths import with_absolute_paths
from tunesmith.training.memory_estimate import corrections
from tunesmith.training.rules.live_checks import broken_numbers
from tunesmith.training.rules.save_schedule import steps_to_delete
from tunesmith.training.trainers.command import argv_of, changed_since_sealed, environment_of
from tunesmith.training.trainers.registry import find_trainer


def train(context: StageContext) -> StageEnd:
    """Start the trainer, watch it and check its result; publish the adapter only if every check passes."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        earlier = queue.attempts_of_run(tx, run.id)
        forgotten = forgotten_runs.why_ended(tx, run)
    _end_strays(earlier, context)
    if forgotten is not None:
        return StageEnd.cancelled()
    forbidden = why_no_runs(context.workspace, run.profile)
    if forbidden is not None:
        return StageEnd(AttemptState.INTERRUPTED, fact=Forbidden(forbidden), error=forbidden)
    changed = base_trouble(context.workspace, run.spec)
    if changed is not None:
        return StageEnd.failed(ErrorClass.MISMATCH, f"{changed}, then: tunesmith run retry {run.id}")
    busy = None if run.spec.dry_run else take_device(context, run.spec.trainer)
    if busy is not None:
        return StageEnd.device_busy(busy)
    run_spec = with_absolute_paths(context.workspace, run.spec)
    problem = _dataset_problem(run_spec)
    if problem is not None:
        return StageEnd.failed(ErrorClass.DATA, problem)
    trainer, options, root = find_trainer(run.spec.trainer), run.spec.trainer_options, context.workspace.root
    changed = changed_since_sealed(trainer, options, root)
    if changed is not None:
        return StageEnd.failed(ErrorClass.MISMATCH, f"{changed}; submit it again: tunesmith run retry {run.id}")
    resume = None if run.spec.dry_run else _newest_good_checkpoint(context)
    if resume is not None:
        _prune(context, resume, run.spec.checkpoints.keep)
    spec = TrainSpec(
        attempt=context.attempt_ref,
        run=run_spec,
        resume=resume,
        micro_batch_divisor=2**context.claim.task.counts.num_shrinks,
        spent_wall_s=sum(float((attempt.result or {}).get("train_s", 0.0)) for attempt in earlier),
        cache_dir=str(context.workspace.cache_dir),
        memory_corrections=corrections(context.database),
    )
    wall_s = max(0.0, run.spec.budgets.wall_s - spec.spent_wall_s)
    supervisor = Supervisor(context, lambda event: _register_checkpoint(context, event), wall_s, broken_numbers)
    env = environment_of(trainer, options, os.environ, context.settings.worker.pass_environment)
    end = supervisor.run(argv_of(trainer, options, root), spec, env)
    return _conclude(context, spec, end)


def _conclude(context: StageContext, spec: TrainSpec, end: ProgramEnd) -> StageEnd:
    """From the program's end to the attempt's end. Whoever asked for the end decides what it means."""
    if end.decided_by is RequestKind.CANCEL:
        return StageEnd.cancelled()
    if end.finding is not None:  # never tried again: the run fails (a stop on request is a success)
        return StageEnd(AttemptState.STOPPED, error=f"live check {end.finding.rule}: {end.finding.reason}")
    if end.killed_for is not None:
        return StageEnd.failed(end.killed_for, context.with_log(end.why))
    checked = check_train_result(spec, context.attempt_dir, end.exit_code)
    if end.interrupted is not None and checked.outcome in (AttemptState.FAILED, AttemptState.LOST):
        # told to end and did not manage a clean checkpoint in its grace: the last published one still counts
        return StageEnd(AttemptState.INTERRUPTED, error=end.interrupted)
    if checked.outcome is not AttemptState.SUCCEEDED:
        return _not_succeeded(context, checked, end)
    assert checked.result is not None
    if context.read(lambda tx: requests.is_cancelled(tx, context.run_id)):  # it came while the result was saved
        return StageEnd.cancelled()
    if spec.run.dry_run:
        return StageEnd.succeeded(DryRunPassed(), _brief(checked.result))
    return StageEnd.succeeded(_publish(context, checked.result), _brief(checked.result))


def _not_succeeded(context: StageContext, checked: CheckedResult, end: ProgramEnd) -> StageEnd:
    is_interrupted = checked.outcome is AttemptState.INTERRUPTED
    decided_by = end.decided_by if is_interrupted else None
    nobody_asked = is_interrupted and end.interrupted is None and decided_by is None
    error = checked.error or end.interrupted or ""
    return StageEnd(
        checked.outcome,
        error_class=checked.error_class or (ErrorClass.TRANSIENT if nobody_asked else None),
        error=context.with_log(error) if checked.outcome is AttemptState.FAILED else error,
        decided_by=decided_by,
        result=_brief(checked.result) if checked.result is not None else {},
    )


def _brief(result: Result) -> dict[str, object]:
    """The part of a result worth keeping in the store."""
    kept = {"status", "num_steps", "best_step", "num_trained_tokens", "num_trained_examples", "train_s", "metrics"}
    text = result.model_dump_json(include=kept | {"num_dropped_examples", "detail"})
    brief: dict[str, object] = json.loads(text, parse_constant=str)  # PostgreSQL's JSON knows no NaN
    return brief


def _publish(context: StageContext, result: Result) -> Trained:
    """Copy the verified artefact to the workspace's adapters, named by content; safe to repeat."""
    assert result.artifact is not None
    context.pulse.raise_if_lost()
    source = context.attempt_dir / result.artifact.path
    final = context.workspace.adapters_dir / result.artifact.digest[:32]
    if not _is_whole(final, result.artifact.digest):
        shutil.rmtree(final, ignore_errors=True)  # damaged since an earlier run made the same weights
        staged = context.workspace.adapters_dir / f".{context.claim.attempt.id}"
        shutil.rmtree(staged, ignore_errors=True)
        try:
            meta = copy_published(source, staged).meta
            publish_folder(staged, final, meta)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    verify_folder(final, result.artifact.digest)
    return Trained(
        path=final.relative_to(context.workspace.data_dir).as_posix(),
        digest=result.artifact.digest,
        metrics=result.metrics,
        stopped_early=result.status is ResultStatus.STOPPED,
    )


def _is_whole(folder: Path, digest: str) -> bool:
    try:
        verify_folder(folder, digest)
    except (DataError, OSError):
        return False
    return True


def _register_checkpoint(context: StageContext, event: Event) -> None:
    if not isinstance(event, CheckpointEvent):
        return
    path = context.attempt_dir / CHECKPOINTS / event.path
    context.write(
        lambda tx: checkpoints.register(
            tx,
            context.claim.lease,
            context.run_id,
            step=event.step,
            path=path.relative_to(context.workspace.data_dir).as_posix(),
            digest=event.digest,
            kinds=event.kinds,
        )
    )


def _newest_good_checkpoint(context: StageContext) -> ResumeSource | None:
    """The furthest checkpoint whose bytes are still what its manifest says; a damaged one is stepped over."""
    with context.database.read() as tx:
        known = checkpoints.of_run(tx, context.run_id)
    for checkpoint in known:
        folder = context.workspace.data_dir / checkpoint.path
        if not _is_whole(folder, checkpoint.digest):
            continue
        return ResumeSource(path=str(folder), digest=checkpoint.digest, step=checkpoint.step)
    return None


def _prune(context: StageContext, resume: ResumeSource, keep: int) -> None:
    """Remove what earlier attempts left beyond what may still be needed: the one that was just found good, `keep` more
    to step back to, and the furthest best. Where none was found good, nothing is ever removed."""
    with context.database.read() as tx:
        known = checkpoints.of_run(tx, context.run_id)
    folders = {context.workspace.data_dir / one.path: one for one in reversed(known)}  # the furthest last
    present = [(folder, one) for folder, one in folders.items() if folder.exists()]
    last = next(place for place, (folder, _) in enumerate(present) if str(folder) == resume.path)
    best = max((place for place, (_, one) in enumerate(present) if "best" in one.kinds), default=None)
    context.pulse.raise_if_lost()
    # what is further than the good one is damaged: evidence
    for place in steps_to_delete(range(last + 1), best, last, keep):
        folder = present[place][0]
        (folder / MANIFEST).unlink(missing_ok=True)  # half removed, it is no longer a published one
        shutil.rmtree(folder, ignore_errors=True)


def _dataset_problem(spec: RunSpec) -> str | None:
    """A dataset swapped or damaged after queueing is refused before a GPU hour is spent."""
    try:
        manifest = verify_folder(Path(spec.dataset.path))
    except (DataError, OSError) as error:
        return f"dataset {spec.dataset.id}: {error}"
    if manifest.meta.get("fingerprint") != spec.dataset.fingerprint:
        return f"dataset {spec.dataset.id} is not the one that was queued: its fingerprint differs"
    return None


def _end_strays(earlier: list[Attempt], context: StageContext) -> None:
    """Make sure that no program of an earlier attempt is still running on this machine."""
    for attempt in earlier:
        if attempt.process is not None and attempt.ended_at is not None:
            folder = context.workspace.runs_dir / context.run_id / attempt.id
            kill_orphans(ProcessIdentity.from_json(attempt.process), context.settings.worker.grace_s, folder)
