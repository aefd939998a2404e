"""A small world for the learning machine: one workspace, driven by the product's own operations, and read back whole.

Programs are the only thing it plays: what a trainer or an evaluator would have reported is told to the spine as the
worker tells it. Deploying and watching are the real stages, on adapters of a few bytes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import sqlalchemy as sa

from support import tables
from support.rows import WORKER, a_judgement, claim_of, dump
from support.workspaces import a_workspace
from tunesmith.core import clock, ids
from tunesmith.core.files import publish_folder
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.reading import read_split
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation.evaluate import Measured
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.orchestration import lifecycle
from tunesmith.orchestration.worker import STAGES
from tunesmith.profiles.settings import Settings
from tunesmith.programs.stage import DryRunPassed, Looked, Pulse, StageContext, StageEnd, Trained
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.store.schema import open_store

Row = Mapping[str, Any]
_MIX = {"min_new": 2, "max_examples": 10, "min_eval_examples": 2}
_DATA = {"heldout_share": 0.3, "validation_share": 0.15, "screens": ["email"]}
_ENDLESS_S = 1e6


@dataclass(frozen=True)
class Seen:
    """Everything that the store and the dataset folders hold at one moment."""

    experiences: Mapping[str, Row]
    assessments: Mapping[str, Row]
    datasets: Mapping[str, Row]
    runs: Mapping[str, Row]
    adapters: Mapping[str, Row]
    members: list[Row]
    cases: list[Row]
    """Of the held-out pool."""
    erasures: list[Row]
    events: list[Row]
    examples: Mapping[str, dict[Split, list[Example]]]
    """By dataset, as its files have them."""

    @property
    def unfinished(self) -> list[Row]:
        return [run for run in self.runs.values() if run["finished_at"] is None]

    def new_of(self, dataset_id: str) -> list[Row]:
        """The members that a dataset has reserved; not what it only replays."""
        return [each for each in self.members if each["dataset_id"] == dataset_id and each["role"] != "replay"]

    @property
    def unfit(self) -> set[str]:
        """What no dataset may take in at this moment."""
        return {
            row["id"]
            for row in self.experiences.values()
            if row["state"] == "forgotten"
            or row["in_review"]
            or self.assessments[row["id"]]["class_name"] == "quarantined"
            or self.assessments[row["id"]]["review"] == "reject"
        }


class World:
    def __init__(self, folder: Path, store_url: str) -> None:
        sections = {"experience": {"mix": _MIX}, "data": _DATA}
        self.client = a_workspace(folder, profile=sections, settings={"store": {"url": store_url}})
        self.database = open_store(store_url)
        self.claims: dict[str, Claim] = {}
        """By run: what a worker holds at this moment."""
        self._num_adapters = 0
        self._read: dict[tuple[str, float], dict[Split, list[Example]]] = {}
        self._clock = clock.utc_now
        self._later = timedelta()
        clock.utc_now = lambda: self._clock() + self._later  # as the other tests of ages do it
        self._chance, self._counter = ids.secrets, ids._counter
        # the same ids again in every world: the mix draws lots by them, and a walk must be one that can be repeated
        drawn = random.Random(1)
        ids.secrets = SimpleNamespace(  # type: ignore[assignment]
            randbits=drawn.getrandbits, token_hex=lambda num: drawn.randbytes(num).hex()
        )
        ids._counter = count(1)

    def close(self) -> None:
        clock.utc_now = self._clock
        ids.secrets, ids._counter = self._chance, self._counter
        self.client.close()
        self.database.close()

    def let_time_pass(self, hours: float) -> None:
        self._later += timedelta(hours=hours)

    # --- what a worker does ---

    def sweep(self) -> None:
        self.client.system.worker().sweep()

    def claim(self, run: Run) -> Claim | None:
        """A worker takes the run's task, its backoff over; None where nothing waits."""
        with self.database.write() as tx:
            task = tasks.open_of_run(tx, run.id)
            if task is None or task.state is not TaskState.WAITING:
                return None
            mine = tables.tasks.c.id == task.id
            tx.run(tables.tasks.update().where(mine).values(available_at=None, available_clock=None))
            claim = claim_of(tx, task.id, lease_s=_ENDLESS_S)
            lifecycle.begin(tx, claim, actor=WORKER)
        self.claims[run.id] = claim
        return claim

    def settle(self, claim: Claim, end: StageEnd) -> None:
        assert claim.task.run_id is not None
        self.claims.pop(claim.task.run_id, None)
        with self.database.write() as tx:
            lifecycle.settle(tx, claim, end, actor=WORKER)

    def lose(self, claim: Claim) -> None:
        """The worker died: another one finds that its lease has run out."""
        assert claim.task.run_id is not None
        self.claims.pop(claim.task.run_id, None)
        with self.database.write() as tx:
            lifecycle.settle_lost(tx, claim, actor=WORKER)

    def work(self, claim: Claim) -> None:
        """Run the real stage of a claimed task, and settle it."""
        context = StageContext(self.database, self.client.workspace, Settings(), claim, WORKER, Pulse())
        self.settle(claim, STAGES[claim.task.kind](context))

    def trained(self, run: Run) -> StageEnd:
        """What a trainer's success looks like to the spine: a published adapter, other than all before it."""
        if run.spec.dry_run:
            return StageEnd.succeeded(DryRunPassed())
        self._num_adapters += 1
        workspace = self.client.workspace
        staged, final = (workspace.adapters_dir / f"{mark}adapter-{self._num_adapters}" for mark in (".", ""))
        staged.mkdir(parents=True)
        (staged / "weights").write_text(f"{run.id}")
        digest = publish_folder(staged, final).digest
        path = final.relative_to(workspace.data_dir).as_posix()
        return StageEnd.succeeded(Trained(path, digest, {"validation_loss": 1.0}, False))

    def measured(self, run: Run, decision: Decision) -> StageEnd:
        """What an evaluator's report and the gate have come to, about what is live now."""
        with self.database.read() as tx:
            adapter = adapters.of_run(tx, run.id)
            live = adapters.live(tx, run.profile)
            baseline = deployments.live_digest(tx, run.profile)
        assert adapter is not None
        judged = a_judgement(run, adapter.digest, decision, baseline)
        return StageEnd.succeeded(Measured(judged, adapter.id, None if live is None else live.id, "scores"))

    def advance(self, run: Run, way: str) -> None:
        """The run's next stage goes well, is refused by the gate or by a person, waits for one, fails, or is lost."""
        claim = self.claims.get(run.id) or self.claim(run)
        if claim is None:
            return
        kind = claim.task.kind
        if way == "lost":
            self.lose(claim)
        elif way == "interrupted" and kind is TaskKind.TRAIN:
            self.settle(claim, StageEnd(AttemptState.INTERRUPTED, error="told to end"))
        elif way == "failed":
            self.settle(claim, StageEnd.failed(ErrorClass.DATA, "as the machine wants"))
        elif kind is TaskKind.TRAIN:
            self.settle(claim, self.trained(run))
        elif kind is TaskKind.EVALUATE:
            decisions = {"rejected": Decision.REJECT, "held": Decision.HOLD}
            self.settle(claim, self.measured(run, decisions.get(way, Decision.PROMOTE)))
        elif kind is TaskKind.WATCH and way == "rejected":
            self.settle(claim, StageEnd.succeeded(Looked("roll_back", "as the machine wants")))
        else:
            self.work(claim)

    def finish(self, run_id: str, end: RunState) -> RunState:
        """Bring a queued run to this end where the rules let it; where it has come to."""
        ways = {RunState.FAILED: "failed", RunState.REJECTED: "rejected"}
        for _ in range(8):
            run = self.run(run_id)
            if run.finished_at is not None or run.state is RunState.HELD:
                break
            is_last = run.state is RunState.WATCHING and end is RunState.ROLLED_BACK
            self.advance(run, "rejected" if is_last else ways.get(end, "well"))
        return self.run(run_id).state

    def run(self, run_id: str) -> Run:
        with self.database.read() as tx:
            return runs.get(tx, run_id)

    def adapter_of(self, run_id: str) -> Adapter:
        with self.database.read() as tx:
            adapter = adapters.of_run(tx, run_id)
        assert adapter is not None
        return adapter

    # --- what is there ---

    def seen(self) -> Seen:
        with self.database.read() as tx:
            found = {table.name: tx.all(sa.select(table).order_by(*table.primary_key.columns)) for table in _TABLES}
        named = {
            name: {row["id"]: row for row in found[name]} for name in ("experiences", "datasets", "runs", "adapters")
        }
        return Seen(
            **named,
            assessments={row["experience_id"]: row for row in found["assessments"]},
            members=found["members"],
            cases=found["heldout_cases"],
            erasures=found["erasures"],
            events=found["events"],
            examples={row["id"]: self._examples(row["path"]) for row in found["datasets"]},
        )

    def _examples(self, path: str) -> dict[Split, list[Example]]:
        """Read again whenever a folder is another one; a published one never changes, and `verify` would tell."""
        folder = self.client.workspace.data_dir / path
        key = path, folder.stat().st_mtime
        if key not in self._read:
            self._read[key] = {split: read_split(folder, split) for split in Split}
        return self._read[key]

    def everything_stored(self) -> str:
        return repr(dump(self.database))

    def store_files(self) -> bytes:
        """Every byte of a SQLite store, its log included; of a server there are none to look at."""
        where = Path(self.database.where)
        return b"".join(
            path.read_bytes() for path in where.parent.glob(f"{where.name}*") if where.is_absolute() and path.is_file()
        )

    def everything_below(self, folder: Path) -> str:
        """Every byte of every file, with Parquet read: its pages are compressed."""
        found = []
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            found.append(path.read_bytes().decode(errors="replace"))
            if path.suffix == ".parquet":
                found.append(repr(pq.read_table(path).to_pylist()))
        return "\n".join(found)


_NAMED = ("experiences", "datasets", "runs", "adapters")
_TABLES = (
    tables.experiences,
    tables.assessments,
    tables.datasets,
    tables.runs,
    tables.adapters,
    tables.events,
    tables.heldout_cases,
    tables.members,
    tables.erasures,
)
