"""`tunesmith run`: submit, look at, and steer runs."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    MAX_LISTED,
    Column,
    age,
    clean,
    coloured,
    duration,
    first_line,
    note_more,
    print_id,
    print_json,
    say,
    show_table,
)
from tunesmith.cli.parser import Json, OfProfile, Profile, Set, command_group, open_client
from tunesmith.cli.progress import preparing, watch

if TYPE_CHECKING:
    from tunesmith.client import Client
    from tunesmith.client.views import RequestResult, RunView, SubmittedView
    from tunesmith.orchestration.dry_run import DryRun

commands = command_group("Make an adapter version: queue, train, judge, deploy.")
Id = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or its beginning.", show_default=False)]

_GOOD_ENDS = frozenset({"deployed", "completed", "validated", "held", "paused"})


class Priority(enum.StrEnum):
    """What --priority takes; importing the real one would slow `--help`."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Start(enum.StrEnum):
    LIVE = "live"
    BASE = "base"


class StartAgain(enum.StrEnum):
    SAME = "same"
    LIVE = "live"
    BASE = "base"


@commands.command()
def submit(  # noqa: PLR0913 - the options of one command
    ctx: typer.Context,
    *,
    profile: Profile,
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA", help="A dataset id, or files of examples; none: assemble.", show_default=False),
    ] = None,
    overrides: Set = None,
    priority: Annotated[Priority, typer.Option(help="Which place in the queue.")] = Priority.NORMAL,
    start: Annotated[Start, typer.Option(help="From the live adapter, or from the bare base.")] = Start.LIVE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything now; queue, make and reserve nothing.")
    ] = False,
    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Idempotency key: the same again returns the same run.")
    ] = None,
    follow: Annotated[bool, typer.Option("--watch", help="Wait for its end; exit 1 unless it went well.")] = False,
) -> int:
    """Queue a run on a dataset or on files.

    Without DATA, a dataset is assembled from the profile's experiences first (see `dataset assemble`).
    The run is durable once its id is printed, on the last line.
    """
    source = None if not data else data[0] if len(data) == 1 else [Path(file) for file in data]
    with open_client(ctx) as client:
        if dry_run:
            with preparing() as on_progress:
                found = client.profiles.dry_run(
                    profile, source, overrides=overrides or (), start=start.value, on_progress=on_progress
                )
            _found_nothing_wrong(found)
            return 0
        with preparing() as on_progress:
            made = client.runs.submit(
                profile,
                source,
                overrides=overrides or (),
                priority=priority.value,
                start=start.value,
                idempotency_key=key,
                on_progress=on_progress,
            )
        return _submitted(client, made, follow=follow)


@commands.command("list")
def list_runs(
    ctx: typer.Context,
    profile: OfProfile = None,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only runs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="How many at most.")] = 50,
    json: Json = False,
) -> None:
    """Every run, the newest first."""
    with open_client(ctx) as client:
        runs, num = client.runs.page(profile=profile, state=state, limit=limit)
    if json:
        print_json(runs)
        return
    rows = [
        (r.id, r.profile, coloured(r.state), age(r.created_at), _version(r), first_line(r.waits_for or r.reason))
        for r in runs
    ]
    columns = [Column("ID"), Column("PROFILE", "fold"), Column("STATE"), Column("AGE"), Column("ADAPTER", "fold"),
               Column("WHY", "cut")]  # fmt: skip
    is_filtered = profile is not None or state is not None
    show_table(columns, rows, empty="No such run." if is_filtered else "No run yet: tunesmith run submit PROFILE DATA…")
    note_more(len(runs), num)


@commands.command()
def show(ctx: typer.Context, run_id: Id, json: Json = False) -> None:
    """Everything about one run on a page."""
    from tunesmith.cli.run_page import show_run

    with open_client(ctx) as client:
        detail = client.runs.show(run_id)
    if json:
        print_json(detail)
    else:
        show_run(detail)


@commands.command("watch")
def watch_run(ctx: typer.Context, run_id: Id) -> int:
    """Follow a run until it ends or waits for a person.

    Exit code 0 if it is deployed, completed, validated, held or paused; else 1.
    """
    with open_client(ctx) as client:
        return _watched(client, client.runs.get(run_id).id)


@commands.command()
def logs(
    ctx: typer.Context,
    run_id: Id,
    lines: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of the last lines.")] = 200,
) -> None:
    """The logs of its programs, the newest attempt last."""
    with open_client(ctx) as client:
        text = client.runs.logs(run_id)
    for line in text.replace("\r", "\n").splitlines()[-lines:]:
        typer.echo(clean(line))


