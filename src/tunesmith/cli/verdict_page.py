"""A verdict for people: what was measured on both sides, every check of the gate, and the reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.cli.output import Column, clean, coloured, heading, number, say, several, show_table

if TYPE_CHECKING:
    from tunesmith.client.views import EvaluationView

_MAX_EXPONENT = 700.0  # beyond it a float overflows
_PROFILE_FILE = re.compile(r"\Aprofiles/[^/]*\.yaml(?=:\d+\Z)")


def show_verdict(evaluation: EvaluationView) -> None:
    """The decision first, then the numbers of both sides, the checks and the reasons."""
    from rich.text import Text

    heading("Verdict")
    title = coloured(evaluation.decision)
    title.append(f"  {several(evaluation.num_cases, 'case')}, {evaluation.confidence:.0%} confidence", style="default")
    say(Text.assemble("  ", title))
    _show_metrics(evaluation)
    if evaluation.checks:
        say("")
        _show_checks(evaluation.checks)
        say("")
    for reason in evaluation.reasons:
        say(f"  {reason}")


def _show_metrics(evaluation: EvaluationView) -> None:
    rows = []
    for c in evaluation.comparisons:
        interval = "" if c["low"] is None else f"{c['low']:+.3g} … {c['high']:+.3g}"
        better = "" if c["difference"] is None else f"{c['difference']:+.3g}"
        rows.append((c["metric"], number(c["baseline"]), number(c["candidate"]), better, interval, _note(c)))
    columns = [Column("METRIC", "fold"), Column("LIVE", align="right"), Column("NEW", align="right"),
               Column("BETTER BY", align="right"), Column("INTERVAL"), Column("NOTE", "fold")]  # fmt: skip
    shown = columns if any(row[-1] for row in rows) else columns[:-1]
    show_table(shown, [row[: len(shown)] for row in rows], indent=2)
    for c in evaluation.comparisons:
        if c["metric"] == "heldout_loss" and c["candidate"] is not None:
            said = f"{_perplexity(c['baseline'])} → {_perplexity(c['candidate'])}"
            say(f"  perplexity (e to the power of heldout_loss) {said}")


def _perplexity(loss: float | None) -> str:
    return "" if loss is None else number(math.exp(min(loss, _MAX_EXPONENT)))


def _note(comparison: Mapping[str, Any]) -> str:
    left_out = comparison.get("num_left_out") or 0
    notes = [
        comparison["problem"],
        "shown only" if comparison.get("shown_only") else None,
        f"applies to {comparison['n']} of {comparison['n'] + left_out}" if left_out else None,
    ]
    return ", ".join(note for note in notes if note)


def _show_checks(checks: Sequence[Mapping[str, Any]]) -> None:
    """One row per check, below the name of its metric."""
    from rich.text import Text

    rows: list[Sequence[Any]] = []
    metric = None
    for check in checks:
        if check["metric"] != metric:
            metric = check["metric"]
            rows.append(("", Text(clean(str(metric)), style="bold"), "", "", "", ""))
        passed = coloured("promote" if check["passed"] else "reject")
        passed.plain = "yes" if check["passed"] else "NO"
        actual, needed = _figure(check["actual"]), f"{check['needs']} {_figure(check['threshold'])}"
        name = check["name"] if metric is None else f"  {check['name']}"
        rows.append((passed, name, actual, needed, check["n"], _source(check)))
    columns = [Column("OK"), Column("CHECK", "fold"), Column("IS", align="right"), Column("NEEDED"),
               Column("N", align="right"), Column("GATE SETTING", "fold")]  # fmt: skip
    show_table(columns, rows, indent=2)


def _figure(value: float | None) -> str:
    """Counts in full, everything else with three figures."""
    if value is None:
        return "none"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def _source(check: Mapping[str, Any]) -> str:
    """The key without section and metric, and who set it; --json has key, file and line in full."""
    setting = str(check["setting"]).removeprefix("gate.").removesuffix(f".{check['metric']}")
    note = f"; {check['note']}" if check.get("note") else ""
    return f"{setting} ({_PROFILE_FILE.sub('profile', str(check['origin']))}){note}"
