"""What came of leaving the application alone, as Markdown for docs/loop.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from support.left_alone import LeftAlone
from support.left_alone_faults import Fault
from tunesmith.orchestration.rounds.history import Round


def rounds_table(app: LeftAlone, rounds: Sequence[Round], faults: Sequence[Fault]) -> str:
    """One line per round; quality is the share of right answers of what was live after it."""
    live, quality = app.start[0], app.start[1]
    best = _quality_by_version(app)
    lines = [
        "| round | start | learnt from | held-out loss | outcome | live then | right | killed meanwhile | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| | | | | before | {live} | {quality:.0%} | | |",
    ]
    for number, each in enumerate(rounds, start=1):
        if each.state == "deployed" and each.version is not None:
            live = each.version
        learnt = ", ".join(f"{num} {role}" for role, num in (each.learnt_from or {}).items())
        loss = "" if each.before is None else f"{each.before:.3f} → {each.after:.3f}"
        hit = Counter(fault.kind for fault in faults if fault.run_id == each.run_id)
        killed = ", ".join(kind if num == 1 else f"{num} × {kind}" for kind, num in sorted(hit.items()))
        shown = f"{best[live]:.0%}" if live in best else "not measured"
        took = app.client.runs.show(each.run_id).run
        seconds = (took.finished_at - took.created_at).total_seconds() if took.finished_at else float("nan")
        outcome = str(each.state).replace("_", " ")
        cells = (number, each.start, learnt, loss, outcome, live, shown, killed, f"{seconds:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(
    app: LeftAlone, rounds: Sequence[Round], faults: Sequence[Fault], days: Sequence[tuple[int, int]], took_s: float
) -> str:
    kinds = Counter(fault.kind for fault in faults)
    details = Counter(fault.detail for fault in faults)
    states = Counter(str(each.state) for each in rounds)
    outages = sorted(each.ended - each.begun for each in app.outages if each.ended is not None)
    away = f"{outages[len(outages) // 2]:.1f} s in the middle, {outages[-1]:.1f} s at most" if outages else "none"
    errors = Counter(re.sub(r"'chatcmpl-\w+'", "…", each.error)[:90] for each in app.desk.failures)
    return "\n".join(
        [
            f"- {len(rounds)} rounds opened by themselves in {took_s / 60:.1f} minutes: {_told(states)}.",
            f"- {len(faults)} kills: {_told(kinds)} (hit: {_told(details)}).",
            f"- {app.desk.num_answers} answers, {len(app.desk.failures)} calls failed after the client's own tries, "
            f"{len(app.desk.corrections)} corrections and {len(app.desk.confirmed)} ratings acknowledged, all stored.",
            f"- Right answers by day: {', '.join(str(right) for right, _ in days)}.",
            f"- From a kill of server, engine or store to the first answer: {away}.",
            f"- Starts: worker {app.worker.num_starts}, server {app.server.num_starts}.",
            f"- Failures: {_told(errors) or 'none'}.",
        ]
    )


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{num} {name}" for name, num in counts.most_common())


def _quality_by_version(app: LeftAlone) -> dict[str, float]:
    return {
        version: sum(said[message] == label for message, label in app.fixed) / len(app.fixed)
        for version, said in app.answers.items()
    }
