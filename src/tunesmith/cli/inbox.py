"""`tunesmith inbox`: what waits for a person, and the command that settles it."""

from __future__ import annotations

import typer

from tunesmith.cli.output import age, first_line, print_json, say, show_fields
from tunesmith.cli.parser import Json, open_client

EXAMPLE = "Example: tunesmith inbox --json"


def inbox(ctx: typer.Context, json: Json = False) -> None:
    """What waits for a person, the oldest first, each with what settles it.

    Held and failed runs, parked tasks, targets in trouble, suspects, erasures, quarantined rows.
    """
    with open_client(ctx) as client:
        items = client.system.inbox()
    if json:
        print_json(items)
        return
    if not items:
        say("Nothing waits for you.")
    for item in items:
        say(f"{item.id}  {item.kind} of {item.profile}, {age(item.since)}")
        show_fields(
            [
                ("why", first_line(item.reason)),
                ("newest", ", ".join(item.newest)),
                ("error", first_line(item.error)),
                ("do", item.what_to_do),
            ]
        )
