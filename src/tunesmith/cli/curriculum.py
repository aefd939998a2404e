"""`tunesmith curriculum`: run, show, retry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    heading,
    print_id,
    print_json,
    say,
    show_fields,
    show_table,
    stderr,
)
from tunesmith.cli.parser import Json, Profile, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.client.curriculum import CurriculumView, CycleView
    from tunesmith.curriculum.cycle import EntryResult

commands = command_group("A teacher answers the worst entries again; only what beats the student is kept.")
_COLOURS = {"accepted": "ok", "refused": "ambiguous", "failed": "warning"}


@commands.command(epilog="Example: tunesmith curriculum run support --now --max-entries 5")
def run(
    ctx: typer.Context,
    profile: Profile,
    max_entries: Annotated[
        int | None, typer.Option("--max-entries", metavar="N", help="At most so many; else the profile's number.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be asked, and the most it may cost.")
    ] = False,
    now: Annotated[
        bool,
        typer.Option("--now", help="Run now: ignore the window, the cooldown and the minimum number of entries."),
    ] = False,
    json: Json = False,
) -> None:
    """Ask the teacher about the worst entries, here and in the foreground.

    The e-stop and the budget hold always.
    """
    with open_client(ctx) as client, _asking() as on_outcome:
        cycle = client.curriculum.run(profile, max_entries=max_entries, dry_run=dry_run, now=now, on_outcome=on_outcome)
    if json:
        print_json(cycle)
        return
    _describe_cycle(cycle, dry_run)


@commands.command(epilog="Example: tunesmith curriculum show support")
def show(ctx: typer.Context, profile: Profile, json: Json = False) -> None:
    """What is due, why it waits, what is spent and left."""
    with open_client(ctx) as client:
        found = client.curriculum.show(profile)
    if json:
        print_json(found)
        return
    _describe(found)


@commands.command(epilog="Example: tunesmith curriculum retry xp-4t9kq2m7 --reason 'the teacher is a better one now'")
@commands.command("again", hidden=True)  # the former name of `retry`
def retry(
    ctx: typer.Context,
    experience_id: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIENCE", help="Id of an experience, its beginning, or PROFILE:KEY.", show_default=False
        ),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded in the event history.", show_default=False)],
) -> None:
    """Ask teachers again about an entry that was given up."""
    with open_client(ctx) as client:
        found = client.curriculum.retry(experience_id, reason=reason)
    say("its attempts start anew")
    print_id(found)


def _describe_cycle(cycle: CycleView, dry_run: bool) -> None:
    from tunesmith.curriculum.rules.cycle import money

    rows = [
        (o.experience_id, _score(o.student), _score(o.teacher), coloured(_COLOURS.get(o.decision, ""), o.decision),
         money(o.cost), o.reason)
        for o in cycle.outcomes
    ]  # fmt: skip
    cost = "MOST" if dry_run else "COST"
    columns = [Column("ENTRY"), Column("STUDENT", align="right"), Column("TEACHER", align="right"),
               Column("DECISION"), Column(cost, align="right"), Column("WHY", "cut")]  # fmt: skip
    show_table(columns, rows, empty="No entry is due: tunesmith curriculum show says why.")
    if dry_run:
        say(f"at most {money(cycle.counts['most'])} for {len(rows)} of them; nobody was asked")
        return
    parts = [f"{num} {name}" for name, num in cycle.counts.items() if num and name != "spent"]
    if parts:
        say(f"{', '.join(parts)}; spent {money(cycle.counts['spent'])}")
    if cycle.ended and cycle.id is not None:
        say(coloured("warning", f"! ended early: {cycle.ended}"))
    if cycle.id is not None:
        print_id(cycle.id)


def _describe(found: CurriculumView) -> None:
    from tunesmith.curriculum.rules.cycle import money

    due = f"{found.num_due} due" + (f", the next cycle asks about {len(found.due)}" if found.due else "")
    show_fields(
        [
            ("profile", found.profile),
            ("teacher", found.teacher or "none"),
            ("enabled", "yes" if found.enabled else "no"),
            ("window", f"{found.window} UTC"),
            ("entries", due),
            ("spent", f"{money(found.spent_month)} this month, {money(found.left_month)} left"),
            ("budget", f"{money(found.per_cycle)} a cycle, {money(found.per_month)} a month"),
            ("last cycle", _last(found)),
            ("waits for", "\n".join(found.waits_for) or "nothing: the next worker begins a cycle"),
        ],
        indent=0,
    )
    if found.problem is not None:
        say(coloured("warning", f"! no teacher can be asked: {found.problem}"))
    if found.others:
        heading("Not due")
        show_table([Column("NUMBER", align="right"), Column("WHY", "fold")],
                   [(num, why) for why, num in found.others.items()], indent=2)  # fmt: skip
    if found.due:
        heading("Due, the worst first")
        rows = [(entry.experience_id, _score(entry.student), entry.num_attempts) for entry in found.due]
        columns = [Column("ENTRY"), Column("STUDENT", align="right"), Column("ATTEMPTS", align="right")]
        show_table(columns, rows, indent=2)


def _last(found: CurriculumView) -> str:
    if found.last_began_at is None:
        return ""
    return f"{age(found.last_began_at)}: {found.last_summary or 'under way, or killed'}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@contextmanager
def _asking() -> Iterator[Callable[[int, int, EntryResult], None] | None]:
    """A bar over the entries; nothing without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("asking the teacher"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=None, note="")

        def on_outcome(done: int, total: int, outcome: EntryResult) -> None:
            bar.update(task, completed=done, total=total, note=f"{outcome.experience_id} {outcome.decision}")

        yield on_outcome
