"""Lineage on both databases: from every kind of id, forgotten data, and datasets too big to show."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import tables
from support.rows import ACTOR, PROFILE, a_dataset, a_judgement, a_profile, a_run, an_adapter, force
from tunesmith.core.errors import NotFound, UsageError
from tunesmith.datasets.report import MemberRole
from tunesmith.datasets.tables import members
from tunesmith.deployment import queries as deployments
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.gate import BARE_BASE, Decision
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import Context
from tunesmith.lineage.collect import collect
from tunesmith.lineage.find import find
from tunesmith.lineage.rules.graph import Graph, NodeKind
from tunesmith.models.queries import Adapter
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.spec import AdapterRef
from tunesmith.store.database import Database, Tx

NOWHERE = Path("/nowhere")
ANSWER = "chatcmpl-01abcdefghjkmnpqrstvwxyz01"
SAID = "zebrafish"


@dataclass(frozen=True)
class World:
    """v1 was made from files, and answered; v2 learnt from these answers, and replaced it."""

    first: Run
    v1: Adapter
    answers: list[str]
    dataset: str
    second: Run
    v2: Adapter
    evaluation: str


def an_answer(tx: Tx, key: str, *, by: str = f"{PROFILE}@v1", key_label: str | None = "app") -> str:
    talk = [{"role": "user", "content": f"{SAID}? {key}"}, {"role": "assistant", "content": SAID}]
    context = Context(source="shop", served_by=by)
    return experiences.add(tx, PROFILE, key, talk, actor=ACTOR, context=context, key_label=key_label)[0]


def a_member(dataset_id: str, experience_id: str, number: int) -> dict[str, Any]:
    return {
        "dataset_id": dataset_id, "experience_id": experience_id, "example_id": f"ex-{number}",
        "group_id": f"g-{number}", "split": "heldout" if number % 10 == 9 else "train",
        "role": MemberRole.CORRECTED if number % 2 else MemberRole.GOLD, "reason": SAID,
    }  # fmt: skip


def judged(tx: Tx, run: Run, adapter: Adapter, baseline: Adapter | None) -> str:
    about = a_judgement(run, adapter.digest, Decision.PROMOTE, BARE_BASE if baseline is None else baseline.digest)
    return evaluations.add(
        tx, about, run_id=run.id, adapter_id=adapter.id, baseline_adapter_id=None if baseline is None else baseline.id,
        scores_path="s", actor=ACTOR,
    )  # fmt: skip


def flip(tx: Tx, adapter: Adapter, baseline: str) -> None:
    deployments.flip(tx, adapter, baseline=baseline, targets=[], actor=ACTOR, reason="test")


def a_world(tx: Tx, num: int = 10) -> World:
    first = a_run(tx, RunState.DEPLOYED)
    v1 = an_adapter(tx, run_id=first.id)
    judged(tx, first, v1, None)
    flip(tx, v1, BARE_BASE)
    answers = [an_answer(tx, ANSWER if not number else f"chatcmpl-{number}") for number in range(num)]
    dataset = a_dataset(tx)
    tx.conn.execute(members.insert(), [a_member(dataset, each, number) for number, each in enumerate(answers)])
    start = AdapterRef(id=v1.id, path="p", digest=v1.digest)
    second = a_run(tx, RunState.DEPLOYED, dataset_id=dataset, start=start, metadata={"git.commit": "c" * 40})
    v2 = an_adapter(tx, run_id=second.id)
    evaluation = judged(tx, second, v2, v1)
    flip(tx, v2, v1.digest)
    return World(first, v1, answers, dataset, second, v2, evaluation)


def around(tx: Tx, text: str, **options: Any) -> Graph:
    return collect(tx, NOWHERE, find(tx, text), **options)


def sentences(graph: Graph) -> set[str]:
    return {f"{edge.source} {edge.verb.value} {edge.target}" for edge in graph.edges}


@pytest.mark.parametrize("kind", ["name", "version", "run", "dataset", "experience", "evaluation", "answer", "key"])
def test_every_kind_of_id_leads_to_all_the_others(database: Database, kind: str) -> None:
    with database.write() as tx:
        world = a_world(tx)
    text = {
        "name": world.v2.name, "version": world.v2.id, "run": world.second.id, "dataset": world.dataset,
        "experience": world.answers[0], "evaluation": world.evaluation, "answer": ANSWER, "key": f"{PROFILE}:{ANSWER}",
    }[kind]  # fmt: skip
    with database.read() as tx:
        graph = around(tx, text, depth=10)
    assert {
        f"run:{world.second.id} trained on dataset:{world.dataset}",
        f"run:{world.second.id} made version:{world.v2.id}",
        f"run:{world.first.id} made version:{world.v1.id}",
        f"version:{world.v2.id} judged by evaluation:{world.evaluation}",
        f"evaluation:{world.evaluation} compared with version:{world.v1.id}",
    } <= sentences(graph)
    if kind in ("experience", "answer", "key"):
        assert {
            f"dataset:{world.dataset} assembled from experience:{world.answers[0]}",
            f"answer:{ANSWER} answered by version:{world.v1.id}",
            f"experience:{world.answers[0]} keeps answer:{ANSWER}",
        } <= sentences(graph)
    elif kind != "dataset":
        assert f"run:{world.second.id} started from version:{world.v1.id}" in sentences(graph)
    if kind not in ("experience", "answer", "key"):
        assert f"experiences:{world.dataset} answered by version:{world.v1.id}" in sentences(graph)


def test_version_shows_how_it_went_live_and_what_came_of_it(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
    with database.read() as tx:
        graph = around(tx, world.v1.name)
    flips = [node for node in graph.nodes if node.kind is NodeKind.FLIP]
    told = sentences(graph)
    assert len(flips) == 2
    assert f"{flips[0].key} put live version:{world.v1.id}" in told
    assert f"{flips[1].key} replaced version:{world.v1.id}" in told
    assert f"{flips[1].key} put live version:{world.v2.id}" in told
    assert f"run:{world.second.id} started from version:{world.v1.id}" in told
    answers = graph.node(f"answers:{world.v1.name}")
    assert answers.facts["num"] == 10
    assert graph.node(f"run:{world.second.id}").facts["git.commit"] == "c" * 40


def test_roll_back_to_the_base_and_deploying_again_are_told(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
        deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="worse")
        deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="still worse")
        again = AdapterRef(id=world.v1.id, path="p", digest=world.v1.digest)
        run = a_run(tx, RunState.EVALUATING, dataset_id=world.first.dataset_id, deploys=again)
    with database.read() as tx:
        graph, of_run = around(tx, world.v1.name), around(tx, run.id)
    base = next(node.key for node in graph.nodes if node.kind is NodeKind.BASE)
    found = [node for node in graph.nodes if node.kind is NodeKind.FLIP]
    flips = sorted(found, key=lambda node: int(node.id.partition(":")[2]))
    told = sentences(graph)
    assert len(flips) == 4
    assert f"{flips[2].key} put live version:{world.v1.id}" in told
    assert f"{flips[2].key} replaced version:{world.v2.id}" in told
    assert {f"{flips[3].key} put live {base}", f"{flips[3].key} replaced version:{world.v1.id}"} <= told
    assert f"run:{run.id} deploys again version:{world.v1.id}" in told & sentences(of_run)
    assert not [edge for edge in of_run.edges if edge.source == f"run:{run.id}" and edge.verb.value == "trained on"]


def test_a_graph_never_holds_what_was_said(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
    with database.read() as tx:
        for text in (world.v2.name, world.dataset, ANSWER, world.answers[1]):
            assert SAID not in json.dumps(around(tx, text, depth=20, with_all=True).as_json())


def test_forgotten_experience_is_found_by_its_answer_and_shows_nothing(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
        force(tx, tables.experiences, world.answers[0], source="a person")
        erasures.forget(tx, world.answers[0], actor=ACTOR, reason="asked")
    with database.read() as tx:
        by_answer, by_id = around(tx, ANSWER), around(tx, world.answers[0])
        of_dataset = around(tx, world.dataset)
    assert by_answer == by_id
    node = by_answer.node(f"experience:{world.answers[0]}")
    assert (node.state, node.summary, node.at, dict(node.facts)) == ("forgotten", "forgotten", None, {})
    text = json.dumps(by_answer.as_json())
    assert ANSWER not in text
    assert "a person" not in text
    assert f"version:{world.v2.id}" in {each.key for each in by_answer.nodes}, "what learnt from it is still told"
    group = of_dataset.node(f"experiences:{world.dataset}")
    assert (group.facts["num"], group.facts["num_forgotten"]) == (10, 1)
    assert "1 forgotten" in group.summary


def test_depth_ends_the_graph_and_says_so(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
    with database.read() as tx:
        near, far = around(tx, world.v2.name, depth=1), around(tx, world.v2.name, depth=10)
    assert len(near.nodes) < len(far.nodes)
    cut = {each.at for each in near.left_out if "--depth" in each.what}
    assert cut == {f"run:{world.second.id}"}
    assert not [each for each in far.left_out if "--depth" in each.what]


def test_big_dataset_is_counted_within_a_second_and_listed_only_when_asked(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx, num=3)
        ids = _many_experiences(tx, 10_000)
        rows = [a_member(world.dataset, each, number) for number, each in enumerate(ids, 100)]
        tx.conn.execute(members.insert(), rows)
    with database.read() as tx:
        begun = time.perf_counter()
        graph = around(tx, world.v2.name)
        took_s = time.perf_counter() - begun
        everything = around(tx, world.dataset, with_all=True)
    assert took_s < 1.0
    assert len(graph.nodes) < 30
    group = graph.node(f"experiences:{world.dataset}")
    assert (group.name, group.facts["num"]) == ("10,003 experiences", 10_003)
    assert sum(group.facts["roles"].values()) == sum(group.facts["splits"].values()) == 10_003
    assert [(each.at, each.num) for each in graph.left_out if "--all" in each.what] == [(group.key, 10_000)]
    listed = [node for node in everything.nodes if node.kind is NodeKind.EXPERIENCE]
    assert len(listed) == 10_003


def _many_experiences(tx: Tx, num: int) -> list[str]:
    """Bare rows, as capturing them one by one would take longer than what is tested."""
    ids = [f"xp-many{number:07}" for number in range(num)]
    common: dict[str, Any] = {"profile": PROFILE, "messages": [{"role": "user", "content": SAID}], "created_at": tx.now}
    tx.conn.execute(
        tables.experiences.insert(),
        [{**common, "id": each, "natural_key": each, "state": "collected", "num_rejections": 0, "in_review": False,
          "served_by": f"{PROFILE}@v1", "source": f"app-{number % 40}"} for number, each in enumerate(ids)],
    )  # fmt: skip
    judged_so = {"profile": PROFILE, "class_name": "gold", "reasons": [], "findings": {}, "suspicions": [],
                 "feedback": {}, "assessed_at": tx.now}  # fmt: skip
    tx.conn.execute(tables.assessments.insert(), [{**judged_so, "experience_id": each} for each in ids])
    return ids


def test_graph_has_a_limit_and_says_how_much_is_missing(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
    with database.read() as tx:
        graph = around(tx, world.v2.name, depth=10, max_nodes=5)
    assert len(graph.nodes) == 5
    (missing,) = [each for each in graph.left_out if "limit of 5 nodes" in each.what]
    assert missing.num is not None
    assert missing.num >= 1


def test_dataset_without_files_or_run_is_a_graph_of_one(database: Database) -> None:
    with database.write() as tx:
        dataset = a_dataset(tx)
    with database.read() as tx:
        graph = around(tx, dataset)
    assert [node.id for node in graph.nodes] == [dataset]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("support@v9", "did you mean 'support@v1'?"),
        ("suport@v1", "did you mean 'support@v1'?"),
        ("run-zzz", "no run 'run-zzz'; `tunesmith run list` shows what is there"),
        ("ds-zzz", "no dataset 'ds-zzz'"),
        ("xp-zzz", "no experience 'xp-zzz'"),
        ("ev-zzz", "no evaluation 'ev-zzz'"),
        ("chatcmpl-none", "no answer 'chatcmpl-none' is kept as an experience"),
        ("support:none", "no experience with the key 'none'"),
        ("whatever", "nothing is called 'whatever'; name a version (support@v3 or ad-…), a run (run-…)"),
        ("support-v1", "nothing is called 'support-v1'; did you mean 'support@v1'? Name a version"),
        ("%", "nothing is called '%'"),
        ("", "nothing is called ''"),
    ],
)
def test_unknown_ids_are_told_with_the_nearest_name_and_the_kinds(database: Database, text: str, told: str) -> None:
    with database.write() as tx:
        an_adapter(tx)
    with database.read() as tx, pytest.raises(NotFound) as error:
        find(tx, text)
    assert told in error.value.message


def test_misspelt_id_is_told_with_the_nearest_one(database: Database) -> None:
    with database.write() as tx:
        world = a_world(tx)
    ids = (world.v1.id, world.second.id, world.dataset, world.evaluation)  # experiences are numbered: all are near
    with database.read() as tx:
        for thing_id in ids:
            with pytest.raises(NotFound, match=f"did you mean '{thing_id}'"):
                find(tx, thing_id[:-1] + ("1" if thing_id[-1] == "0" else "0"))


def test_profile_is_no_id_and_what_is_live_is_told(database: Database) -> None:
    with database.write() as tx:
        a_profile(tx)
    with database.read() as tx, pytest.raises(UsageError, match="nothing but the bare base is live"):
        find(tx, PROFILE)
    with database.write() as tx:
        flip(tx, an_adapter(tx), BARE_BASE)
    with database.read() as tx, pytest.raises(UsageError, match="support@v1 is live now"):
        find(tx, f"{PROFILE}@base")
