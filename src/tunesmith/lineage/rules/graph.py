"""The lineage graph: nodes, edges with plain verbs, and what was left out of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

FORMAT = 1
"""Version of the JSON shape; docs/lineage.md describes it."""
MAX_DEPTH = 100


class NodeKind(StrEnum):
    BASE = "base"
    FILE = "file"
    ANSWER = "answer"
    EXPERIENCE = "experience"
    EXPERIENCES = "experiences"  # those of one dataset, or those that one version answered, counted
    DATASET = "dataset"
    RUN = "run"
    VERSION = "version"
    EVALUATION = "evaluation"
    FLIP = "flip"


class Verb(StrEnum):
    """`source VERB target`, as a sentence."""

    ASSEMBLED_FROM = "assembled from"
    PREPARED_FROM = "prepared from"
    INCLUDE = "include"
    KEEPS = "keeps"
    ANSWERED_BY = "answered by"
    TRAINED_ON = "trained on"
    STARTED_FROM = "started from"
    REPEATS = "repeats"
    MADE = "made"
    ADAPTS = "adapts"
    DEPLOYS = "deploys again"
    JUDGED_BY = "judged by"
    COMPARED_WITH = "compared with"
    PUT_LIVE = "put live"
    REPLACED = "replaced"


@dataclass(frozen=True)
class _Reading:
    backwards: str
    """The same edge as a sentence that begins with its target."""
    is_forward: bool = False
    """Whether the target came after the source in time; most verbs point back at what was there before."""


_READINGS = {
    Verb.ASSEMBLED_FROM: _Reading("went into"),
    Verb.PREPARED_FROM: _Reading("went into"),
    Verb.INCLUDE: _Reading("among"),
    Verb.KEEPS: _Reading("kept as"),
    Verb.ANSWERED_BY: _Reading("answered"),
    Verb.TRAINED_ON: _Reading("trained"),
    Verb.STARTED_FROM: _Reading("was the start of"),
    Verb.REPEATS: _Reading("repeated by"),
    Verb.MADE: _Reading("made by", is_forward=True),
    Verb.ADAPTS: _Reading("adapted by"),
    Verb.DEPLOYS: _Reading("deployed again by"),
    Verb.JUDGED_BY: _Reading("judged", is_forward=True),
    Verb.COMPARED_WITH: _Reading("was the baseline of"),
    Verb.PUT_LIVE: _Reading("put live by"),
    Verb.REPLACED: _Reading("replaced by"),
}


@dataclass(frozen=True)
class Node:
    key: str
    """Unique in the graph: its kind and id."""
    kind: NodeKind
    id: str
    """What `tunesmith lineage` takes, where the kind has ids."""
    name: str
    """How people call it."""
    summary: str = ""
    """One line about it; never what was said in a conversation."""
    state: str | None = None
    at: datetime | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Edge:
    source: str
    verb: Verb
    target: str
    num: int | None = None
    """How many things this edge stands for, where one end is a group."""

    @property
    def flow(self) -> tuple[str, str]:
        """From what was there first to what came of it."""
        return (self.source, self.target) if _READINGS[self.verb].is_forward else (self.target, self.source)

    def read_from(self, key: str) -> str:
        """The verb as a sentence that begins with this end."""
        return self.verb.value if key == self.source else _READINGS[self.verb].backwards


@dataclass(frozen=True)
class LeftOut:
    """Something that the graph does not show."""

    at: str
    """Key of the node that it belongs to."""
    what: str
    num: int | None = None
    """How many; None where nobody counted."""


@dataclass(frozen=True)
class Graph:
    focus: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: tuple[LeftOut, ...] = ()

    def node(self, key: str) -> Node:
        return next(node for node in self.nodes if node.key == key)

    def edges_of(self, key: str) -> Iterator[Edge]:
        return (edge for edge in self.edges if key in (edge.source, edge.target))

    def as_json(self) -> dict[str, Any]:
        """The documented shape; nodes and edges in the order in which they were found, the focus first."""
        return {
            "v": FORMAT,
            "focus": self.focus,
            "nodes": [
                {
                    "key": node.key,
                    "kind": node.kind.value,
                    "id": node.id,
                    "name": node.name,
                    "summary": node.summary,
                    "state": node.state,
                    "at": None if node.at is None else node.at.isoformat(),
                    "facts": dict(node.facts),
                }
                for node in self.nodes
            ],
            "edges": [
                {"from": edge.source, "verb": edge.verb.value, "to": edge.target, "num": edge.num}
                for edge in self.edges
            ],
            "left_out": [{"at": each.at, "what": each.what, "num": each.num} for each in self.left_out],
        }


class GraphBuilder:
    """Collects nodes and edges up to a limit. What does not fit any more is counted, and said."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: dict[str, Node] = {}
        self._edges: dict[tuple[str, Verb, str], Edge] = {}
        self._left_out: dict[tuple[str, str], LeftOut] = {}
        self._num_dropped = 0

    @property
    def room(self) -> int:
        """How many more nodes fit."""
        return self._max_nodes - len(self._nodes)

    def has(self, key: str) -> bool:
        return key in self._nodes

    def add(self, node: Node) -> bool:
        """Whether the graph has the node now."""
        if node.key not in self._nodes:
            if self.room <= 0:
                self._num_dropped += 1
                return False
            self._nodes[node.key] = node
        return True

    def join(self, source: str, verb: Verb, target: str, num: int | None = None) -> None:
        """Add an edge between nodes that are both there; the same edge again changes nothing."""
        if self.has(source) and self.has(target):
            self._edges.setdefault((source, verb, target), Edge(source, verb, target, num))

    def leave_out(self, at: str, what: str, num: int | None = None) -> None:
        if self.has(at) and num != 0:
            self._left_out[at, what] = LeftOut(at, what, num)

    def take_back(self, at: str, what: str) -> None:
        """It is in the graph after all."""
        self._left_out.pop((at, what), None)

    def graph(self, focus: str, *, is_cut: bool = False) -> Graph:
        """The graph around a node; `is_cut`: there was more to look at when it was full."""
        if is_cut or self._num_dropped:
            self.leave_out(
                focus, f"at least so many, beyond the limit of {self._max_nodes} nodes", self._num_dropped or 1
            )
        nodes = [self._nodes[focus], *(node for key, node in self._nodes.items() if key != focus)]
        return Graph(focus, tuple(nodes), tuple(self._edges.values()), tuple(self._left_out.values()))


