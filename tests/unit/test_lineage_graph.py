"""The lineage graph without a store: limits, the tree, the drawing, and what a summary may tell."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.lineage.queries import MemberCount
from tunesmith.lineage.rules.describe import experience_node, group_node, members_summary
from tunesmith.lineage.rules.drawing import MAX_DRAWN, draw
from tunesmith.lineage.rules.graph import Branch, Edge, Graph, GraphBuilder, Node, NodeKind, Verb, tree_of
from tunesmith.lineage.rules.layout import Size, lay_out

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOSTILE = '<script>alert("1")</script>]]>&amp;\x00\x1b[31m\ud800\ufffe'
SVG = "{http://www.w3.org/2000/svg}"


def a_node(key: str, kind: NodeKind = NodeKind.RUN, name: str | None = None, summary: str = "") -> Node:
    return Node(key, kind, key, name or key, summary)


def a_builder(*keys: str, max_nodes: int = 100) -> GraphBuilder:
    builder = GraphBuilder(max_nodes)
    for key in keys:
        builder.add(a_node(key))
    return builder


def walked(branch: Branch) -> list[Branch]:
    return [branch, *(each for below in branch.branches for each in walked(below))]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Connected or not, with cycles or not."""
    num = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from(NodeKind), min_size=num, max_size=num))
    nodes = [a_node(f"n{number}", kind, summary="so and so") for number, kind in enumerate(kinds)]
    ends = st.integers(0, num - 1)
    triples = draw(st.lists(st.tuples(ends, st.sampled_from(Verb), ends), max_size=20, unique=True))
    edges = [Edge(f"n{a}", verb, f"n{b}") for a, verb, b in triples if a != b]
    return Graph("n0", tuple(nodes), tuple(edges))


def reachable(graph: Graph) -> set[str]:
    found, waiting = {graph.focus}, [graph.focus]
    while waiting:
        for edge in graph.edges_of(waiting.pop()):
            for key in {edge.source, edge.target} - found:
                found.add(key)
                waiting.append(key)
    return found


def test_limit_of_nodes_is_kept_and_said() -> None:
    builder = a_builder(*(f"run:{number}" for number in range(10)), max_nodes=4)
    builder.join("run:0", Verb.REPEATS, "run:9")  # the second is not there
    graph = builder.graph("run:0")
    assert len(graph.nodes) == 4
    assert graph.edges == ()
    assert [(each.what, each.num) for each in graph.left_out] == [("at least so many, beyond the limit of 4 nodes", 6)]


def test_same_node_and_edge_again_change_nothing() -> None:
    builder = a_builder("run:1", "run:2", "run:1")
    builder.join("run:1", Verb.REPEATS, "run:2")
    builder.join("run:1", Verb.REPEATS, "run:2", 7)
    graph = builder.graph("run:2")
    assert [node.key for node in graph.nodes] == ["run:2", "run:1"]  # the focus first
    assert graph.edges == (Edge("run:1", Verb.REPEATS, "run:2"),)


def test_json_has_the_documented_shape() -> None:
    builder = a_builder("run:1", "run:2")
    builder.join("run:1", Verb.REPEATS, "run:2")
    builder.leave_out("run:1", "more", 3)
    found = json.loads(json.dumps(builder.graph("run:1").as_json()))
    assert set(found) == {"v", "focus", "nodes", "edges", "left_out"}
    assert (found["v"], found["focus"]) == (1, "run:1")
    assert set(found["nodes"][0]) == {"key", "kind", "id", "name", "summary", "state", "at", "facts"}
    assert found["edges"] == [{"from": "run:1", "verb": "repeats", "to": "run:2", "num": None}]
    assert found["left_out"] == [{"at": "run:1", "what": "more", "num": 3}]


@pytest.mark.parametrize("verb", Verb)
def test_every_verb_reads_both_ways_and_flows_one_way(verb: Verb) -> None:
    edge = Edge("a", verb, "b")
    assert edge.read_from("a") == verb.value != edge.read_from("b")
    assert set(edge.flow) == {"a", "b"}


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_tree_shows_every_node_once_and_every_edge_once(graph: Graph) -> None:
    keys = reachable(graph)
    edges = [edge for edge in graph.edges if edge.source in keys]
    kept = Graph(graph.focus, tuple(node for node in graph.nodes if node.key in keys), tuple(edges))
    branches = walked(tree_of(kept))
    assert sorted(each.node.key for each in branches if not each.is_repeated) == sorted(keys)
    assert len(branches) - 1 == len(edges)
    assert all(not each.branches for each in branches if each.is_repeated)


def test_tree_does_not_reach_things_through_the_base_they_share() -> None:
    builder = GraphBuilder(10)
    for node in (a_node("run"), a_node("base", NodeKind.BASE), a_node("version", NodeKind.VERSION), a_node("ev")):
        builder.add(node)
    builder.join("run", Verb.STARTED_FROM, "base")
    builder.join("run", Verb.MADE, "version")
    builder.join("ev", Verb.COMPARED_WITH, "base")
    builder.join("version", Verb.JUDGED_BY, "ev")
    root = tree_of(builder.graph("run"))
    assert [(each.verb, each.node.key) for each in root.branches] == [("started from", "base"), ("made", "version")]
    (below,) = root.branches[1].branches
    assert (below.verb, below.node.key) == ("judged by", "ev")
    assert [(each.verb, each.node.key, each.is_repeated) for each in below.branches] == [
        ("compared with", "base", True)
    ]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_layout_places_all_nodes_without_overlap_and_time_goes_right(graph: Graph) -> None:
    size = Size()
    layout = lay_out([node.key for node in graph.nodes], [edge.flow for edge in graph.edges], size)
    assert set(layout.places) == {node.key for node in graph.nodes}
    for (ax, ay), (bx, by) in combinations(layout.places.values(), 2):
        assert abs(ax - bx) >= size.width or abs(ay - by) >= size.height - 0.01
    for x, y in layout.places.values():
        assert 0 <= x <= layout.width - size.width
        assert 0 <= y <= layout.height - size.height
    for points in layout.routes.values():
        assert all(a[0] <= b[0] for a, b in pairwise(points))


