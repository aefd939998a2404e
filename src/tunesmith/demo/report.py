"""The demo's report: one HTML file with plots, scores, answers and verdicts, readable without a network."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.client import Client
from tunesmith.client.views import RunDetail
from tunesmith.core.errors import MissingExtra
from tunesmith.core.files import write_atomic
from tunesmith.demo.outcome import DemoScores

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 3rem auto; padding: 0 1rem; color: #1c2330; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .35rem .6rem; border-bottom: 1px solid #dfe3ea; }
th { text-align: left; font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
code { background: #f2f4f8; padding: .1rem .3rem; border-radius: 4px; }
.promote { color: #137a3e; } .reject { color: #b3261e; }
svg { width: 100%; height: auto; } .dim { color: #667085; white-space: nowrap; }
p, code { overflow-wrap: anywhere; } .wide { overflow-x: auto; }
@media (max-width: 40rem) { body { margin: 1rem auto; font-size: 15px; } td, th { padding: .3rem .4rem; } }
"""


def write_report(client: Client, details: Sequence[RunDetail], outcome: DemoScores, path: Path) -> Path:
    """Write the report and return where it is."""
    good = details[0]
    parts = [
        "<h1>tunesmith demo</h1>",
        f"<p>Profile <code>{_e(good.run.profile)}</code>: a tiny model that reads dates in words learns numeric dates, "
        "as JSON, without forgetting what it knew. Every score is on held-out prompts that were never trained on.</p>",
        *(_verdict(detail, number) for number, detail in enumerate(details, start=1)),
        "<h2>Before and after</h2>",
        _bars(outcome),
        _table(outcome),
        "<h2>Answers to held-out prompts</h2>",
        _examples(outcome),
        "<h2>Training</h2>",
        _curves(client, details),
        "<h2>History of the first run</h2>",
        _history(good),
    ]
    screen = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    head = f"<meta charset='utf-8'>{screen}<title>tunesmith demo</title><style>{_STYLE}</style>"
    page = f"<!doctype html><html lang='en'>{head}"
    write_atomic(path, page + "\n".join(parts) + "</html>\n")
    return path


def _verdict(detail: RunDetail, number: int) -> str:
    evaluation = detail.evaluation
    if evaluation is None:
        return f"<h2>Round {number}: {_e(detail.run.state)}</h2><p>{_e(detail.run.reason)}</p>"
    reasons = "<br>".join(_e(reason) for reason in evaluation.reasons)
    title = f"Round {number}: <span class='{evaluation.decision}'>{evaluation.decision}</span> → {_e(detail.run.state)}"
    return f"<h2>{title}</h2><p>{reasons}</p>"


def _table(outcome: DemoScores) -> str:
    rows = "".join(
        f"<tr><td>{_e(s.task)}<td>{_e(s.name)}<td class=n>{s.n}<td class=n>{s.before:.2f}<td class=n>{s.after:.2f}"
        f"<td class=n>[{s.low:+.2f}, {s.high:+.2f}]"
        for s in outcome.scores
    )
    head = "<tr><th>task<th>score<th>n<th>before<th>after<th>gain, 95 % interval"
    return _wide(f"{head}{rows}")


def _examples(outcome: DemoScores) -> str:
    rows = "".join(
        f"<tr><td><code>{_e(x.prompt)}</code><td><code>{_e(x.before)}</code><td><code>{_e(x.after)}</code>"
        for x in outcome.examples
    )
    return _wide(f"<tr><th>prompt<th>before<th>after{rows}")


def _history(detail: RunDetail) -> str:
    rows = "".join(
        f"<tr><td class=dim>{event.at:%H:%M:%S}<td>{_e(event.new_state or event.action)}<td>{_e(event.reason)}"
        f"<td class=dim>{_e(event.actor)}"
        for event in detail.events
    )
    return _wide(rows)


def _wide(rows: str) -> str:
    """A table that scrolls by itself where it is wider than the screen."""
    return f"<div class=wide><table>{rows}</table></div>"


def _bars(outcome: DemoScores) -> str:
    figure, axes = _figure(3.0)
    labels = [f"{score.task}\n{score.name}" for score in outcome.scores]
    places = range(len(labels))
    axes.bar([p - 0.2 for p in places], [s.before for s in outcome.scores], 0.38, label="before", color="#b9c2d3")
    axes.bar([p + 0.2 for p in places], [s.after for s in outcome.scores], 0.38, label="after", color="#2f6fed")
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of cases right")
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _curves(client: Client, details: Sequence[RunDetail]) -> str:
    figure, axes = _figure(3.0)
    for number, detail in enumerate(details, start=1):
        points = client.runs.metrics(detail.run.id)
        steps = [(p["step"], p["loss"]) for p in points if p["type"] == "metrics"]
        checks = [(p["step"], p["validation_loss"]) for p in points if "validation_loss" in p]
        colour = ("#2f6fed", "#b3261e")[(number - 1) % 2]
        axes.plot(*zip(*steps, strict=True), color=colour, alpha=0.35, label=f"round {number}, training")
        if checks:
            axes.plot(*zip(*checks, strict=True), "o-", color=colour, label=f"round {number}, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra.named("report", "the demo's report") from None
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    sink = io.StringIO()
    figure.savefig(sink, format="svg")
    text = sink.getvalue()
    return text[text.index("<svg") :]


def _e(text: str) -> str:
    return html.escape(text)