@commands.command()
def metrics(
    ctx: typer.Context,
    run_id: Id,
    rows: Annotated[int, typer.Option(min=2, max=10_000, help="How many rows, spread evenly over the steps.")] = 20,
    json: Json = False,
) -> None:
    """Raw values of each step and validation.

    Some of the points, spread evenly; with --json all of them.
    """
    from tunesmith.cli.run_page import show_metrics

    with open_client(ctx) as client:
        points = client.runs.metrics(run_id)
    if json:
        print_json(points)
    else:
        show_metrics(points, rows)


@commands.command()
def stop(
    ctx: typer.Context,
    run_id: Id,
    discard: Annotated[bool, typer.Option("--discard", help="Throw the result away: the run is cancelled.")] = False,
) -> None:
    """End training now and evaluate the best so far; or end a watch now and keep what is live."""
    with open_client(ctx) as client:
        _answer(client.runs.stop(run_id, discard=discard))


@commands.command()
def pause(ctx: typer.Context, run_id: Id) -> None:
    """Write a checkpoint and wait for `run resume`."""
    with open_client(ctx) as client:
        _answer(client.runs.pause(run_id))


@commands.command()
def resume(ctx: typer.Context, run_id: Id) -> None:
    """Queue a paused run again, from its last checkpoint."""
    with open_client(ctx) as client:
        _answer(client.runs.resume(run_id))


@commands.command()
def skip(ctx: typer.Context, run_id: Id) -> None:
    """Take a queued run out of the queue."""
    with open_client(ctx) as client:
        _answer(client.runs.skip(run_id))


@commands.command()
def cancel(ctx: typer.Context, run_id: Id) -> None:
    """End a run without a result; its data is released."""
    with open_client(ctx) as client:
        _answer(client.runs.cancel(run_id))


@commands.command()
def retry(
    ctx: typer.Context,
    run_id: Id,
    overrides: Set = None,
    priority: Annotated[
        Priority | None, typer.Option(help="Which place in the queue; unset: as before.", show_default=False)
    ] = None,
    start: Annotated[
        StartAgain, typer.Option(help="From what it started from, the live adapter, or the bare base.")
    ] = StartAgain.SAME,
    follow: Annotated[bool, typer.Option("--watch", help="Wait for its end; exit 1 unless it went well.")] = False,
) -> int:
    """Open a new run like a finished one.

    On the same dataset and start, with everything the old one was told: --set, environment, campaign.
    A --set given now comes on top. The profile's file is read again, so that what was fixed there counts.
    """
    with open_client(ctx) as client:
        made = client.runs.retry(
            run_id,
            overrides=overrides or (),
            priority=None if priority is None else priority.value,
            start=start.value,
        )
        return _submitted(client, made, follow=follow)


def _found_nothing_wrong(found: DryRun) -> None:
    counts = found.counts
    data = f"dataset {found.dataset_id}" if found.dataset_id else "a dataset that would be made"
    say(
        f"nothing wrong: {found.trainer} would train {counts['train']} examples of {data} by {found.method}, "
        f"validate on {counts['validation']} and be judged on {counts['heldout']}, and on earlier ones"
    )
    say(f"{_guess(found.estimate.seconds)} of training ({found.estimate.basis})")
    if found.memory:
        say(f"memory: {found.memory}")
    for warning in found.warnings:
        say(f"warning: {warning}")
    say("Nothing was queued, made or reserved.")


def _guess(seconds: float) -> str:
    return "under a second" if seconds < 1 else f"about {duration(seconds)}"


def _version(run: RunView) -> str:
    """Its version, and what became of that, where the state of the run does not say it already."""
    said = {"deployed": "live", "watching": "live", "rejected": "rejected", "rolled_back": "rolled_back"}
    if run.adapter is None or run.adapter_state in (said.get(run.state), "candidate"):
        return run.adapter or ""
    return f"{run.adapter} ({run.adapter_state})"


def _submitted(client: Client, made: SubmittedView, *, follow: bool) -> int:
    if made.is_new:
        say(f"queued on dataset {made.dataset_id}; {_guess(made.estimate_s)} of training ({made.estimate_basis})")
        if made.memory:
            say(f"memory: {made.memory}")
        if made.warning:
            say(f"warning: {made.warning}")
    else:
        say("this key was used before: this is the run it made then")
    if follow:
        return _watched(client, made.id)
    if made.waits_for:
        say(f"waits: {made.waits_for}")
    print_id(made.id)
    return 0


def _watched(client: Client, run_id: str) -> int:
    try:
        end = watch(client, run_id)
    except KeyboardInterrupt:
        sys.stderr.write(f"the run goes on; watch again with: tunesmith run watch {run_id}\n")
        raise
    say(f"{end.state}: {first_line(end.reason)}")
    if end.what_to_do is not None:
        say(f"next: {end.what_to_do}")
    print_id(run_id)
    return 0 if end.state in _GOOD_ENDS else 1


def _answer(answer: RequestResult) -> None:
    say(f"{answer.state}: {first_line(answer.message)}" if answer.request_id else answer.message)
    print_id(answer.id)
