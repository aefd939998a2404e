"""`tunesmith lineage`: the graph around any id, as a tree, JSON or a drawing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.output import clean, note, print_id, print_json, show_tree, state_style
from tunesmith.cli.parser import Json, open_client
from tunesmith.core.errors import UsageError

if TYPE_CHECKING:
    from tunesmith.lineage.rules.graph import Branch

LINEAGE_EXAMPLE = "Example: tunesmith lineage support@v3 --svg lineage.svg"
_DEPTH = 4  # as lineage/collect.py has it, which is not imported for --help


def lineage(
    ctx: typer.Context,
    thing: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="support@v3, or the id of a version, run, dataset, experience, evaluation or answer.",
            show_default=False,
        ),
    ],
    depth: Annotated[
        int, typer.Option("--depth", min=1, max=100, help="How many steps to follow either way.")
    ] = _DEPTH,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a drawing to this file.")] = None,
    with_all: Annotated[
        bool, typer.Option("--all", help="With --json: every experience, not the first few of each dataset.")
    ] = False,
    json: Json = False,
) -> None:
    """What anything came from, and what came of it.

    Shows which data and which start a version was made from, how it was judged, when it was live, which answers it gave
    and what they taught. Never shows what was said.
    """
    if with_all and not json:
        raise UsageError("--all lists every experience, which only JSON can hold; add --json")
    with open_client(ctx) as client:
        graph = client.lineage.graph(thing, depth=depth, with_all=with_all)
        drawing = None if svg is None else client.lineage.svg(graph)
    if svg is not None and drawing is not None:
        from tunesmith.core.files import write_atomic

        write_atomic(svg, drawing)
    if json:
        print_json(graph.as_json())
        return
    if svg is not None:
        print_id(str(svg))
        return
    from tunesmith.lineage.rules.graph import tree_of

    show_tree(_tree(tree_of(graph)))
    if any("--depth" in each.what for each in graph.left_out):
        note(f"… goes on: --depth {depth * 2} follows further; --json says what is left out")


def _tree(branch: Branch, above: Any = None) -> Any:
    from rich.text import Text
    from rich.tree import Tree

    node = branch.node
    label = Text(overflow="fold")
    if branch.verb:
        label.append(f"{branch.verb} ", style="dim")
    label.append(clean(node.name), style="bold")
    if branch.is_repeated:
        label.append("" if node.kind == "base" else " (see there)", style="dim")
    else:
        label.append(f"  {clean(node.summary)}", style=state_style(node.state))
        if any(each.num is None and "--depth" in each.what for each in branch.left_out):
            label.append(" …", style="dim")
    drawn = Tree(label, guide_style="dim") if above is None else above.add(label)
    for below in branch.branches:
        _tree(below, drawn)
    for each in branch.left_out:
        if each.num is not None or "--depth" not in each.what:
            counted = "" if each.num is None else f"{each.num:,} "
            drawn.add(Text(f"… {counted}{each.what}", style="dim"))
    return drawn
