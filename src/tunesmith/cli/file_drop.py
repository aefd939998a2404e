"""`tunesmith campaign drop`: answer requests for rounds that another program writes into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import note, print_id, say
from tunesmith.cli.parser import open_client
from tunesmith.core.errors import UsageError
from tunesmith.core.files import write_atomic

if TYPE_CHECKING:
    from tunesmith.orchestration.file_drop.rules import Answer
    from tunesmith.orchestration.file_drop.units import Units

Folder = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Folder that the other program shares with us.", show_default=False)
]
Once = Annotated[bool, typer.Option("--once", help="Do what can be done now and end; else follow runs to their end.")]
Campaign = Annotated[
    str | None,
    typer.Option("--campaign", metavar="NAME", help="The only campaign that may be asked for, and the default."),
]
AllowUser = Annotated[
    list[str] | None,
    typer.Option("--allow-user", metavar="USER", help="Also read files of this user; else ours and the folder's."),
]
Keep = Annotated[int, typer.Option("--keep", help="How many archived requests stay.", min=1)]
PrintUnits = Annotated[bool, typer.Option("--print-units", help="Print a systemd path unit and its service, and end.")]
WriteUnits = Annotated[
    str | None, typer.Option("--write-units", metavar="DIR", help="Write both into a folder of units, and end.")
]

DROP_EXAMPLE = "Example: tunesmith campaign drop /srv/shared/rounds --campaign helpdesk"


def drop(
    ctx: typer.Context,
    folder: Folder,
    once: Once = False,
    campaign: Campaign = None,
    allow_user: AllowUser = None,
    keep: Keep = 100,
    print_units: PrintUnits = False,
    write_units: WriteUnits = None,
) -> None:
    """Answer requests for rounds (pending.json) with result.json, one at a time, until nothing is asked."""
    users = allow_user or []
    if folder == "":
        raise UsageError("the folder's name is empty; write tunesmith campaign drop FOLDER")
    with open_client(ctx, serves=True) as client:
        drops = client.file_drops
        if print_units or write_units is not None:
            units = drops.units(folder, campaign=campaign, allow_users=users, keep=keep)
            _hand_out(units, write_units)
        elif not drops.answer(folder, once=once, campaign=campaign, allow_users=users, keep=keep, tell=_told):
            note(f"another process answers the requests in {folder}")


def _hand_out(units: Units, place: str | None) -> None:
    for name, text in units.files.items():
        if place is None:
            typer.echo(f"# {name}\n{text}")  # as it is: a terminal's width must not cut a line
        else:
            write_atomic(Path(place) / name, text)
            say(f"wrote {Path(place) / name}")
    if place is not None:
        say("have systemd read and start them: systemctl --user daemon-reload")
        print_id(f"systemctl --user enable --now {units.name}.path")


def _told(answer: Answer) -> None:
    run = "" if answer.run is None else f" {answer.run}"
    say(f"request {answer.id or 'without id'}:{run} {answer.state}: {answer.reason}")
