"""Progress: bars on a terminal, a line per change without one. Always on stderr, so that stdout keeps its meaning."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunesmith.cli.output import clean, duration, first_line, number, stderr

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tunesmith.client import Client
    from tunesmith.client.attempt_progress import AttemptProgress
    from tunesmith.client.views import ProgressView

_LINE_EVERY_S = 10.0
_QUIET_LINE_EVERY_S = 300.0  # where nothing moves


@contextmanager
def preparing() -> Iterator[Callable[[int, int, int], None] | None]:
    """A bar over the bytes of the input files; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("preparing"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[rows]:,} rows"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=None, rows=0)

        def on_progress(done: int, total: int, num_rows: int) -> None:
            bar.update(task, completed=done, total=total, rows=num_rows)

        yield on_progress


@contextmanager
def fetching(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over the bytes of a model that is fetched, once the first ones have come; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
        tasks: list[TaskID] = []

        def on_progress(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task(escape(clean(f"fetching {what}")), total=total))
            bar.update(tasks[0], completed=done, total=total)

        yield on_progress


@contextmanager
def scoring() -> Iterator[Callable[[int, int], None] | None]:
    """A bar over the examples that a model scores; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("loading the base", total=None)

        def on_progress(done: int, total: int) -> None:
            bar.update(task, description="scoring", completed=done, total=total)

        yield on_progress


def watch(client: Client, run_id: str) -> ProgressView:
    """Follow a run until it has ended or waits for a person; the last thing seen."""
    return _watch_with_bar(client, run_id) if sys.stderr.isatty() else _watch_by_lines(client, run_id)


def _watch_with_bar(client: Client, run_id: str) -> ProgressView:
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, TimeElapsedColumn(), console=stderr(), transient=True) as bars:
        task = bars.add_task("", total=None, note="")
        for seen in client.runs.watch(run_id):
            _draw(bars, task, seen)
    return seen


def _draw(bars: Progress, task: int, seen: ProgressView) -> None:
    from rich.markup import escape
    from rich.progress import TaskID

    bars.update(
        TaskID(task),
        description=escape(_where(seen)),
        completed=seen.done,
        total=seen.total or None,
        note=escape(_note(seen)),
    )


def _watch_by_lines(client: Client, run_id: str) -> ProgressView:
    shown, shown_at = "", 0.0
    for seen in client.runs.watch(run_id):
        # how long until the next try is another number at every look, and no news
        waits = re.sub(r"\d+ s\b", "", seen.waits_for or "")
        where, now = f"{_where(seen)} {waits}", time.monotonic()
        if where != shown or now - shown_at > (_LINE_EVERY_S if seen.phase else _QUIET_LINE_EVERY_S):
            shown, shown_at = where, now
            sys.stderr.write(f"{_where(seen)}  {_note(seen)}".rstrip() + "\n")
    return seen


def _where(seen: ProgressView) -> str:
    return f"{seen.state} · {seen.phase}" if seen.phase else str(seen.state)


def _note(seen: ProgressView) -> str:
    """Steps and loss while there are some, else why it waits or why it ended."""
    if not seen.phase:
        return clean(first_line(seen.waits_for or seen.reason))
    return "  ".join(progress_parts(seen))


def progress_parts(seen: ProgressView | AttemptProgress) -> list[str]:
    """Step, loss, pace and time left, as far as they are known."""
    metrics = seen.metrics or {}
    parts = [f"{seen.unit} {seen.done} of {seen.total}"] if seen.total else []
    if "loss" in metrics:
        parts.append(f"loss {number(metrics['loss'])}")
    if "tokens_per_s" in metrics:
        parts.append(f"{number(metrics['tokens_per_s'])} tokens/s")
    return parts if seen.left_s is None else [*parts, f"about {duration(seen.left_s)} left"]
