"""`run show` and `run metrics` for people: one run on a page, its numbers in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    duration,
    first_line,
    heading,
    number,
    passes,
    say,
    several,
    show_fields,
    show_table,
    stdout,
)
from tunesmith.cli.progress import progress_parts
from tunesmith.cli.verdict_page import show_verdict

if TYPE_CHECKING:
    from tunesmith.client.views import AttemptView, EventView, RunDetail, ShadowView

_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_KEY_WIDTH = 24  # attempt and step
_NUMBER_WIDTH = 10  # -1.234e+10


def show_run(detail: RunDetail) -> None:
    """State and why, what was asked for, what was tried, how it was judged, what happened when."""
    from rich.text import Text

    run = detail.run
    title = coloured(run.state)
    title.stylize("bold")
    say(Text.assemble(f"{run.id}  ", title, f"  {run.adapter or ''}".rstrip()))
    show_fields(
        [
            ("why", run.waits_for or first_line(run.reason)),
            ("do", detail.what_to_do),
            ("now", _now(detail)),
            *_essentials(detail),
        ]
    )
    if detail.attempts:
        heading("Attempts")
        _attempts(detail.attempts)
    if detail.evaluation is not None:
        show_verdict(detail.evaluation)
    if detail.shadow is not None:
        _shadow(detail.shadow)
    if detail.watch:
        _watch(detail.watch)
    open_requests = [request for request in detail.requests if request["acknowledged_at"] is None]
    if open_requests:
        heading("Asked, not answered yet")
        show_table([Column("WISH"), Column("BY", "fold")], [(r["kind"], r["actor"]) for r in open_requests], indent=2)
    heading("History")
    show_history(detail.events)


def _now(detail: RunDetail) -> str:
    if detail.progress is None:
        return ""
    return " · ".join([detail.progress.phase, *progress_parts(detail.progress)])


def _essentials(detail: RunDetail) -> list[tuple[str, Any]]:
    run, spec = detail.run, detail.spec
    recipe, data, base = spec["recipe"], spec["dataset"], spec["base"]
    lr = "" if recipe["lr"] is None else f" · lr {recipe['lr']:g}"
    trained = "full" if recipe.get("tuning") == "full" else f"rank {recipe['lora_rank']}"
    took = "" if run.finished_at is None else f", took {duration(run.finished_at - run.created_at)}"
    return [
        ("profile", run.profile),
        ("trainer", f"{run.trainer} · {run.method} · {spec['hardware_tier']}{' · dry run' if spec['dry_run'] else ''}"),
        ("base", f"{base['path']} ({base['lock']['family']})"),
        ("start", "the bare base" if spec["start"] is None else f"adapter {spec['start']['id']}"),
        ("dataset", f"{run.dataset_id} · {data['num_train']} train, {data['num_validation']} validation"),
        ("erased", f"{detail.num_erased} forgotten since, and taken out of the dataset" if detail.num_erased else None),
        ("recipe", f"{passes(recipe['epochs'], recipe['max_steps'])}{lr} · {trained} · seed {recipe['seed']}"),
        ("campaign", run.campaign_id),
        ("parent", run.parent_id),
        ("commit", _commit(spec)),
        ("submitted", f"{age(run.created_at)} by {run.created_by} · priority {run.priority}{took}"),
    ]


def _commit(spec: dict[str, Any]) -> str | None:
    """The git commit of the workspace when the run was submitted, where there was one."""
    from tunesmith.runs.commit import COMMIT, DIRTY

    commit = spec["metadata"].get(COMMIT)
    changed = {"yes": ", with uncommitted changes", "unknown": ", uncommitted changes unknown"}
    return None if commit is None else f"{commit[:12]}{changed.get(spec['metadata'].get(DIRTY), '')}"


def _attempts(attempts: Sequence[AttemptView]) -> None:
    rows = []
    for same in _alike(attempts):
        first, last = same[0], same[-1]
        took = "" if last.ended_at is None else duration(last.ended_at - first.started_at)
        numbers = str(last.number) if len(same) == 1 else f"{first.number}–{last.number}"
        rows.append((last.task, numbers, coloured(last.outcome), took, last.worker_id, note_of(last)))
    columns = [Column("TASK"), Column("#", align="right"), Column("OUTCOME"), Column("TOOK", align="right"),
               Column("WORKER"), Column("NOTE", "fold")]  # fmt: skip
    show_table(columns, rows, indent=2)


def _alike(attempts: Sequence[AttemptView]) -> list[list[AttemptView]]:
    """The attempts, with the looks of a watch that ended alike together: there may be a thousand of them."""
    found: list[list[AttemptView]] = []
    for attempt in attempts:
        last = found[-1][-1] if found else None
        is_look = last is not None and attempt.task == last.task == "watch" and attempt.outcome == last.outcome
        if is_look and last is not None and note_of(attempt) == note_of(last):
            found[-1].append(attempt)
        else:
            found.append([attempt])
    return found


def note_of(attempt: AttemptView) -> str:
    """What an attempt brought: its error, or its steps, metrics and memory."""
    if attempt.error:
        return (
            f"{attempt.error_class}: {first_line(attempt.error)}" if attempt.error_class else first_line(attempt.error)
        )
    result = attempt.result or {}
    steps = [several(result["num_steps"], "step")] if result.get("num_steps") else []
    metrics = result.get("metrics") or {}
    return ", ".join([*steps, *(f"{name} {number(value)}" for name, value in metrics.items()), *_memory(result)])


def _memory(result: dict[str, Any]) -> list[str]:
    """What a training took and what was predicted; a program of somebody else may tell whatever it likes."""
    from tunesmith.training.rules.memory_forecast import size_text

    memory: Any = (result.get("detail") or {}).get("memory")
    try:
        taken, predicted = float(memory["measured_bytes"]), float(memory["forecast"]["total"])
    except (TypeError, KeyError, ValueError):
        return []
    return [f"{size_text(taken)} of memory ({size_text(predicted)} predicted)"]


def show_history(events: Sequence[EventView]) -> None:
    """What happened when; the day and a repeated reason are said once."""
    day, reason, rows = "", "", []
    for event in events:
        now_day, now_reason = f"{event.at:%Y-%m-%d}", first_line(event.reason)
        shown = "" if now_reason == reason else now_reason
        state = coloured(event.new_state or event.action)
        rows.append(("" if now_day == day else now_day, f"{event.at:%H:%M:%S}", state, event.actor, shown))
        day, reason = now_day, now_reason
    columns = [Column("DAY"), Column("UTC"), Column("STATE"), Column("BY", "fold"), Column("WHY", "fold")]
    show_table(columns, rows, indent=2)


def _shadow(shadow: ShadowView) -> None:
    """How mirrored traffic was answered, beside what live answered to the same."""
    heading("Shadow")
    since = "" if shadow.since is None else f", the first {age(shadow.since)}"
    say(f"  {shadow.num} of {several(shadow.min_count, 'mirrored answer')} needed{since}")
    num_answered = shadow.num - shadow.num_failed - shadow.num_timed_out
    rows = [
        ("failed", "", shadow.num_failed),
        ("timed out", "", shadow.num_timed_out),
        ("flagged", shadow.num_live_flagged, f"{shadow.num_flagged} of {num_answered}"),
        ("mean seconds", number(shadow.live_seconds), number(shadow.seconds)),
    ]
    show_table([Column(""), Column("LIVE", align="right"), Column("NEW", align="right")], rows, indent=2)


def _watch(evidence: Sequence[dict[str, Any]]) -> None:
    """What live answers showed when the watch ended, beside those of the version before."""
    heading("Watch")
    first = evidence[0]
    rows = [
        (
            each["signal"], number(each["baseline_mean"]), each["baseline_n"],
            number(each["live_mean"]), each["live_n"],
            "rolled back" if each["rolls_back"] else "no drop shown",
        )
        for each in evidence
    ]  # fmt: skip
    columns = [Column("SIGNAL", "fold"), Column(first["baseline_version"], align="right"),
               Column("N", align="right"), Column(first["live_version"], align="right"),
               Column("N", align="right"), Column("VERDICT")]  # fmt: skip
    show_table(columns, rows, indent=2)
    for each in evidence:
        if each["rolls_back"]:
            say(f"  {each['text']}")


def show_metrics(points: Sequence[dict[str, Any]], num_rows: int) -> None:
    """A curve of the loss, and some of the points, always with the first and the last; --json has every value."""
    steps = [point for point in points if point["type"] == "metrics"]
    losses = [float(point["loss"]) for point in steps if "loss" in point]
    if losses:
        say(f"{several(len(steps), 'step')}, loss {number(losses[0])} {sparkline(losses)} {number(losses[-1])}")
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for point in points:  # a step and its validation are one row
        values = {name: value for name, value in point.items() if name not in ("attempt", "type", "step")}
        merged.setdefault((point["attempt"], point["step"]), {}).update(values)
    keys, last = list(merged), len(merged) - 1
    kept = keys if len(keys) <= num_rows else [keys[i * last // (num_rows - 1)] for i in range(num_rows)]
    names = _that_fit(list(dict.fromkeys(name for values in merged.values() for name in values)))
    columns = [Column("ATTEMPT"), Column("STEP", align="right"), *(Column(n.upper(), align="right") for n in names)]
    rows = [(*key, *(number(merged[key].get(name)) for name in names)) for key in kept]
    show_table(columns, rows, empty="No metrics yet.")


def _that_fit(names: Sequence[str]) -> list[str]:
    """The metrics that have room beside each other, the loss first; a number cut in half would be a lie."""
    first = [name for name in names if "loss" in name]
    room, kept = stdout().width - _KEY_WIDTH, list[str]()
    for name in [*first, *(name for name in names if name not in first)]:
        room -= max(len(name), _NUMBER_WIDTH) + 2
        if room >= 0:
            kept.append(name)
    return [name for name in names if name in kept]


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line; what is not a number shows as ×."""
    count = min(len(values), _SPARK_WIDTH)
    chosen = [values[i * len(values) // count] for i in range(count)]
    finite = [value for value in chosen if abs(value) < float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] if abs(v) < float("inf") else "×" for v in chosen)
