"""Candidates that are about to be deployed, made without training: a published folder, a verdict, a task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.rows import ACTOR, ARCHITECTURE, PROFILE, a_run
from tunesmith.client import Client
from tunesmith.core.files import publish_folder, sha256_text, verify_folder
from tunesmith.core.ids import new_id
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.evaluate import policy_digest
from tunesmith.evaluation.evaluators.sim import simulated_reading
from tunesmith.evaluation.rules.comparison import Report
from tunesmith.evaluation.rules.gate import Decision, Evidence, Judged, Verdict
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.profile import TargetSettings, Watch
from tunesmith.programs.protocol import REFERENCES
from tunesmith.programs.readings import References
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.runs.spec import BaseModelRef

ASKED = (({"role": "user", "content": "hi"},), ({"role": "user", "content": "what is one and one?"},))


def a_simulated_adapter(folder: Path, quality: float) -> str:
    """A published folder with something in it; its digest."""
    staged = folder.with_name(f".{folder.name}")
    staged.mkdir(parents=True)
    (staged / "sim.json").write_text(json.dumps({"quality": quality}))
    (staged / "adapter_model.safetensors").write_bytes(f"weights {folder.name} {quality}".encode() * 100)
    return publish_folder(staged, folder, {}).digest


def a_candidate(
    client: Client,
    *,
    targets: Sequence[dict[str, Any]] = ({},),
    profile: str = PROFILE,
    folder: Path | None = None,
    references: References | None = None,
    **spec: Any,
) -> Adapter:
    """A version that was promoted a moment ago against what is live, and the task that deploys it."""
    name = new_id("made")
    place = client.workspace.adapters_dir / name
    if folder is None:
        digest = a_simulated_adapter(place, 0.5)
    else:
        shutil.copytree(folder, place)
        digest = verify_folder(place).digest
    readings = tuple(simulated_reading(digest, messages) for messages in ASKED)
    said = references or References(adapter=digest, base="b" * 64, dtype="float32", max_tokens=1, readings=readings)
    scores = client.workspace.runs_dir / name / "scores.json"
    scores.parent.mkdir(parents=True)
    content = said.model_copy(update={"adapter": digest}).model_dump_json()
    (scores.parent / REFERENCES).write_text(content)
    with client._session.database.write() as tx:
        wanted = tuple(TargetSettings(**target) for target in targets)
        folder_of_base = client.workspace.root / "models" / "tiny"
        base = BaseModelRef(
            path=str(folder_of_base), revision=None, digest=base_digest(folder_of_base), lock=ARCHITECTURE, context=512
        )
        spec = {"watch": Watch(for_s=0.0), "targets": wanted, "base": base, **spec}
        run = a_run(tx, RunState.DEPLOYING, profile=profile, **spec)
        adapter = adapters.register(
            tx, profile, run_id=run.id, path=place.relative_to(client.workspace.data_dir).as_posix(), digest=digest,
            base_digest=run.spec.base.digest, metrics={}, actor=ACTOR,
        )  # fmt: skip
        evidence = Evidence(
            adapter=digest, base=run.spec.base.digest, cases="c" * 64, policy=policy_digest(run.spec),
            baseline=deployments.live_digest(tx, profile), references=sha256_text(content),
        )  # fmt: skip
        verdict = Verdict(decision=Decision.PROMOTE, reasons=("as the test wants",))
        judged = Judged(evidence=evidence, report=Report(num_cases=0, confidence=0.95, comparisons=()), verdict=verdict)
        place_of = scores.relative_to(client.workspace.data_dir).as_posix()
        evaluations.add(
            tx,
            judged,
            run_id=run.id,
            adapter_id=adapter.id,
            baseline_adapter_id=None,
            scores_path=place_of,
            actor=ACTOR,
        )
        tasks.add(tx, TaskKind.DEPLOY, actor=ACTOR, run_id=run.id, profile=profile)
    return adapter
