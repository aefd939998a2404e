"""`tunesmith init` and `tunesmith demo`: where everybody begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli import output


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where; made if it is not there.")] = Path("."),
) -> None:
    """Make a workspace in a folder.

    It holds tunesmith.yaml, profiles/ with a sample, and .tunesmith/ for the store, datasets, runs and adapters.
    """
    from tunesmith.client import Client

    with Client.init(folder) as client:
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


def demo(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The demo's workspace.")] = Path("tunesmith-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Less training: a minute instead of a few.")] = False,
) -> int:
    """The whole loop once, for real, on a small model.

    Trains, judges and deploys an adapter, and writes a report. Needs no GPU.
    """
    from rich.console import Console

    from tunesmith.demo.story import run_demo

    return run_demo(folder, quick=quick, console=Console(highlight=False, emoji=False))
