"""`tunesmith dataset quarantine` and `release`: list quarantined rows, and release or dismiss them."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.cli.dataset import Id
from tunesmith.cli.output import coloured, print_id, print_json, say, several, show_fields
from tunesmith.cli.parser import Json, open_client
from tunesmith.core.errors import UsageError

RELEASE_EXAMPLE = 'Example: tunesmith dataset release ds-4t9k 1 7 --to fine.jsonl --reason "sample keys"'
_SHOWN = 20


def quarantine(
    ctx: typer.Context,
    dataset_id: Id,
    dismiss: Annotated[
        bool, typer.Option("--dismiss", help="Keep the remaining rows out, and take them off the inbox.")
    ] = False,
    leave: Annotated[bool, typer.Option("--leave", hidden=True)] = False,  # the former name of --dismiss
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded in the event history.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.")] = _SHOWN,
    json: Json = False,
) -> None:
    """List the quarantined rows with the reasons."""
    with open_client(ctx) as client:
        if dismiss or leave:
            print_id(client.datasets.dismiss_quarantined(dataset_id, reason=reason).id)
            return
        if reason:
            raise UsageError("--reason goes with --dismiss")
        rows = client.datasets.quarantine(dataset_id, limit=limit)
    if json:
        print_json(rows)
        return
    for row in rows:
        say(coloured("quarantined", f"{row.number}  {row.source} line {row.line}"))
        show_fields([*(("why", why) for why in row.why), ("question", row.question), ("answer", row.answer)])
    if len(rows) == limit:
        say(f"… perhaps more: these are the first {limit}; --limit N shows more")


def release(
    ctx: typer.Context,
    dataset_id: Id,
    numbers: Annotated[list[int], typer.Argument(metavar="ROW", help="Numbers of rows.", show_default=False)],
    target: Annotated[str, typer.Option("--to", metavar="FILE", help="Where to write them.")],
    reason: Annotated[str, typer.Option("--reason", help="Why they are fine, recorded in the event history.")] = "",
    json: Json = False,
) -> None:
    """Write rows that are fine after all to a file, to be prepared.

    The dataset stays as it is: make a new one of its rows and these, without the screens that stopped them.
    """
    with open_client(ctx) as client:
        released = client.datasets.release(dataset_id, numbers, target, reason=reason)
        dataset, _ = client.datasets.show(dataset_id)
    if json:
        print_json(released)
        return
    say(coloured("ok", f"✓ {several(released.num_rows, 'row')} written; now:"))
    screens = ",".join(released.screens)
    say(f"  tunesmith dataset export {dataset.id} rest.jsonl")
    say(f"  tunesmith dataset prepare {dataset.profile} rest.jsonl {target} --set 'data.screens=[{screens}]'")
    print_id(str(released.path))
