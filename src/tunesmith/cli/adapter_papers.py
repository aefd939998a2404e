"""`tunesmith adapter provenance` and `adapter card`: papers about one version, for people and machines elsewhere."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from tunesmith.cli.adapter import Name
from tunesmith.cli.output import print_document, print_id
from tunesmith.cli.parser import open_client

Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it there, else to stdout.")]
PROVENANCE_EXAMPLE = "Example: tunesmith adapter provenance support@v3 --out provenance.json"
CARD_EXAMPLE = "Example: tunesmith adapter card support@v3 --out README.md"


def provenance(ctx: typer.Context, adapter: Name, out: Out = None) -> None:
    """Which bytes a version is, and what it was made from, in the shape of in-toto.

    JSON, not signed. The files of the version are hashed again first.
    """
    with open_client(ctx) as client:
        statement = client.lineage.provenance(adapter)
    _hand_over(json_module.dumps(statement, indent=2, ensure_ascii=False, allow_nan=False) + "\n", out)


def card(ctx: typer.Context, adapter: Name, out: Out = None) -> None:
    """A model card in Markdown: purpose, base, data, training, evaluation with intervals, limits.

    Holds counts and names, never what was said.
    """
    with open_client(ctx) as client:
        text = client.lineage.card(adapter)
    _hand_over(text, out)


def _hand_over(text: str, out: Path | None) -> None:
    from tunesmith.core.files import write_atomic

    if out is None:
        print_document(text)
        return
    write_atomic(out, text)
    print_id(str(out))
