"""`tunesmith experience forget`: what it would touch, then gone for good."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.output import Column, coloured, heading, print_id, print_json, say, several, show_table
from tunesmith.cli.parser import Json, OfProfile, open_client
from tunesmith.core.errors import Refused, TunesmithError

if TYPE_CHECKING:
    from tunesmith.client.experiences import ForgetView

FORGET_EXAMPLE = 'Example: tunesmith experience forget --profile support --session s1 --reason "asked by the person"'


def forget(  # noqa: PLR0913 - the options of one command
    ctx: typer.Context,
    *,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="EXPERIENCE", help="Ids of experiences, or their beginnings.", show_default=False),
    ] = None,
    profile: OfProfile = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="All of this session of the profile.")] = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="All from this source of the profile.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="The one with this key in the profile.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; kept in the history.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it would touch.")] = False,
    stop_runs: Annotated[
        bool, typer.Option("--stop-runs", help="Cancel the runs that are only judged on it, too.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove what was said, everywhere, for good; a tombstone stays.

    Unfinished runs that learn from it are ended; what they made never goes live.
    Datasets that hold it are rewritten, now or when the runs that read them have ended.
    """
    given = {"session": session, "source": source, "key": key}
    by: Any = {name: value for name, value in given.items() if value is not None}
    with open_client(ctx) as client:
        touched = client.experiences.preview_forget(ids or [], profile=profile, **by)
        if dry_run:
            _tell(touched, json)
            return
        if not yes:
            _ask(touched)
        why = {} if reason is None else {"reason": reason}
        done = client.experiences.forget(ids or [], profile=profile, stop_runs=stop_runs, **why, **by)
    if json:
        print_json(done)
    else:
        if yes:
            _tell(done, False)
        _show_outcomes(done, stop_runs)
    _fail_where_files_still_hold_it(done)
    if not json:
        print_id(done.ids[-1])


def _ask(touched: ForgetView) -> None:
    if not sys.stdin.isatty():
        raise Refused(
            f"nothing was forgotten: {several(len(touched.ids), 'experience')} would be, and nobody is here to ask; "
            "add --yes, or look first with --dry-run"
        )
    _tell(touched, False)
    if not typer.confirm(f"Forget {several(len(touched.ids), 'experience')} for good?"):
        raise Refused("nothing was forgotten")


def _tell(touched: ForgetView, as_json: bool) -> None:
    if as_json:
        print_json(touched)
        return
    states = ", ".join(f"{num} {state}" for state, num in touched.states.items())
    say(f"{several(len(touched.ids), 'experience')}: {states}")
    if touched.datasets:
        heading("Datasets that hold it, and are rewritten")
        rows = [
            (each.id, *(each.splits.get(name, 0) for name in ("train", "validation", "heldout")), ", ".join(each.runs))
            for each in touched.datasets
        ]
        counts = [Column(name, align="right") for name in ("TRAIN", "VALID", "HELD OUT")]
        show_table([Column("ID"), *counts, Column("READ BY", "fold")], rows, indent=2)
    if touched.ends and not touched.outcomes:
        say(coloured("warning", f"! ends {', '.join(touched.ends)}, which would learn from it"))
    if touched.adapters:
        heading("Adapters")
        columns = [Column("NAME"), Column("STATE"), Column("HOW", "fold"), Column("DO", "fold")]
        show_table(columns, [(a.name, coloured(a.state), a.how, a.what_to_do) for a in touched.adapters], indent=2)
    if touched.num_going_on:
        others = several(touched.num_going_on, "other experience")
        say(coloured("warning", f"! {others} of the same session may repeat it; --session forgets all of a session"))


def _fail_where_files_still_hold_it(done: ForgetView) -> None:
    failed = [outcome for outcome in done.outcomes if outcome.state == "failed"]
    if failed:
        raise TunesmithError(
            f"it is forgotten in the store, but still in the files of {', '.join(each.dataset_id for each in failed)}: "
            f"{failed[0].why}; fix that and forget {done.ids[-1]} again, or let a worker try again"
        )


def _show_outcomes(done: ForgetView, stop_runs: bool) -> None:
    for outcome in done.outcomes:
        mark = {"done": "✓", "waits": "…", "failed": "!"}[outcome.state]
        style = {"done": "ok", "waits": "warning", "failed": "broken"}[outcome.state]
        say(coloured(style, f"{mark} dataset {outcome.dataset_id}: {outcome.state}, {outcome.why}"))
    for run_id in done.ends:
        say(f"  run {run_id} was ended; tunesmith run retry {run_id} trains on what is left")
    if any(outcome.state == "waits" for outcome in done.outcomes):
        stopping = "they were asked to stop" if stop_runs else "--stop-runs cancels them"
        say(f"  a worker finishes it when they have ended; {stopping}")
    if done.store_waits:
        say(coloured("warning", f"! the store's file may still hold copies in unused corners: {done.store_waits}"))
        say("  a worker rewrites the file at a sweep; or stop all that use it, and run VACUUM on it with sqlite3")
    known = len(done.ids) - done.num_new
    say(coloured("ok", f"✓ {several(done.num_new, 'experience')} forgotten{f', {known} before' if known else ''}"))
