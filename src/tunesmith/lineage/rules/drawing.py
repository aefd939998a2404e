"""A lineage graph as SVG: boxes from left to right, edges with their verbs, on light and dark pages alike. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from xml.etree import ElementTree

from tunesmith.lineage.rules.graph import Graph, Node, NodeKind, Verb
from tunesmith.lineage.rules.layout import Layout, Size, lay_out

MAX_DRAWN = 150
"""More boxes than this nobody can read."""
_SIZE = Size()
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FILLS = {
    NodeKind.BASE: "#e5e7eb",
    NodeKind.FILE: "#fef3c7",
    NodeKind.ANSWER: "#fef3c7",
    NodeKind.EXPERIENCE: "#fef3c7",
    NodeKind.EXPERIENCES: "#fde68a",
    NodeKind.DATASET: "#fed7aa",
    NodeKind.RUN: "#dbeafe",
    NodeKind.VERSION: "#bbf7d0",
    NodeKind.EVALUATION: "#e9d5ff",
    NodeKind.FLIP: "#fbcfe8",
}
_PAGE = "#fafafa"  # a page of its own: the text is as readable on a dark page as on a light one
_LINE = "#6b7280"
_BORDER = "#4b5563"
_DARK = "#111827"
_SOFT = "#4b5563"
_LETTER = 0.57  # a letter of these fonts is about so wide, as a share of its size
_BOLD = 1.12
_MIDDLE = {"text-anchor": "middle"}
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def draw(graph: Graph) -> str:
    """An SVG document. The focus has a thick border; what does not fit in a box ends in an ellipsis.

    The few experiences that a tree names of a group are not drawn: the group's box counts them.
    """
    named = _only_named(graph)
    drawn = [node for node in graph.nodes if node.key not in named]
    nodes = drawn[:MAX_DRAWN]
    shown = {node.key for node in nodes}
    edges = [edge for edge in graph.edges if {edge.source, edge.target} <= shown]
    layout = lay_out([node.key for node in nodes], [edge.flow for edge in edges], _SIZE)
    notes = _notes(graph, len(drawn) - len(nodes))
    height = layout.height + 18 * len(notes)
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {layout.width:.0f} {height:.0f}",
            "width": f"{layout.width:.0f}",
            "height": f"{height:.0f}",
            "role": "img",
            "font-family": _FONT,
        },
    )
    ElementTree.SubElement(root, "title").text = _clean(f"Lineage of {graph.node(graph.focus).name}")
    page = {"width": "100%", "height": "100%", "rx": "10", "fill": _PAGE}
    ElementTree.SubElement(root, "rect", page)
    _add_arrow(root)
    by_pair: dict[tuple[str, str], list[str]] = {}
    for edge in edges:
        said = edge.read_from(edge.flow[0])
        by_pair.setdefault(edge.flow, []).append(said + (f" ({edge.num:,})" if edge.num else ""))
    labels = _Labels()
    for pair, verbs in by_pair.items():
        _add_edge(root, layout.routes[pair])
        labels.add(layout.routes[pair], ", ".join(verbs))
    for node in nodes:
        _add_box(root, node, layout, is_focus=node.key == graph.focus)
    root.append(labels.group)
    for number, line in enumerate(notes):
        _add_text(root, _SIZE.margin, layout.height + 18 * number, line, 12, _LINE)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _only_named(graph: Graph) -> set[str]:
    """Experiences that are in the graph as examples of a group."""
    joined: dict[str, set[Verb]] = {}
    for edge in graph.edges:
        joined.setdefault(edge.target, set()).add(edge.verb)
        joined.setdefault(edge.source, set()).add(edge.verb)
    found = {node.key for node in graph.nodes if joined.get(node.key) == {Verb.INCLUDE}}
    return {key for key in found if key != graph.focus and graph.node(key).kind is NodeKind.EXPERIENCE}


def _notes(graph: Graph, num_not_drawn: int) -> list[str]:
    """What the drawing does not show, in words."""
    found = [f"{num_not_drawn} more nodes are not drawn; --json lists them"] if num_not_drawn else []
    deeper = sum(each.num is None and "--depth" in each.what for each in graph.left_out)
    return found + ([f"Goes on at {deeper} of these boxes; a higher --depth draws more."] if deeper else [])


def _add_arrow(root: ElementTree.Element) -> None:
    marker = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"),
        "marker",
        {
            "id": "arrow", "viewBox": "0 0 8 8", "refX": "7", "refY": "4",
            "markerWidth": "7", "markerHeight": "7", "orient": "auto",
        },
    )  # fmt: skip
    ElementTree.SubElement(marker, "path", {"d": "M0,0.5 L8,4 L0,7.5 z", "fill": _LINE})


def _add_edge(root: ElementTree.Element, points: Sequence[tuple[float, float]]) -> None:
    path = f"M{points[0][0]:.0f},{points[0][1]:.1f}"
    for (x, y), (next_x, next_y) in pairwise(points):
        bend = (next_x - x) / 2
        path += f" C{x + bend:.0f},{y:.1f} {next_x - bend:.0f},{next_y:.1f} {next_x:.0f},{next_y:.1f}"
    ElementTree.SubElement(
        root, "path", {"d": path, "fill": "none", "stroke": _LINE, "stroke-width": "1.4", "marker-end": "url(#arrow)"}
    )


class _Labels:
    """The verbs of edges, each on its line where no other verb stands, if there is such a place."""

    def __init__(self) -> None:
        self.group = ElementTree.Element("g")
        self._taken: list[tuple[float, float, float]] = []

    def add(self, points: Sequence[tuple[float, float]], verb: str) -> None:
        # an edge that passes a column has that column's room for its verb
        begin, end = points[:2] if len(points) == 2 else points[1:3]
        half = len(verb) * 10.5 * _LETTER / 2
        spots = [_on_curve(begin, end, along) for along in (0.5, 0.6, 0.4, 0.7, 0.3, 0.78, 0.22)]
        x, y = next((spot for spot in spots if self._is_free(*spot, half)), spots[0])
        self._taken.append((x, y, half))
        rim = {**_MIDDLE, "stroke": _PAGE, "stroke-width": "5"}  # interrupts the line behind the verb
        _add_text(self.group, x, y + 3.5, verb, 10.5, _PAGE, more=rim)
        _add_text(self.group, x, y + 3.5, verb, 10.5, _SOFT, more=_MIDDLE)

    def _is_free(self, x: float, y: float, half: float) -> bool:
        return all(
            abs(y - other_y) >= 14 or abs(x - other_x) >= half + other for other_x, other_y, other in self._taken
        )


def _on_curve(begin: tuple[float, float], end: tuple[float, float], t: float) -> tuple[float, float]:
    """A point of the curve that `_add_edge` draws between two points."""
    across = 1.5 * t * (1 - t) + t**3  # of the Bézier curve whose control points stand in the middle
    rise = t * t * (3 - 2 * t)
    return begin[0] + (end[0] - begin[0]) * across, begin[1] + (end[1] - begin[1]) * rise


def _add_box(root: ElementTree.Element, node: Node, layout: Layout, *, is_focus: bool) -> None:
    x, y = layout.places[node.key]
    group = ElementTree.SubElement(root, "g")
    ElementTree.SubElement(group, "title").text = _clean(f"{node.kind.value} {node.name}: {node.summary}")
    ElementTree.SubElement(
        group,
        "rect",
        {
            "x": f"{x:.0f}", "y": f"{y:.1f}", "width": f"{_SIZE.width:.0f}", "height": f"{_SIZE.height:.0f}",
            "rx": "7", "fill": _FILLS[node.kind], "stroke": _DARK if is_focus else _BORDER,
            "stroke-width": "3" if is_focus else "1",
        },
    )  # fmt: skip
    inner = _SIZE.width - 20
    _add_text(group, x + 10, y + 16, node.kind.value.upper(), 9, _SOFT)
    _add_text(group, x + 10, y + 34, _fitted(node.name, 13.5 * _BOLD, inner), 13.5, _DARK, more={"font-weight": "600"})
    for number, line in enumerate(_two_lines(node.summary, 11, inner)):
        _add_text(group, x + 10, y + 52 + 15 * number, line, 11, _SOFT)


def _add_text(
    parent: ElementTree.Element,
    x: float,
    y: float,
    text: str,
    size: float,
    fill: str,
    *,
    more: Mapping[str, str] = {},
) -> None:
    about = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": f"{size:g}", "fill": fill, **more}
    ElementTree.SubElement(parent, "text", about).text = _clean(text)


def _two_lines(text: str, size: float, width: float) -> list[str]:
    """The text in at most two lines, broken at a blank where there is one."""
    room = int(width / (size * _LETTER))
    if len(text) <= room:
        return [text]
    at = text.rfind(" ", 0, room + 1)
    first = text[:at] if at > room // 2 else text[:room]
    return [first, _fitted(text[len(first) :].strip(), size, width)]


def _fitted(text: str, size: float, width: float) -> str:
    """As much of a text as surely fits."""
    room = int(width / (size * _LETTER))
    return text if len(text) <= room else f"{text[: room - 1].rstrip(' ,')}…"


def _clean(text: str) -> str:
    """Without what XML cannot hold; ElementTree escapes the rest."""
    return _NOT_XML.sub("\ufffd", text)
