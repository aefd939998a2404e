"""Evaluate: score the candidate and what is live on the profile's held-out pool, then let the gate decide."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError
from tunesmith.core.files import canonical_json, sha256_file, sha256_text, write_atomic
from tunesmith.datasets import queries as datasets
from tunesmith.evaluation.evaluators.command import SETTING, command_in
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.evaluation.rules.comparison import compare
from tunesmith.evaluation.rules.gate import BARE_BASE, Evidence, Judged, decide
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.programs.device.take import take_device
from tunesmith.programs.protocol import Scores
from tunesmith.programs.result_check import check_evaluate_result, read_scores
from tunesmith.programs.stage import StageContext, StageEnd, StageFact
from tunesmith.programs.supervise import ProgramEnd, Supervisor
from tunesmith.programs.user_command import changed_since_sealed
from tunesmith.runs.base_check import base_trouble
from tunesmith.runs.queries import runs
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AdapterRef, CasesRef, EvaluateSpec, RunSpec, Subject
from tunesmith.runs.spec_paths import with_absolute_paths


@dataclass(frozen=True)
class Measured(StageFact):
    judged: Judged
    adapter_id: str
    baseline_adapter_id: str | None
    scores_path: str


EVALUATOR_PROGRAM = ("python", "-m", "tunesmith.evaluation.evaluators.main")


def evaluate(context: StageContext) -> StageEnd:
    """Run the evaluator on both sides and judge; an evaluator's error is an error, never a score."""
    with context.database.read() as tx:
        run = runs.get(tx, context.run_id)
        candidate = adapters.of_run(tx, run.id)
        live = adapters.live(tx, run.profile)
        pool = datasets.pool(tx, run.profile, run.dataset_id, run.spec.evaluation.max_cases)
    if candidate is None:
        return StageEnd.failed(ErrorClass.BUG, f"run {run.id} has no adapter to evaluate")
    refused = _refused(context, run, candidate, pool)
    if refused is not None:
        return refused
    busy = take_device(context, run.spec.trainer)
    if busy is not None:
        return StageEnd.device_busy(busy)
    context.attempt_dir.mkdir(parents=True, exist_ok=True)
    spec = EvaluateSpec(
        attempt=context.attempt_ref,
        run_id=run.id,
        base=with_absolute_paths(context.workspace, run.spec).base,
        subjects=(
            Subject(label="candidate", adapter=_ref(context, candidate)),
            Subject(label="baseline", adapter=None if live is None else _ref(context, live)),
        ),
        cases=_write_cases(context, pool),
        evaluation=run.spec.evaluation,
        verifiers=run.spec.verifiers,
        command=command_in(context.workspace.root, run.spec.evaluation.command),
        seed=run.spec.recipe.seed,
    )
    env = child_environment(os.environ, context.settings.worker.pass_environment)
    end = Supervisor(context).run(EVALUATOR_PROGRAM, spec, env)
    ended_early = _ended_early(context, end)
    if ended_early is not None:
        return ended_early
    checked = check_evaluate_result(spec, context.attempt_dir, end.exit_code)
    if checked.outcome is AttemptState.INTERRUPTED:
        error_class = checked.error_class or ErrorClass.TRANSIENT
        return StageEnd(AttemptState.INTERRUPTED, error_class=error_class, error=checked.error)
    if checked.outcome is not AttemptState.SUCCEEDED or checked.result is None:
        error = context.with_log(checked.error or "")
        return StageEnd(checked.outcome, error_class=checked.error_class, error=error)
    scores = read_scores(context.attempt_dir, checked.result)
    references = checked.result.references
    judged = _judge(run.spec, spec, scores, pool, None if references is None else references.digest)
    return StageEnd.succeeded(
        Measured(
            judged=judged,
            adapter_id=candidate.id,
            baseline_adapter_id=None if live is None else live.id,
            scores_path=(context.attempt_dir / "scores.json").relative_to(context.workspace.data_dir).as_posix(),
        )
    )