def test_what_came_first_stands_left() -> None:
    flows = [("base", "run"), ("dataset", "run"), ("file", "dataset"), ("run", "version"), ("base", "version")]
    layout = lay_out(["version", "run", "base", "dataset", "file"], flows, Size())
    left = {key: place[0] for key, place in layout.places.items()}
    assert left["file"] < left["dataset"] == left["base"] < left["run"] < left["version"]
    assert len(layout.routes["base", "version"]) == 4, "an edge that passes a column has a lane through it"


@given(graphs())
@settings(max_examples=50, deadline=None)
def test_drawing_is_well_formed_and_has_a_box_for_each_node(graph: Graph) -> None:
    named = {edge.target for edge in graph.edges if edge.verb is Verb.INCLUDE}
    num = len([node for node in graph.nodes if node.kind is not NodeKind.EXPERIENCE or node.key not in named])
    assert num <= len(boxes(graph)) <= len(graph.nodes)


def boxes(graph: Graph) -> list[ElementTree.Element]:
    return ElementTree.fromstring(draw(graph)).findall(f"{SVG}g/{SVG}rect")


def test_drawing_leaves_out_experiences_that_only_stand_for_their_group() -> None:
    builder = GraphBuilder(10)
    for key, kind in (("many", NodeKind.EXPERIENCES), ("one", NodeKind.EXPERIENCE), ("two", NodeKind.EXPERIENCE)):
        builder.add(a_node(key, kind))
    builder.join("many", Verb.INCLUDE, "one")
    builder.join("many", Verb.INCLUDE, "two")
    assert len(boxes(builder.graph("many"))) == 1
    assert len(boxes(builder.graph("one"))) == 2, "the focus is always drawn"


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_makes_a_well_formed_drawing(text: str) -> None:
    ElementTree.fromstring(draw(Graph("a", (a_node("a", name=text or "x", summary=text),), ())))


def test_hostile_names_stay_text() -> None:
    node = a_node("a", NodeKind.VERSION, name=HOSTILE, summary=HOSTILE)
    drawing = draw(Graph("a", (node,), ()))
    root = ElementTree.fromstring(drawing)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "title", "rect", "defs", "marker", "path", "g", "text"
    }  # fmt: skip
    assert "<script" not in drawing
    assert "\x1b" not in drawing
    assert not [name for element in root.iter() for name in element.attrib if name.startswith(("on", "href"))]


def test_drawing_ends_long_texts_and_says_what_it_leaves_out() -> None:
    nodes = tuple(a_node(f"run:{number}", name="a-very-long-name" * 9) for number in range(MAX_DRAWN + 7))
    root = ElementTree.fromstring(draw(Graph("run:0", nodes, ())))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert "7 more nodes are not drawn; --json lists them" in texts
    assert max(map(len, texts)) < 60


def a_count(num: int, **changes: str | None) -> MemberCount:
    fields: dict[str, str | None] = {
        "role": "gold", "split": "train", "state": "consumed", "class_name": "gold", "source": "app",
        "served_by": "support@v1", **changes,
    }  # fmt: skip
    return MemberCount(**fields, num=num, first_at=NOON, last_at=NOON)  # type: ignore[arg-type]


def test_summary_counts_by_everything_and_tells_nothing_of_the_forgotten() -> None:
    told = members_summary([
        a_count(5),
        a_count(3, role="corrected", split="heldout", source=None, served_by=None),
        a_count(2, state="forgotten", class_name="quarantined", source="a-person", served_by="support@v9"),
    ])  # fmt: skip
    assert (told["num"], told["num_forgotten"]) == (10, 2)
    assert told["roles"] == {"gold": 7, "corrected": 3}
    assert told["sources"] == {"app": 5, "unknown": 3}
    assert told["classes"] == {"gold": 8}
    assert told["answered_by"] == {"support@v1": 5}
    assert group_node("ds-1", told).summary == "7 gold, 3 corrected; 2 forgotten"


def test_summary_names_the_most_frequent_sources_and_counts_the_rest() -> None:
    told = members_summary([a_count(1 + number, source=f"app-{number:02}") for number in range(30)])
    assert len(told["sources"]) == 11
    assert sum(told["sources"].values()) == told["num"] == 465
    assert told["sources"]["app-29"] == 30


def test_forgotten_experience_shows_its_id_and_nothing_else() -> None:
    row = {
        "id": "xp-1", "state": "forgotten", "captured_at": NOON, "created_at": NOON, "source": "secret", "role": "gold",
        "task_type": "secret", "template": "secret", "served_by": "secret", "class_name": "quarantined",
        "profile": "support", "split": "train",
    }  # fmt: skip
    node = experience_node(row)
    assert (node.name, node.summary, node.at, dict(node.facts)) == ("xp-1", "forgotten, gold, train", None, {})
    assert experience_node({**row, "state": "collected"}).facts["source"] == "secret"


@pytest.mark.parametrize("name", ["lineage.svg", "lineage-rounds.svg"])
def test_drawings_of_the_documents_are_whole(name: str) -> None:
    file = Path(__file__).parents[2] / "docs" / "images" / name
    texts = [element.text for element in ElementTree.parse(file).iter(f"{SVG}text")]
    assert {"VERSION", "RUN", "DATASET", "EVALUATION", "FLIP", "BASE", "judged by", "put live by"} <= set(texts)
