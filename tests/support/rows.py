"""Builders of rows: a run, task, adapter, campaign or experience in any state, and dumps to compare.

States are forced with raw SQL where a test needs a starting point; what is tested goes through the real setters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from support import tables
from tunesmith.core.errors import StoreError
from tunesmith.core.ids import new_id
from tunesmith.datasets import queries as datasets
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.evaluate import policy_digest
from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.gate import BARE_BASE, Decision, Evidence, Judged, Verdict
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.profile import (
    Budgets,
    Checkpoints,
    Deploy,
    EvaluationSettings,
    GateSettings,
    Method,
    Recipe,
    TargetSettings,
    Validation,
    Watch,
)
from tunesmith.profiles.queries import Campaign, NewCampaign
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.profiles.rules.lock import ArchitectureLock, ProfileLock
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Attempt, Claim
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.runs.spec import BaseModelRef, DatasetRef, Fingerprints, RunSpec
from tunesmith.store.database import Database, Tx
from tunesmith.store.events import RecordedEvent, of_entity
from tunesmith.store.lookup import get_one

PROFILE = "support"
ACTOR = "user:test"
WORKER = "wk-test"
ALL_KINDS = tuple(TaskKind)

ARCHITECTURE = ArchitectureLock(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=320,
    context=512,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)


def a_profile(tx: Tx, name: str = PROFILE) -> str:
    lock = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05)
    profiles.lock(tx, name, lock, actor=ACTOR)
    return name


def a_dataset(tx: Tx, profile: str = PROFILE, fingerprint: str | None = None) -> str:
    a_profile(tx, profile)
    dataset_id = new_id("ds")
    counts = {"train": 80, "validation": 10, "heldout": 10}
    datasets.add(
        tx,
        dataset_id,
        profile,
        path=f"datasets/{dataset_id}",
        fingerprint=fingerprint or dataset_id,
        kind="supervised",
        counts=counts,
        actor=ACTOR,
    )
    return dataset_id


def a_spec(dataset_id: str, profile: str = PROFILE, **changes: Any) -> RunSpec:
    """A spec that the store accepts; `changes` replace whole fields."""
    fields: dict[str, Any] = {
        "run_id": new_id("run"),
        "profile": profile,
        "trainer": "sim",
        "trainer_options": {},
        "method": Method.SFT,
        "hardware_tier": "cpu",
        "base": BaseModelRef(path="/base", revision=None, digest="b" * 64, lock=ARCHITECTURE, context=512),
        "start": None,
        "dataset": DatasetRef(id=dataset_id, path="/data", fingerprint="f", num_train=80, num_validation=10),
        "recipe": Recipe(),
        "budgets": Budgets(),
        "validation": Validation(),
        "checkpoints": Checkpoints(),
        "evaluation": EvaluationSettings(),
        "gate": GateSettings(),
        "deploy": Deploy(),
        "watch": Watch(),
        "targets": (TargetSettings(),),
        "expected_artifact": "adapter",
        "fingerprints": Fingerprints(config="c", code="d"),
    }
    return RunSpec(**{**fields, **changes})


def a_run(
    tx: Tx,
    state: RunState = RunState.QUEUED,
    *,
    dataset_id: str | None = None,
    profile: str = PROFILE,
    campaign_id: str | None = None,
    automatic: bool = False,
    **changes: Any,
) -> Run:
    """A run in a state, without any task."""
    dataset = dataset_id or a_dataset(tx, profile)
    spec = a_spec(dataset, profile, campaign_id=campaign_id, **changes)
    now = datasets.get(tx, dataset).fingerprint
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update={"fingerprint": now})})
    runs.add(tx, spec, actor=ACTOR, priority=1, body_hash="body", automatic=automatic)
    force(tx, tables.runs, spec.run_id, state=state, finished_at=tx.now if state in RUN.finished else None)
    return runs.get(tx, spec.run_id)


def a_task(tx: Tx, state: TaskState = TaskState.WAITING, kind: TaskKind = TaskKind.EXPORT, **more: Any) -> str:
    """A task in a state; a leased one has its open attempt."""
    task_id = tasks.add(tx, kind, actor=ACTOR, **more)
    if state is TaskState.LEASED:
        claim_of(tx, task_id)
    elif state is not TaskState.WAITING:
        force(tx, tables.tasks, task_id, state=state)
    return task_id


def claim_of(tx: Tx, task_id: str, *, worker: str = WORKER, lease_s: float = 30.0) -> Claim:
    """Claim this very task, whatever else waits: the others step aside for the moment."""
    others = (tables.tasks.c.id != task_id, tables.tasks.c.state == "waiting")
    waiting = [row["id"] for row in tx.all(sa.select(tables.tasks.c.id).where(*others))]
    tx.run(tables.tasks.update().where(*others).values(state="cancelled"))
    claim = tasks.claim(tx, worker, ALL_KINDS, lease_s)
    tx.run(tables.tasks.update().where(tables.tasks.c.id.in_(waiting)).values(state="waiting"))
    assert claim is not None
    assert claim.task.id == task_id
    return claim


def a_claimed_run(tx: Tx, state: RunState, kind: TaskKind, **more: Any) -> tuple[Run, Claim]:
    """A run in a state whose task a worker has leased."""
    run = a_run(tx, state, **more)
    task_id = tasks.add(tx, kind, actor=ACTOR, run_id=run.id, profile=run.profile, priority=run.priority)
    return run, claim_of(tx, task_id)


def an_adapter(
    tx: Tx, state: AdapterState = AdapterState.CANDIDATE, *, profile: str = PROFILE, run_id: str | None = None
) -> Adapter:
    """An adapter version in a state; its digest is its own."""
    made_by = run_id or a_run(tx, RunState.COMPLETED, profile=profile).id
    adapter = adapters.register(
        tx,
        profile,
        run_id=made_by,
        path=f"adapters/{made_by}",
        digest=f"digest-{made_by}",
        base_digest="b" * 64,
        metrics={"validation_loss": 1.0},
        actor=ACTOR,
    )
    force(tx, tables.adapters, adapter.id, state=state)
    return adapters.get(tx, adapter.id)


def a_campaign(tx: Tx, state: CampaignState = CampaignState.ACTIVE, profile: str = PROFILE) -> Campaign:
    a_profile(tx, profile)
    new = NewCampaign(profile, overrides={}, budget={}, code_version="v", config_hash="h")
    campaign = campaigns.add(tx, new, actor=ACTOR)
    force(tx, tables.campaigns, campaign.id, state=state)
    return campaigns.get(tx, campaign.id)


def an_experience(
    tx: Tx,
    state: ExperienceState = ExperienceState.COLLECTED,
    *,
    dataset_id: str | None = None,
    profile: str = PROFILE,
) -> str:
    """An experience in a state; reserved and consumed ones belong to a dataset."""
    a_profile(tx, profile)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    experience_id, _ = experiences.add(tx, profile, new_id("key"), messages, actor=ACTOR)
    held = state in (ExperienceState.RESERVED, ExperienceState.CONSUMED)
    owner = (dataset_id or a_dataset(tx, profile)) if held else None
    force(tx, tables.experiences, experience_id, state=state, dataset_id=owner)
    return experience_id


def an_evaluation(
    tx: Tx, run: Run, adapter: Adapter, decision: Decision = Decision.PROMOTE, baseline: str = BARE_BASE
) -> Judged:
    judged = a_judgement(run, adapter.digest, decision, baseline)
    evaluations.add(
        tx, judged, run_id=run.id, adapter_id=adapter.id, baseline_adapter_id=None, scores_path="s", actor=ACTOR
    )
    return judged


def a_comparison(**changes: Any) -> Comparison:
    """No measurable difference."""
    fields: dict[str, Any] = {"n": 60, "candidate": 1.0, "baseline": 1.0, "difference": 0.0, "low": -0.1, "high": 0.1}
    return Comparison(metric="heldout_loss", **{**fields, **changes})


def a_judgement(run: Run, digest: str, decision: Decision, baseline: str = BARE_BASE) -> Judged:
    evidence = Evidence(
        adapter=digest, base="b" * 64, cases="c" * 64, policy=policy_digest(run.spec), baseline=baseline
    )
    return Judged(
        evidence=evidence,
        report=Report(num_cases=60, confidence=0.95, comparisons=(a_comparison(),)),
        verdict=Verdict(decision=decision, reasons=("as the test wants",)),
    )


def force(tx: Tx, table: sa.Table, row_id: str, **values: Any) -> None:
    """Put a row into a state without asking the setter: where a test begins."""
    assert tx.run(table.update().where(table.c.id == row_id).values(**values)) == 1


def moves(tx: Tx, entity: str, entity_id: str) -> list[RecordedEvent]:
    """The events of a thing that moved its state from one to another."""
    return [event for event in of_entity(tx, entity, entity_id) if event.old_state is not None]


def dump(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, to see that nothing changed."""
    with database.read() as tx:
        return {
            table.name: [tuple(row) for row in tx.conn.execute(sa.select(table).order_by(*table.primary_key.columns))]
            for table in tables.metadata.sorted_tables
        }


def seconds_until_due(tx: Tx, task_id: str) -> float:
    """How long the retry table still keeps a waiting task back."""
    table = tables.tasks
    row = tx.first(sa.select(table.c.available_at, table.c.available_clock).where(table.c.id == task_id))
    if row is None or row["available_at"] is None or row["available_clock"] != tx.lease_clock:
        return 0.0
    return max(0.0, float(row["available_at"]) - tx.lease_now)


class Unreachable:
    """A store that can be cut off, as a network does it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_down = False

    def read(self) -> Any:
        return self._open(self.database.read)

    def write(self, **options: bool) -> Any:
        return self._open(lambda: self.database.write(**options))

    def _open(self, really: Callable[[], Any]) -> Any:
        if self.is_down:
            raise StoreError("the store cannot be used")
        return really()

    def close(self) -> None:
        self.database.close()


def attempt_with(tx: Tx, attempt_id: str) -> Attempt:
    return tasks.attempt_of(get_one(tx, tables.attempts, attempt_id))
