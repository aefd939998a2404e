"""Collect the lineage graph around one thing: what it came from, what came of it, how versions were judged and served.

From the focus, the graph follows what each thing came from, and what came of it, up to a number of steps either way. It
does not turn round on the way: what else came of the same data is found by asking about that data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tunesmith.core.errors import DataError
from tunesmith.core.files import read_manifest
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.report import DatasetReport
from tunesmith.lineage import queries
from tunesmith.lineage.find import Found
from tunesmith.lineage.rules import describe
from tunesmith.lineage.rules.graph import Graph, GraphBuilder, NodeKind, Verb
from tunesmith.models import queries as adapters
from tunesmith.store.database import Tx

DEFAULT_DEPTH = 4
MAX_NODES = 300
MAX_NODES_OF_ALL = 20_000
"""With every experience of the datasets, which only JSON can show."""
_FEW = 3  # experiences of a group, evaluations with a baseline
_SOME = 20  # runs on one dataset, flips and evaluations of one version, files
_MAX_FLIPS = 2000

Direction = Literal["back", "on"]
_DEEPER = {
    "back": "what it came from; a higher --depth shows it",
    "on": "what came of it; a higher --depth shows it",
}


def collect(
    tx: Tx,
    data_dir: Path,
    found: Found,
    *,
    depth: int = DEFAULT_DEPTH,
    with_all: bool = False,
    max_nodes: int | None = None,
) -> Graph:
    """The graph around what `find` has found. `with_all`: every experience of its datasets, not only the first few."""
    limit = max_nodes or (MAX_NODES_OF_ALL if with_all else MAX_NODES)
    return _Collection(tx, data_dir, GraphBuilder(limit), depth, with_all).around(found)


@dataclass(frozen=True)
class _Step:
    """What to look at next, where to, and how many steps are left."""

    kind: NodeKind
    id: str
    direction: Direction
    left: int


class _Collection:
    def __init__(self, tx: Tx, data_dir: Path, builder: GraphBuilder, depth: int, with_all: bool) -> None:
        self._tx, self._data_dir, self._to, self._with_all, self._depth = tx, data_dir, builder, with_all, depth
        self._waiting: deque[_Step] = deque()
        self._taken: set[tuple[str, Direction]] = set()
        self._flips: dict[str, list[queries.Flip]] = {}
        self._answers: dict[str, str] = {}
        self._later: dict[str, tuple[int, list[queries.LaterRun]]] = {}
        self._follow: dict[tuple[NodeKind, Direction], Callable[[str, int], None]] = {
            (NodeKind.VERSION, "back"): self._version_back,
            (NodeKind.VERSION, "on"): self._version_on,
            (NodeKind.RUN, "back"): self._run_back,
            (NodeKind.RUN, "on"): self._run_on,
            (NodeKind.DATASET, "back"): self._dataset_back,
            (NodeKind.DATASET, "on"): self._dataset_on,
            (NodeKind.EXPERIENCE, "back"): self._experience_back,
            (NodeKind.EXPERIENCE, "on"): self._experience_on,
            (NodeKind.EVALUATION, "back"): self._evaluation_back,
            (NodeKind.ANSWER, "on"): self._answer_on,
            (NodeKind.ANSWER, "back"): self._answer_back,
        }

    def around(self, found: Found) -> Graph:
        focus = self._add(found.kind, found.id)
        for direction in ("back", "on"):
            self._ask(found.kind, found.id, direction, self._depth)
        while self._waiting and self._to.room:
            step = self._waiting.popleft()
            key = f"{step.kind}:{step.id}"
            follow = self._follow.get((step.kind, step.direction))
            if follow is None or (key, step.direction) in self._taken:
                continue
            if step.left <= 0:
                self._to.leave_out(key, _DEEPER[step.direction])
                continue
            self._taken.add((key, step.direction))
            follow(step.id, step.left - 1)
        for key, direction in self._taken:  # reached again by a shorter way
            self._to.take_back(key, _DEEPER[direction])
        return self._to.graph(focus, is_cut=bool(self._waiting))

    def _ask(self, kind: NodeKind, thing_id: str, direction: Direction, left: int) -> None:
        """Follow it later, unless the graph is full: then nothing of what it leads to would fit."""
        if self._to.has(f"{kind}:{thing_id}"):
            self._waiting.append(_Step(kind, thing_id, direction, left))

    def _add(self, kind: NodeKind, thing_id: str) -> str:
        """The key of a thing, whose node the graph has now, unless it is full."""
        key = f"{kind}:{thing_id}"
        if not self._to.has(key):
            match kind:
                case NodeKind.VERSION:
                    self._to.add(describe.version_node(adapters.get(self._tx, thing_id)))
                case NodeKind.RUN:
                    self._add_run(queries.run(self._tx, thing_id))
                case NodeKind.DATASET:
                    dataset = datasets.get(self._tx, thing_id)
                    self._to.add(describe.dataset_node(dataset, [each.name for each in self._files(dataset)]))
                case NodeKind.EXPERIENCE:
                    self._to.add(describe.experience_node(queries.experience(self._tx, thing_id)))
                case NodeKind.EVALUATION:
                    self._to.add(describe.evaluation_node(queries.evaluation(self._tx, thing_id)))
                case NodeKind.ANSWER:
                    experience_id = queries.experience_with_key(self._tx, thing_id)
                    assert experience_id is not None
                    self._add_answer(queries.experience(self._tx, experience_id))
                case _:
                    raise AssertionError(kind)
        return key

    # ── versions ──

    def _version_back(self, adapter_id: str, left: int) -> None:
        adapter, key = adapters.get(self._tx, adapter_id), f"version:{adapter_id}"
        if adapter.run_id is not None:
            self._to.join(self._add(NodeKind.RUN, adapter.run_id), Verb.MADE, key)
            self._ask(NodeKind.RUN, adapter.run_id, "back", left)
            self._join_base(queries.run(self._tx, adapter.run_id), key, Verb.ADAPTS)
        self._judgements(adapter)
        self._flips_of(adapter)

    def _judgements(self, adapter: adapters.Adapter) -> None:
        """How a version was judged, each time."""
        key = f"version:{adapter.id}"
        ids = [each.id for each in self._pairs if each.adapter_id == adapter.id]
        if not ids and adapter.run_id is not None:  # longer ago than the pairs go back
            ids = [each.id for each in queries.evaluations_of_run(self._tx, adapter.run_id, _SOME)]
        for evaluation in queries.evaluations_with_ids(self._tx, ids[:_SOME]):
            self._to.add(describe.evaluation_node(evaluation))
            self._to.join(key, Verb.JUDGED_BY, f"evaluation:{evaluation.id}")
            self._join_baseline(evaluation)
        self._to.leave_out(key, "earlier evaluations", max(0, len(ids) - _SOME))

    @cached_property
    def _pairs(self) -> list[queries.EvaluationPair]:
        return queries.evaluation_pairs(self._tx)

    def _join_baseline(self, evaluation: queries.StoredEvaluation) -> None:
        key = f"evaluation:{evaluation.id}"
        if evaluation.baseline_adapter_id is None:
            self._join_base(queries.run(self._tx, evaluation.run_id), key, Verb.COMPARED_WITH)
        else:
            self._to.join(key, Verb.COMPARED_WITH, self._add(NodeKind.VERSION, evaluation.baseline_adapter_id))

    def _flips_of(self, adapter: adapters.Adapter) -> None:
        """When a version went live, what it replaced, and what replaced it."""
        if adapter.profile not in self._flips:
            self._flips[adapter.profile] = queries.flips(self._tx, adapter.profile, _MAX_FLIPS)
        mine = [each for each in self._flips[adapter.profile] if adapter.id in (each.wanted, each.before)]
        self._to.leave_out(f"version:{adapter.id}", "earlier flips", max(0, len(mine) - _SOME))
        for flip in mine[-_SOME:]:
            node = describe.flip_node(adapter.profile, flip)
            self._to.add(node)
            for verb, version in ((Verb.PUT_LIVE, flip.wanted), (Verb.REPLACED, flip.before)):
                if version is not None:
                    self._to.join(node.key, verb, self._add(NodeKind.VERSION, version))
                elif adapter.run_id is not None:
                    self._join_base(queries.run(self._tx, adapter.run_id), node.key, verb)

    def _version_on(self, adapter_id: str, left: int) -> None:
        adapter, key = adapters.get(self._tx, adapter_id), f"version:{adapter_id}"
        if adapter.run_id is not None:
            self._later_runs(adapter, queries.run(self._tx, adapter.run_id), left)
        compared = [each.id for each in self._pairs if each.baseline_adapter_id == adapter_id]
        for evaluation in queries.evaluations_with_ids(self._tx, compared[:_FEW]):
            self._to.add(describe.evaluation_node(evaluation))
            self._to.join(f"evaluation:{evaluation.id}", Verb.COMPARED_WITH, key)
            judged = self._add(NodeKind.VERSION, evaluation.adapter_id)
            self._to.join(judged, Verb.JUDGED_BY, f"evaluation:{evaluation.id}")
        self._to.leave_out(key, "earlier evaluations with it as the baseline", max(0, len(compared) - _FEW))
        if len(self._pairs) == queries.MAX_EVALUATIONS:
            self._to.leave_out(key, f"comparisons before the newest {queries.MAX_EVALUATIONS:,} evaluations")
        self._judgements(adapter)
        self._flips_of(adapter)
        self._answers_of(adapter)

    def _later_runs(self, adapter: adapters.Adapter, made_by: queries.StoredRun, left: int) -> None:
        """The runs that started from a version, or deployed it again."""
        key = f"version:{adapter.id}"
        later = self._searched(adapter.profile, made_by.seq)
        found = [run for run in later if adapter.id in (run.start, run.deploys)]
        for run in found[:_SOME]:
            verb = Verb.STARTED_FROM if run.deploys is None else Verb.DEPLOYS
            self._to.join(self._add(NodeKind.RUN, run.id), verb, key)
            self._ask(NodeKind.RUN, run.id, "on", left)
        self._to.leave_out(key, "later runs from it", max(0, len(found) - _SOME))
        if len(later) == queries.MAX_LATER_RUNS:
            self._to.leave_out(key, f"runs after the next {queries.MAX_LATER_RUNS:,} of the profile")

    def _searched(self, profile: str, after: int) -> list[queries.LaterRun]:
        """Runs among which those from a version are searched; the same for the versions that came of it."""
        first, found = self._later.get(profile, (after + 1, []))
        if after < first:
            first, found = after, queries.later_runs(self._tx, profile, after)
            self._later[profile] = (first, found)
        return found

    def _answers_of(self, adapter: adapters.Adapter) -> None:
        num, newest, has_older = queries.answered_by(self._tx, adapter.profile, adapter.name, _FEW)
        if not num:
            return
        node = describe.answers_node(adapter.name, num, has_older=has_older, looked_at=queries.MAX_LATER_EXPERIENCES)
        self._to.add(node)
        self._to.join(node.key, Verb.ANSWERED_BY, f"version:{adapter.id}", num)
        for experience_id in newest:
            self._to.join(node.key, Verb.INCLUDE, self._add(NodeKind.EXPERIENCE, experience_id))
        self._to.leave_out(node.key, "more of them", max(0, num - len(newest)))

    def _evaluation_back(self, evaluation_id: str, left: int) -> None:
        evaluation = queries.evaluation(self._tx, evaluation_id)
        version = self._add(NodeKind.VERSION, evaluation.adapter_id)
        self._to.join(version, Verb.JUDGED_BY, f"evaluation:{evaluation.id}")
        self._join_baseline(evaluation)
        self._ask(NodeKind.VERSION, evaluation.adapter_id, "back", left)

    def _join_base(self, run: queries.StoredRun, key: str, verb: Verb) -> None:
        node = describe.base_node(run.spec["base"])
        self._to.add(node)
        self._to.join(key, verb, node.key)

    # ── runs and datasets ──

    def _add_run(self, run: queries.StoredRun) -> str:
        key = f"run:{run.id}"
        if not self._to.has(key):
            trained = queries.training(self._tx, run.id)
            result = None if trained is None else trained.result
            self._to.add(describe.run_node(run, queries.num_checkpoints(self._tx, run.id), result))
        return key

    def _run_back(self, run_id: str, left: int) -> None:
        run, key = queries.run(self._tx, run_id), f"run:{run_id}"
        deploys, start = (run.spec.get(name) for name in ("deploys", "start"))
        if deploys:
            self._to.join(key, Verb.DEPLOYS, self._add(NodeKind.VERSION, deploys["id"]))
            self._ask(NodeKind.VERSION, deploys["id"], "back", left)
            return
        self._to.join(key, Verb.TRAINED_ON, self._add(NodeKind.DATASET, run.dataset_id))
        self._ask(NodeKind.DATASET, run.dataset_id, "back", left)
        if start:
            self._to.join(key, Verb.STARTED_FROM, self._add(NodeKind.VERSION, start["id"]))
            self._ask(NodeKind.VERSION, start["id"], "back", left)
        else:
            self._join_base(run, key, Verb.STARTED_FROM)
        if run.parent_id is not None:
            self._to.join(key, Verb.REPEATS, self._add(NodeKind.RUN, run.parent_id))

    def _run_on(self, run_id: str, left: int) -> None:
        run = queries.run(self._tx, run_id)
        if not run.spec.get("deploys"):  # what it learnt from, though nothing else of that is followed
            self._to.join(f"run:{run_id}", Verb.TRAINED_ON, self._add(NodeKind.DATASET, run.dataset_id))
        made = adapters.of_run(self._tx, run_id)
        if made is not None and made.run_id == run_id:
            self._to.join(f"run:{run_id}", Verb.MADE, self._add(NodeKind.VERSION, made.id))
            self._ask(NodeKind.VERSION, made.id, "on", left)

    def _dataset_back(self, dataset_id: str, left: int) -> None:
        key = f"dataset:{dataset_id}"
        counts = queries.member_counts(self._tx, dataset_id)
        if counts:
            self._members(dataset_id, counts, left)
            return
        files = self._files(datasets.get(self._tx, dataset_id))
        for source in files[:_SOME]:
            node = describe.file_node(dataset_id, source)
            self._to.add(node)
            self._to.join(key, Verb.PREPARED_FROM, node.key)
        self._to.leave_out(key, "more files", max(0, len(files) - _SOME))

    def _members(self, dataset_id: str, counts: list[queries.MemberCount], left: int) -> None:
        """The experiences of a dataset: counted, the first few shown, and the versions that had answered them."""
        summary = describe.members_summary(counts)
        node = describe.group_node(dataset_id, summary)
        self._to.add(node)
        self._to.join(f"dataset:{dataset_id}", Verb.ASSEMBLED_FROM, node.key, summary["num"])
        shown = max(0, self._to.room) if self._with_all else _FEW
        few = queries.members_of(self._tx, dataset_id, shown)
        for row in few:
            member = describe.experience_node(row)
            self._to.add(member)
            self._to.join(node.key, Verb.INCLUDE, member.key)
        self._to.leave_out(node.key, "more of them; --json --all lists them", max(0, summary["num"] - len(few)))
        profile = datasets.get(self._tx, dataset_id).profile
        for name, num in summary["answered_by"].items() if left > 0 else ():
            self._answered(node.key, profile, name, left - 1, num)

    def _dataset_on(self, dataset_id: str, left: int) -> None:
        found = queries.runs_on(self._tx, dataset_id, _SOME)
        for run in found:
            if not run.spec.get("deploys"):
                self._to.join(self._add_run(run), Verb.TRAINED_ON, f"dataset:{dataset_id}")
                self._ask(NodeKind.RUN, run.id, "on", left)
        if len(found) == _SOME:
            more = queries.num_runs_on(self._tx, dataset_id) - _SOME
            self._to.leave_out(f"dataset:{dataset_id}", "more runs on it", more)

    def _files(self, dataset: Any) -> list[Any]:
        """The files that a dataset was prepared from, as its manifest tells; none where that cannot be read."""
        try:
            report = DatasetReport.model_validate(read_manifest(self._data_dir / dataset.path).meta)
        except (DataError, ValueError):
            return []
        return [] if report.mix is not None else list(report.sources)

    # ── experiences and answers ──

    def _experience_back(self, experience_id: str, left: int) -> None:
        row = queries.experience(self._tx, experience_id)
        if row["state"] == "forgotten":
            return
        if row["key_label"] is not None:
            self._to.join(f"experience:{experience_id}", Verb.KEEPS, self._add_answer(row))
            self._ask(NodeKind.ANSWER, row["natural_key"], "back", left)
        else:
            self._answered(f"experience:{experience_id}", row["profile"], row["served_by"], left)

    def _experience_on(self, experience_id: str, left: int) -> None:
        for row in queries.datasets_with(self._tx, experience_id):
            dataset = self._add(NodeKind.DATASET, row["dataset_id"])
            self._to.join(dataset, Verb.ASSEMBLED_FROM, f"experience:{experience_id}")
            self._ask(NodeKind.DATASET, row["dataset_id"], "on", left)

    def _add_answer(self, row: Any) -> str:
        self._answers[row["natural_key"]] = row["id"]
        self._to.add(describe.answer_node(row["natural_key"], row["captured_at"] or row["created_at"]))
        return f"answer:{row['natural_key']}"

    def _answer_on(self, key: str, left: int) -> None:
        experience_id = self._answers[key]
        self._to.join(self._add(NodeKind.EXPERIENCE, experience_id), Verb.KEEPS, f"answer:{key}")
        self._ask(NodeKind.EXPERIENCE, experience_id, "on", left)

    def _answer_back(self, key: str, left: int) -> None:
        row = queries.experience(self._tx, self._answers[key])
        self._answered(f"answer:{key}", row["profile"], row["served_by"], left)

    def _answered(self, key: str, profile: str, name: str | None, left: int, num: int | None = None) -> None:
        """Which version gave an answer, or `num` of them; the bare base is not followed."""
        adapter = None if name is None else queries.version_named(self._tx, name)
        if adapter is not None:
            self._to.join(key, Verb.ANSWERED_BY, self._add(NodeKind.VERSION, adapter.id), num)
            self._ask(NodeKind.VERSION, adapter.id, "back", left)
        elif name == f"{profile}@base":
            base = queries.base_of(self._tx, profile)
            if base is not None:
                node = describe.base_node(base)
                self._to.add(node)
                self._to.join(key, Verb.ANSWERED_BY, node.key, num)
