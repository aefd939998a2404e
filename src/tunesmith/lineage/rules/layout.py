"""Where the nodes of a graph go in a drawing: in columns from left to right, by what came first. Pure.

The usual way of layered drawings: columns by the longest path, points in between for edges that pass a column, an order
within each column that follows the neighbours, and heights that pull joined nodes to one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

_SWEEPS = 8


@dataclass(frozen=True)
class Size:
    """Sizes of a drawing, in pixels."""

    width: float = 216
    height: float = 78
    column_gap: float = 116
    row_gap: float = 22
    lane_height: float = 22
    """Room for an edge that passes a column."""
    margin: float = 24


@dataclass(frozen=True)
class Layout:
    places: Mapping[str, tuple[float, float]]
    """Of each node, its upper left corner."""
    routes: Mapping[tuple[str, str], Sequence[tuple[float, float]]]
    """Of each pair of joined nodes, the points that the edge goes through, from left to right."""
    width: float
    height: float


def lay_out(nodes: Sequence[str], flows: Iterable[tuple[str, str]], size: Size) -> Layout:
    """Places for all nodes. `flows`: from what was there first to what came of it; one against the order is drawn."""
    known = set(nodes)
    pairs = list(dict.fromkeys((a, b) for a, b in flows if a != b and {a, b} <= known))
    forward = _without_cycles(nodes, pairs)
    columns = _columns(nodes, forward)
    straight = [(a, b) if columns[a] <= columns[b] else (b, a) for a, b in pairs]
    rows, paths = _with_lanes(nodes, columns, straight)
    _order(rows, paths)
    heights = _heights(rows, paths, known, size)
    lefts = [size.margin + number * (size.width + size.column_gap) for number in range(len(rows))]
    places = {node: (lefts[columns[node]], heights[node] - size.height / 2) for node in nodes}
    ports = _ports(paths, heights, size)
    routes = {
        pair: _route(paths[ends], columns, lefts, heights, ports[ends], size)
        for pair, ends in zip(pairs, straight, strict=True)
    }
    bottom = max((y + size.height for _, y in places.values()), default=0.0)
    lane_bottom = max((y for points in routes.values() for _, y in points), default=0.0)
    return Layout(places, routes, lefts[-1] + size.width + size.margin, max(bottom, lane_bottom + 10) + size.margin)


def _without_cycles(nodes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that do not contradict each other. Time has no cycles, but a clock that was set back may."""
    kept = list(pairs)
    while True:
        before: dict[str, set[str]] = {node: set() for node in nodes}
        for a, b in kept:
            before[b].add(a)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            circle = error.args[1]
            kept.remove((circle[0], circle[1]) if (circle[0], circle[1]) in kept else (circle[1], circle[0]))
        else:
            return kept


def _columns(nodes: Sequence[str], pairs: Sequence[tuple[str, str]]) -> dict[str, int]:
    """By the longest path; what only begins something stands right before the first thing it begins."""
    before: dict[str, list[str]] = {node: [] for node in nodes}
    after: dict[str, list[str]] = {node: [] for node in nodes}
    for a, b in pairs:
        before[b].append(a)
        after[a].append(b)
    columns: dict[str, int] = {}
    for node in TopologicalSorter(before).static_order():
        columns[node] = max((columns[each] + 1 for each in before[node]), default=0)
    for node in nodes:
        if not before[node] and after[node]:
            columns[node] = max(0, min(columns[each] for each in after[node]) - 1)
    used = {column: number for number, column in enumerate(sorted(set(columns.values())))}
    return {node: used[column] for node, column in columns.items()}


def _with_lanes(
    nodes: Sequence[str], columns: Mapping[str, int], pairs: Sequence[tuple[str, str]]
) -> tuple[list[list[str]], dict[tuple[str, str], list[str]]]:
    """The columns with their nodes, and a point for each edge that passes one; each pair's path through them."""
    rows: list[list[str]] = [[] for _ in range(max(columns.values(), default=0) + 1)]
    for node in nodes:
        rows[columns[node]].append(node)
    paths: dict[tuple[str, str], list[str]] = {}
    for a, b in pairs:
        lanes = [f"\0{a}\0{b}\0{column}" for column in range(columns[a] + 1, columns[b])]
        if (a, b) not in paths:
            for column, lane in enumerate(lanes, columns[a] + 1):
                rows[column].append(lane)
        paths[a, b] = [a, *lanes, b]
    return rows, paths


