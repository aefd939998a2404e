"""Figures of many arms as lines, as ratios, as a table for the documentation, and as charts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAME = 1e-3
"""How far an arm's loss before training may be from ours, relative; bf16 explains a tenth of it."""

Cell = dict[str, Any]
"""One arm at one method and size: its figures, or `failed` or `skipped` with the reason."""


def unit_of(method: str) -> tuple[str, str]:
    """What is compared: its name among the figures, and how people call it."""
    return ("tokens_per_s", "tokens/s") if method == "sft" else ("examples_per_s", "pairs/s")


def judge(cells: list[Cell]) -> None:
    """Beside each arm that was measured: how many times faster native is, and whether it computes the same."""
    for cell in cells:
        ours = native_of(cells, cell)
        if "failed" in cell or "skipped" in cell or ours is None:
            continue
        name, _ = unit_of(cell["method"])
        cell["ratio"] = round(ours[name] / cell[name], 2)
        off = abs(cell["start_loss"] / ours["start_loss"] - 1)
        cell["is_same"] = off < SAME and cell.get("is_isolated", True)


def native_of(cells: list[Cell], cell: Cell) -> Cell | None:
    for other in cells:
        is_there = other["arm"] == "native" and "failed" not in other and "skipped" not in other
        if is_there and (other["method"], other["size"]) == (cell["method"], cell["size"]):
            return other
    return None


def ratios_of(cells: list[Cell]) -> dict[str, float]:
    """Only of arms that compute the same; with the method and the size in front where there are several."""
    is_one = len({(cell["method"], cell["size"]) for cell in cells}) == 1
    return {
        cell["arm"] if is_one else f"{cell['method']} {cell['size']} {cell['arm']}": cell["ratio"]
        for cell in cells
        if cell.get("is_same") and cell["arm"] != "native"
    }


def line_of(cell: Cell) -> str:
    head = f"{cell['method']:4} {cell['size']:10} {cell['arm']:38}"
    for why in ("failed", "skipped"):
        if why in cell:
            return f"{head} {why}: {cell[why]}"
    mfu = f" {cell['mfu']:6.1%} MFU" if cell["mfu"] is not None else ""
    forecast = f" (forecast {cell['forecast_gb']:.1f})" if cell.get("forecast_gb") is not None else ""
    same = "" if cell.get("is_same", True) else "   NOT THE SAME COMPUTATION" + _why_not(cell)
    ratio = f"   native is {cell['ratio']:6.2f} x" if "ratio" in cell else ""
    things = "examples" if cell["method"] == "sft" else "pairs"
    return (
        f"{head} {cell['tokens_per_s']:>9,.0f} tokens/s {cell['examples_per_s']:>8.2f} {things}/s{mfu} "
        f"{cell['memory_gb']:6.1f} GB{forecast}   start-up {cell['start_up_s']:5.1f} s{ratio}   "
        f"loss before {cell['start_loss']:.5f}{same}{'   ' + cell['path'] if 'path' in cell else ''}"
    )


def _why_not(cell: Cell) -> str:
    return ": packed examples see each other" if cell.get("is_isolated") is False else ": another loss before training"


def table_of(results: dict[str, Any]) -> str:
    """Markdown, one table per method, as docs/performance.md shows them."""
    parts = [f"Machine: {results['machine']}. {results['versions']}.", "", f"`{results['command']}`"]
    for method in dict.fromkeys(cell["method"] for cell in results["cells"]):
        name, unit = unit_of(method)
        parts += ["", f"| {method} | trainer | {unit} | native is | MFU | memory | forecast | start-up |"]
        parts += ["|---|---|---|---|---|---|---|---|"]
        for cell in sorted(
            (cell for cell in results["cells"] if cell["method"] == method), key=lambda cell: str(cell["size"])
        ):
            parts.append(_row(cell, name))
    return "\n".join(parts) + "\n"


def _row(cell: Cell, name: str) -> str:
    head = f"| {cell['size']} | {cell['arm']} |"
    for why in ("failed", "skipped"):
        if why in cell:
            return f"{head} {why}: {cell[why]} | | | | | |"
    ratio = "" if cell["arm"] == "native" or "ratio" not in cell else f"{cell['ratio']:.1f} ×"
    if not cell.get("is_same", True):
        ratio = "not the same computation"
    mfu = "" if cell["mfu"] is None else f"{cell['mfu']:.1%}"
    forecast = "" if cell.get("forecast_gb") is None else f"{cell['forecast_gb']:.1f} GB"
    value = f"{cell[name]:,.0f}" if cell[name] >= 100 else f"{cell[name]:.1f}"
    return f"{head} {value} | {ratio} | {mfu} | {cell['memory_gb']:.1f} GB | {forecast} | {cell['start_up_s']:.0f} s |"


def write(folder: Path, results: dict[str, Any]) -> list[Path]:
    """results.json, table.md, and a chart per method where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "table.md").write_text(table_of(results))
    written = [folder / "results.json", folder / "table.md"]
    for method in dict.fromkeys(cell["method"] for cell in results["cells"]):
        path = folder / f"training-{method}.png"
        if draw(path, method, [cell for cell in results["cells"] if cell["method"] == method]):
            written.append(path)
    return written


def draw(path: Path, method: str, cells: list[Cell]) -> bool:
    """Bars by arm, a panel by size; False where nothing can be drawn."""
    name, unit = unit_of(method)
    measured = [cell for cell in cells if name in cell]
    try:
        import matplotlib as mpl
    except ImportError:
        print("matplotlib is not installed, so no charts: draw them elsewhere with --draw results.json")
        return False
    if not measured:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(cell["size"] for cell in measured))
    heights = [sum(cell["size"] == size for cell in measured) for size in sizes]
    figure, panels = pyplot.subplots(
        len(sizes), 1, figsize=(8, 1.2 + 0.45 * sum(heights) + 0.5 * len(sizes)), squeeze=False,
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for panel, size in zip(panels[:, 0], sizes, strict=True):
        _draw_panel(panel, [cell for cell in measured if cell["size"] == size], name)
        panel.set_title(f"{method}, {size}", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel(f"{unit}, more is better")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_panel(panel: Any, cells: list[Cell], name: str) -> None:
    cells = sorted(cells, key=lambda cell: float(cell[name]))
    colours = ["#1f6f8b" if cell["arm"].startswith("native") else "#b8bfc6" for cell in cells]
    bars = panel.barh([cell["arm"] for cell in cells], [cell[name] for cell in cells], color=colours)
    notes = []
    for cell in cells:
        value = f"{cell[name]:,.0f}" if cell[name] >= 100 else f"{cell[name]:.1f}"
        is_other = cell["arm"] != "native" and cell.get("is_same")
        notes.append(f"{value}  ({cell['ratio']:.1f} × slower)" if is_other else value)
    panel.bar_label(bars, notes, padding=4, fontsize=8)
    panel.margins(x=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=9)