def _refused(
    context: StageContext, run: runs.Run, candidate: Adapter, pool: list[datasets.HeldoutCase]
) -> StageEnd | None:
    """Why an evaluation cannot begin; None if it can."""
    if not pool:
        return StageEnd.failed(ErrorClass.DATA, f"profile {run.profile} has no held-out cases")
    try:
        for metric in run.spec.evaluation.metrics:
            find_metric(metric, run.spec.evaluation)
    except ConfigError as error:  # its package was there when the run was submitted
        again = f"install its package again, then: tunesmith adapter deploy {candidate.name}"
        return StageEnd.failed(ErrorClass.CONFIG, f"{error.message}; {again}")
    odd = _changed_command(context, run.spec)
    if odd is not None:
        return StageEnd.failed(
            ErrorClass.MISMATCH, f"{odd}; tunesmith adapter deploy {candidate.name} judges by it as it is"
        )
    changed = base_trouble(context.workspace, run.spec)
    if changed is not None:
        again = f"then have it measured and deployed: tunesmith adapter deploy {candidate.name}"
        return StageEnd.failed(ErrorClass.MISMATCH, f"{changed}, {again}")
    return None


def _changed_command(context: StageContext, spec: RunSpec) -> str | None:
    """Why the program that scores is no longer the one that was submitted; None if it is, or if there is none."""
    root, command = context.workspace.root, spec.evaluation.command
    try:
        command_in(root, command)
    except ConfigError as error:
        return error.message
    return changed_since_sealed(root, command, spec.command_sha256, setting=SETTING)


def _ended_early(context: StageContext, end: ProgramEnd) -> StageEnd | None:
    """Where somebody ended the evaluator, there is nothing to judge."""
    if end.decided_by is RequestKind.CANCEL:
        return StageEnd.cancelled()
    if end.killed_for is not None:
        return StageEnd.failed(end.killed_for, context.with_log(end.why))
    if end.interrupted is not None:
        return StageEnd(AttemptState.INTERRUPTED, error=end.interrupted)
    return None


def _judge(
    run: RunSpec, spec: EvaluateSpec, scores: Scores, pool: list[datasets.HeldoutCase], references: str | None
) -> Judged:
    report = compare(
        [case.id for case in pool],
        scores.by_subject,
        [find_metric(name, run.evaluation) for name in run.evaluation.metrics],
        primary=find_metric(run.gate.primary, run.evaluation),
        # cases of earlier, proven datasets
        established={case.id for case in pool if case.is_established},
        confidence=run.gate.confidence,
        seed=run.recipe.seed,
    )
    candidate, baseline = (subject.adapter for subject in spec.subjects)
    assert candidate is not None
    evidence = Evidence(
        adapter=candidate.digest,
        base=spec.base.digest,
        cases=spec.cases.digest,
        policy=policy_digest(run),
        baseline=BARE_BASE if baseline is None else baseline.digest,
        references=references,
    )
    verdict = decide(report, run.gate, run.evaluation.metrics, run.origins)
    return Judged(evidence=evidence, report=report, verdict=verdict)


def policy_digest(run: RunSpec) -> str:
    """What the verdict depends on besides the numbers."""
    policy = {"gate": run.gate.model_dump(mode="json"), "evaluation": run.evaluation.model_dump(mode="json")}
    if run.verifiers:
        policy["verifiers"] = run.verifiers
    if run.command_sha256:
        policy["command"] = run.command_sha256
    return sha256_text(canonical_json(policy))


def _ref(context: StageContext, adapter: Adapter) -> AdapterRef:
    path = context.workspace.data_dir / adapter.path
    return AdapterRef(id=adapter.id, path=str(path), digest=adapter.digest)


def _write_cases(context: StageContext, pool: list[datasets.HeldoutCase]) -> CasesRef:
    path = context.attempt_dir / "cases.jsonl"
    lines = [json.dumps({"id": case.id, "messages": case.messages}, ensure_ascii=False) for case in pool]
    write_atomic(path, "\n".join(lines) + "\n")
    return CasesRef(path=str(path), digest=sha256_file(path), num=len(pool))