def _order(rows: list[list[str]], paths: Mapping[tuple[str, str], list[str]]) -> None:
    """Sort each column by the mean place of its neighbours, to and fro: joined nodes come near each other."""
    neighbours = _neighbours(paths)
    for sweep in range(_SWEEPS):
        order = range(1, len(rows)) if sweep % 2 == 0 else range(len(rows) - 2, -1, -1)
        for number in order:
            beside = rows[number - 1 if sweep % 2 == 0 else number + 1]
            place = {node: index for index, node in enumerate(beside)}
            here = {node: index for index, node in enumerate(rows[number])}

            def mean(node: str, place: Mapping[str, int] = place, here: Mapping[str, int] = here) -> float:
                found = [place[each] for each in neighbours.get(node, ()) if each in place]
                return sum(found) / len(found) if found else float(here[node])

            rows[number].sort(key=mean)


def _heights(
    rows: Sequence[Sequence[str]], paths: Mapping[tuple[str, str], list[str]], known: set[str], size: Size
) -> dict[str, float]:
    """The middle of each node and lane: near those it is joined to, in the column's order, without overlap."""
    neighbours = _neighbours(paths)
    tall = {each: (size.height if each in known else size.lane_height) + size.row_gap for row in rows for each in row}
    middle: dict[str, float] = {}
    for row in rows:
        top = size.margin
        for each in row:
            middle[each] = top + tall[each] / 2
            top += tall[each]
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for each in row:
                found = [middle[other] for other in neighbours.get(each, ())]
                wanted.append(sum(found) / len(found) if found else middle[each])
            _spread(row, wanted, tall, middle)
    lowest = min((middle[each] - tall[each] / 2 for row in rows for each in row), default=0.0)
    return {each: value - lowest + size.margin - size.row_gap / 2 for each, value in middle.items()}


def _spread(row: Sequence[str], wanted: Sequence[float], tall: Mapping[str, float], middle: dict[str, float]) -> None:
    """As near to the wanted heights as the order allows: runs of nodes that touch each other move as one."""
    blocks: list[tuple[list[str], float, float]] = []  # members, sum of wanted offsets, height
    for each, where in zip(row, wanted, strict=True):
        block = ([each], where - tall[each] / 2, tall[each])
        while blocks:
            members, top, height = blocks[-1]
            if top + height <= block[1]:
                break
            blocks.pop()
            num, more = len(members), len(block[0])
            merged_top = (top * num + (block[1] - height) * more) / (num + more)
            block = ([*members, *block[0]], merged_top, height + block[2])
        blocks.append(block)
    for members, top, _ in blocks:
        for each in members:
            middle[each] = top + tall[each] / 2
            top += tall[each]  # noqa: PLW2901 - the next one stands below


def _ports(
    paths: Mapping[tuple[str, str], list[str]], heights: Mapping[str, float], size: Size
) -> dict[tuple[str, str], tuple[float, float]]:
    """Of each edge, how far above or below the middle of its two boxes it begins and ends, so that edges part."""
    leaving: dict[str, list[tuple[str, str]]] = {}
    coming: dict[str, list[tuple[str, str]]] = {}
    for a, b in paths:
        leaving.setdefault(a, []).append((a, b))
        coming.setdefault(b, []).append((a, b))
    begin = _spaced(leaving, {pair: heights[path[1]] for pair, path in paths.items()}, size)
    end = _spaced(coming, {pair: heights[path[-2]] for pair, path in paths.items()}, size)
    return {pair: (begin[pair], end[pair]) for pair in paths}


def _spaced(
    edges: Mapping[str, list[tuple[str, str]]], towards: Mapping[tuple[str, str], float], size: Size
) -> dict[tuple[str, str], float]:
    found = {}
    for mine in edges.values():
        step = min(14.0, size.height * 0.7 / len(mine))
        for number, pair in enumerate(sorted(mine, key=lambda pair: towards[pair])):
            found[pair] = (number - (len(mine) - 1) / 2) * step
    return found


def _route(
    path: Sequence[str],
    columns: Mapping[str, int],
    lefts: Sequence[float],
    heights: Mapping[str, float],
    ports: tuple[float, float],
    size: Size,
) -> list[tuple[float, float]]:
    begin, end = path[0], path[-1]
    points = [(lefts[columns[begin]] + size.width, heights[begin] + ports[0])]
    for number, lane in enumerate(path[1:-1], columns[begin] + 1):
        points += [(lefts[number], heights[lane]), (lefts[number] + size.width, heights[lane])]
    return [*points, (lefts[columns[end]], heights[end] + ports[1])]


def _neighbours(paths: Mapping[tuple[str, str], list[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths.values():
        for a, b in pairwise(path):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return found
