"""`tunesmith gate`: try a policy on past runs before it decides about new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    MAX_LISTED,
    Column,
    coloured,
    first_line,
    note_more,
    print_json,
    say,
    several,
    show_table,
)
from tunesmith.cli.parser import Json, Profile, Set, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.client.gate import Replay, ReplayedRun

commands = command_group("Try a gate policy on past runs.")


@commands.callback()
def _group() -> None:
    """Keeps `replay` a word of its own while it is the only command."""


@commands.command()
def replay(
    ctx: typer.Context,
    profile: Profile,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="FILE", help="A YAML file with a gate section.")
    ] = None,
    overrides: Set = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="How many runs at most, the newest.")] = 100,
    json: Json = False,
) -> None:
    """Judge the stored reports of past runs by another policy.

    The policy is the profile's gate as it is now, with --policy and --set on top. Changes nothing.
    """
    with open_client(ctx) as client:
        found = client.gate.replay(profile, policy, overrides=overrides or (), limit=limit)
    if json:
        print_json(found)
        return
    _show(found)


def _show(found: Replay) -> None:
    rows = [
        (run.run_id, run.version, run.then and coloured(run.then), run.now and coloured(run.now), _why(run))
        for run in found.runs
    ]
    columns = [Column("RUN"), Column("VERSION", "fold"), Column("THEN"), Column("NEW POLICY"), Column("WHY", "fold")]
    show_table(columns, rows, empty=f"Profile {found.profile} has no run yet.")
    totals = found.totals
    if found.runs:
        say(
            f"{several(totals['replayed'], 'run')} replayed, {totals['other']} with another verdict, "
            f"{totals['not_replayable']} cannot be replayed; nothing was changed"
        )
    note_more(len(found.runs), len(found.runs) + found.num_older)


def _why(run: ReplayedRun) -> str:
    if run.problem is not None:
        return f"cannot be replayed: {run.problem}"
    if not run.is_other:
        return "same"
    return "; ".join(run.changed) or first_line("; ".join(run.reasons))
