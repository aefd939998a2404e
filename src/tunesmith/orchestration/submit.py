"""Submit: from a profile, a dataset and overrides to a queued run whose spec never changes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never

from tunesmith.core.errors import ConfigError, Conflict, DataError, Refused, UsageError
from tunesmith.core.files import canonical_json, read_manifest, sha256_text, verify_folder
from tunesmith.core.ids import check_key, new_id
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.prepare import Progress, prepare_dataset
from tunesmith.datasets.report import DatasetReport, Kind, PrepareOptions
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.held_out import shortage_of_dataset
from tunesmith.experience.queries import members
from tunesmith.experience.rules.held_out import Shortage
from tunesmith.experience.rules.mix import Accumulated
from tunesmith.orchestration.check import check
from tunesmith.orchestration.judged_by import judged_by
from tunesmith.orchestration.start_weights import start_of
from tunesmith.orchestration.workspace_commit import with_commit
from tunesmith.profiles.base_model import is_whole_model
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.profile import Method
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.rules.run import Priority
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.spec import BaseModelRef, DatasetRef, Fingerprints, RunSpec, base_of
from tunesmith.runs.spec_paths import with_stored_paths
from tunesmith.store.database import Database, Tx
from tunesmith.training.memory_estimate import PLANNED, memory_of_spec, training_estimate
from tunesmith.training.rules.estimate import Estimate
from tunesmith.training.trainers.base import TrainerInfo
from tunesmith.training.trainers.command import sealed
from tunesmith.training.trainers.registry import DRY_RUN_OF

if TYPE_CHECKING:
    from tunesmith.experience.assemble import WantedKind

_ASSEMBLED = "assembled from experiences"
METHOD_OF_KIND = {Kind.SUPERVISED: Method.SFT, Kind.PREFERENCE: Method.ORPO, Kind.LABELLED: Method.KTO}
"""The method that `auto` stands for."""


@dataclass(frozen=True)
class Submission:
    """What a person or a trigger asks for."""

    profile: str
    data: str | Sequence[Path] | None = None
    """A dataset id, or JSONL files to prepare first; None: assemble a dataset from the profile's experiences."""
    overrides: Sequence[str] | Mapping[str, Any] = ()
    priority: Priority = Priority.NORMAL
    start: Literal["live", "base", "same"] = "live"
    """From what is live, from the bare base, or from what the repeated run started from."""
    version_id: str | None = None
    """From this version instead."""
    kind: WantedKind = "auto"
    """What a dataset is assembled of, where no data is given: answers or pairs."""
    accumulated: Accumulated | None = None
    """Assemble it of everything that was ever learnt, and what is new: for a training from the bare base."""
    dry_run: bool = False
    """Let a worker check a dataset that is there, on its machine; `orchestration/dry_run.py` does the same at once."""
    idempotency_key: str | None = None
    parent_id: str | None = None
    repeats: RunSpec | None = None
    """The run that is tried again: what it was told holds, unless an override says otherwise."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    may_open: Callable[[Tx, RunSpec], None] | None = None
    """Makes it an automatic round: called in the transaction that queues it, and raises if it must not be opened."""


@dataclass(frozen=True)
class Submitted:
    run_id: str
    dataset_id: str
    estimate: Estimate
    is_new: bool
    """False: this idempotency key had made the run before."""
    warning: str | None
    """A problem that is known already, such as too few held-out cases for the gate."""
    memory: str | None
    """The memory plan in one line; None for a dry run, or a trainer that plans its own memory."""


def submit(
    database: Database,
    workspace: Workspace,
    submission: Submission,
    *,
    actor: str,
    environ: Mapping[str, str] | None = None,
    on_progress: Progress | None = None,
) -> Submitted:
    """Check everything, prepare or assemble the data, write the spec, queue the run; when it returns, it is stored."""
    check_key(submission.idempotency_key)
    checked, trainer, campaign_id = check(
        database,
        workspace,
        submission.profile,
        overrides=submission.overrides,
        dry_run=submission.dry_run,
        environ=environ,
        repeats=submission.repeats,
    )
    if submission.dry_run and not isinstance(submission.data, str):
        raise UsageError(
            "a worker's dry run needs a dataset that is there; without one, ask for what can be known at once: "
            "client.profiles.dry_run, or `tunesmith run submit --dry-run`"
        )
    if submission.data is None:
        return _submit_assembled(database, workspace, submission, (checked, trainer, campaign_id), actor)
    dataset = _dataset(database, workspace, checked, submission.data, actor, on_progress)

    def shortage() -> Shortage | None:
        return shortage_of_dataset(database, checked, dataset.id, workspace.data_dir / dataset.path)

    return _submit_on(database, workspace, submission, (checked, trainer, campaign_id), dataset, actor, shortage)


Wanted = tuple[CheckedProfile, TrainerInfo, str | None]
"""What `check` has found: the profile, its trainer, its campaign."""


def _submit_assembled(
    database: Database, workspace: Workspace, submission: Submission, wanted: Wanted, actor: str
) -> Submitted:
    """Assemble a dataset and submit on it. A key that made a run before returns it, and assembles nothing."""
    from tunesmith.experience.assemble import assemble

    checked = wanted[0]
    if submission.idempotency_key is not None:
        with database.read() as tx:
            body_hash = _body_hash(submission, checked.resolved.fingerprint, _ASSEMBLED)
            known = runs.by_key(tx, submission.idempotency_key, body_hash)
        if known is not None:
            guess = estimate(database, workspace, known.spec)
            return Submitted(known.id, known.dataset_id, guess, False, None, None)
    made = assemble(database, workspace, checked, kind=submission.kind, accumulated=submission.accumulated, actor=actor)
    dataset = made.dataset
    try:
        return _submit_on(database, workspace, submission, wanted, dataset, actor, lambda: made.shortage)
    except BaseException:  # nobody knows of the dataset: let its experiences be chosen again at once
        with database.write() as tx:
            members.release_reservation(tx, dataset.id, actor=actor, reason="no run could be submitted on its dataset")
        raise


def _submit_on(
    database: Database,
    workspace: Workspace,
    submission: Submission,
    wanted: Wanted,
    dataset: Dataset,
    actor: str,
    shortage: Callable[[], Shortage | None],
) -> Submitted:
    checked, trainer, campaign_id = wanted
    spec = spec_of(database, workspace, submission, checked, trainer, dataset, base_of(checked))
    spec = spec.model_copy(update={"campaign_id": campaign_id, "metadata": with_commit(workspace, submission.metadata)})
    report = report_of(workspace, dataset)
    memory = memory_of_spec(database, spec, report) if trainer.name == PLANNED else None
    run_id, is_new = _queue(database, with_stored_paths(workspace, spec), submission, report.options, actor)
    guess = Estimate(0.0, "a dry run trains nothing") if spec.dry_run else estimate(database, workspace, spec)
    said = None if memory is None else memory.in_one_line()
    short = shortage()  # a gate that wants more held-out cases will hold the run, however well it trains
    is_decided = checked.lock.is_split_decided  # before this run
    warning = None if short is None else short.told(is_decided=is_decided, run_id=run_id)
    return Submitted(run_id, dataset.id, guess, is_new, warning, said)


def _dataset(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    data: str | Sequence[Path],
    actor: str,
    on_progress: Progress | None,
) -> Dataset:
    if isinstance(data, str):
        return existing_dataset(database, workspace, checked.profile.name, data)
    prepared, _ = prepare_dataset(database, workspace, checked, data, actor=actor, on_progress=on_progress)
    return prepared


def existing_dataset(database: Database, workspace: Workspace, profile: str, data: str) -> Dataset:
    """A dataset of the profile that can be trained on, whole on disk."""
    with database.read() as tx:
        dataset = datasets.find(tx, data)
    if dataset.profile != profile:
        raise Refused(f"dataset {dataset.id} belongs to profile {dataset.profile}; prepare its files for {profile}")
    if not dataset.counts["train"]:
        raise Refused(
            f"dataset {dataset.id} has nothing left to train on: all of it was forgotten; "
            "assemble or prepare a new one: tunesmith dataset assemble"
        )
    try:
        verify_folder(workspace.data_dir / dataset.path)
    except OSError as error:
        raise DataError(f"dataset {dataset.id} cannot be read: {error}") from error
    return dataset


def spec_of(
    database: Database,
    workspace: Workspace,
    submission: Submission,
    checked: CheckedProfile,
    trainer: TrainerInfo,
    dataset: Dataset,
    base: BaseModelRef,
) -> RunSpec:
    profile = checked.profile
    start = start_of(
        database, workspace, submission.profile, submission.start, submission.repeats, submission.version_id
    )
    if start is not None and is_whole_model(Path(start.path)) != (profile.recipe.tuning == "full"):
        raise ConfigError(
            f"recipe.tuning is {profile.recipe.tuning}, but {start.id}, its start, is of the other kind; "
            "submit with `--start base`, or set recipe.tuning to what that is"
        )
    method = _method(profile.recipe.method, trainer, dataset)
    return RunSpec(
        run_id=new_id("run"),
        profile=profile.name,
        trainer=trainer.name,
        trainer_options={DRY_RUN_OF: profile.trainer.kind}
        if submission.dry_run
        else sealed(trainer, profile.trainer.options, workspace.root),
        method=method,
        hardware_tier=checked.tier.value,
        num_processes=profile.hardware.processes,
        memory_gb=profile.hardware.memory_gb,
        base=base,
        start=start,
        dataset=DatasetRef(
            id=dataset.id,
            path=str(workspace.data_dir / dataset.path),
            fingerprint=dataset.fingerprint,
            num_train=dataset.counts["train"],
            num_validation=dataset.counts["validation"],
        ),
        recipe=profile.recipe.model_copy(update={"method": method}),
        budgets=profile.budgets,
        validation=profile.validation,
        checkpoints=profile.checkpoints,
        **judged_by(workspace, profile),
        shadow=profile.shadow,
        deploy=profile.deploy,
        watch=profile.watch,
        targets=profile.targets,
        expected_artifact="none" if submission.dry_run else "model" if profile.recipe.tuning == "full" else "adapter",
        dry_run=submission.dry_run,
        fingerprints=Fingerprints(config=checked.resolved.fingerprint, code=code_fingerprint()),
        origins=checked.resolved.said(),
        metadata=dict(submission.metadata),
    )


def _method(wanted: Method, trainer: TrainerInfo, dataset: Dataset) -> Method:
    """`auto` is orpo for pairs, kto for labelled answers, else sft; trainer and data must fit whatever it is."""
    kind = Kind(dataset.kind)
    method = METHOD_OF_KIND[kind] if wanted is Method.AUTO else wanted
    if method not in trainer.methods:
        known = ", ".join(sorted(trainer.methods))
        hint = "; `--set recipe.method=sft` learns the chosen answers" if kind is Kind.PREFERENCE else ""
        raise ConfigError(f"recipe.method: trainer {trainer.name} cannot do {method}; it can do: {known}{hint}")
    match kind:
        case Kind.LABELLED if method is not Method.KTO:
            raise ConfigError(
                f"recipe.method: {method} cannot learn from labelled answers, of which dataset {dataset.id} is made; "
                "set recipe.method: kto, or prepare the desirable answers alone, without label"
            )
        case Kind.SUPERVISED if method is Method.KTO:
            raise ConfigError(
                f"recipe.method: kto needs undesirable answers too, and dataset {dataset.id} has none; "
                "add label: true or false to each line, or give pairs (chosen and rejected), or set recipe.method: sft"
            )
        case Kind.SUPERVISED if method is not Method.SFT:
            raise ConfigError(
                f"recipe.method: {method} needs pairs (chosen and rejected); dataset {dataset.id} has none"
            )
        case Kind.SUPERVISED | Kind.PREFERENCE | Kind.LABELLED:
            return method
        case _:
            assert_never(kind)


def _queue(
    database: Database, spec: RunSpec, submission: Submission, prepared: PrepareOptions, actor: str
) -> tuple[str, bool]:
    """Insert run and task in one transaction; a key that was used returns the run it made."""
    data = _ASSEMBLED if submission.data is None else spec.dataset.fingerprint
    body_hash = _body_hash(submission, spec.fingerprints.config, data)
    for last_try in (False, True):
        try:
            with database.write() as tx:
                return queue_once(tx, spec, submission, body_hash, prepared, actor)
        except Conflict:
            # on PostgreSQL two may look for the key at once; the loser finds the winner's run on its second look
            if submission.idempotency_key is None or last_try:
                raise
    raise AssertionError("unreachable")


def queue_once(
    tx: Tx, spec: RunSpec, submission: Submission, body_hash: str, prepared: PrepareOptions, actor: str
) -> tuple[str, bool]:
    if submission.idempotency_key is not None:
        known = runs.by_key(tx, submission.idempotency_key, body_hash)
        if known is not None:
            return known.id, False
    if submission.may_open is not None:
        submission.may_open(tx, spec)
    erasures.refuse_while_pending(tx, spec.dataset.id, spec.dataset.fingerprint)
    shares = (prepared.heldout_share, prepared.validation_share)
    if spec.dry_run:
        members.check_for_run(tx, spec.dataset.id)
    else:
        profiles.decide_split(tx, spec.profile, spec.dataset.id, shares, prepared.split_number, actor=actor)
        members.reserve_for_run(tx, spec.dataset.id, actor=actor)
    runs.add(
        tx,
        spec,
        actor=actor,
        priority=submission.priority.rank,
        body_hash=body_hash,
        idempotency_key=submission.idempotency_key,
        parent_id=submission.parent_id,
        automatic=submission.may_open is not None,
    )
    tasks.add(
        tx, TaskKind.TRAIN, actor=actor, run_id=spec.run_id, profile=spec.profile, priority=submission.priority.rank
    )
    return spec.run_id, True


def _body_hash(submission: Submission, config: str, data: str) -> str:
    """Hash of what must be equal for two submissions with one key to count as the same."""
    body = {
        "profile": submission.profile,
        "dataset": data,
        "config": config,
        "priority": submission.priority,
        "start": submission.start,
        "dry_run": submission.dry_run,
        "metadata": dict(submission.metadata),
    }
    return sha256_text(canonical_json(body))


def estimate(database: Database, workspace: Workspace, spec: RunSpec) -> Estimate:
    """How long the run will train."""
    with database.read() as tx:
        dataset = datasets.get(tx, spec.dataset.id)
    return training_estimate(database, spec, report_of(workspace, dataset))


def report_of(workspace: Workspace, dataset: Dataset) -> DatasetReport:
    return DatasetReport.model_validate(read_manifest(workspace.data_dir / dataset.path).meta)