@dataclass
class Branch:
    """A node in the tree that a terminal shows."""

    node: Node
    verb: str
    """How it is joined to the node above it; empty at the root."""
    num: int | None = None
    is_repeated: bool = False
    """It stands elsewhere in the tree, with all that belongs to it."""
    branches: list[Branch] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def tree_of(graph: Graph) -> Branch:
    """Every node once, below the nearest node to the focus that it is joined to; every edge once.

    A base is joined to nearly everything, so what is joined to it is looked for elsewhere first.
    """
    nodes = {node.key: node for node in graph.nodes}
    joined: dict[str, list[Edge]] = {key: [] for key in nodes}
    for edge in graph.edges:
        joined[edge.source].append(edge)
        joined[edge.target].append(edge)
    root = Branch(nodes[graph.focus], "")
    found = {graph.focus: root}
    used: set[Edge] = set()
    waiting, bases = deque([root]), deque[Branch]()
    while waiting or bases:
        branch = waiting.popleft() if waiting else bases.popleft()
        for edge in joined[branch.node.key]:
            other = edge.target if edge.source == branch.node.key else edge.source
            if other not in found:
                below = Branch(nodes[other], edge.read_from(branch.node.key), edge.num)
                branch.branches.append(below)
                found[other] = below
                used.add(edge)
                (bases if below.node.kind is NodeKind.BASE else waiting).append(below)
    for edge in graph.edges:
        if edge not in used:
            again = Branch(nodes[edge.target], edge.verb.value, edge.num, is_repeated=True)
            found[edge.source].branches.append(again)
    for each in graph.left_out:
        found[each.at].left_out.append(each)
    return root
