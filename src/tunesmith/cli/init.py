"""`tunesmith init` and `tunesmith demo`: where everybody begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli import output
from tunesmith.core.errors import UsageError, quoted


def init(
    ctx: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where, else here; made if it is missing.", show_default=False),
    ] = None,
) -> None:
    """Make a workspace in a folder.

    It holds tunesmith.yaml, profiles/ with a sample, and .tunesmith/ for the store, datasets, runs and adapters.
    """
    from tunesmith.client import Client

    with Client.init(_place(ctx, folder) or Path(".")) as client:
        root = client.workspace.root
    output.say("A workspace with an empty store. Next:")
    output.show_fields(
        [
            ("1", "copy profiles/example.yaml.sample to profiles/NAME.yaml and name your base model in it"),
            ("2", "tunesmith profile check NAME"),
            ("3", "tunesmith run submit NAME examples.jsonl, and tunesmith worker"),
        ]
    )
    output.print_id(str(root))


def _place(ctx: typer.Context, folder: Path | None) -> Path | None:
    """The folder that was named, as the argument or with --workspace."""
    said = ctx.find_root().obj
    if said is not None and folder is not None and Path(said) != folder:
        raise UsageError(f"--workspace {quoted(said)} and {quoted(str(folder))} name two folders; give one of them")
    return folder if said is None else Path(said)


def demo(
    ctx: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The demo's workspace; else tunesmith-demo.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less training: a minute instead of a few.")] = False,
) -> int:
    """The whole loop once, for real, on a small model.

    Trains, judges and deploys an adapter, and writes a report. Needs no GPU.
    """
    from rich.console import Console

    from tunesmith.demo.story import run_demo

    return run_demo(
        _place(ctx, folder) or Path("tunesmith-demo"), quick=quick, console=Console(highlight=False, emoji=False)
    )
