"""`tunesmith config`: where each setting comes from."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import Column, clean, print_json, show_table
from tunesmith.cli.parser import Json, Profile, Set, a_noun, open_client

if TYPE_CHECKING:
    from rich.text import Text

    from tunesmith.profiles.layers import Origin

_SHORT = 28  # beside the longest key of an 80-column terminal, this leaves room for values

verbs = a_noun("What holds, and who said it.")


@verbs.command()
def explain(
    ctx: typer.Context,
    profile: Profile,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key or a section, e.g. recipe.lr.")] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Every key, its value and its origin.

    Precedence: schema default < profile < campaign < tunesmith.yaml < environment < --set.
    """
    with open_client(ctx) as client:
        rows = client.profiles.explain(profile, key, overrides or ())
    if json:
        print_json([{"key": r.key, "value": r.value, "origin": r.origin, "doc": r.doc} for r in rows])
        return
    is_short = all(len(str(r.origin)) <= _SHORT for r in rows)
    origin = Column("ORIGIN", "whole" if is_short else "fold")
    columns = [Column("KEY"), Column("VALUE", "fold"), origin, Column("WHAT IT IS FOR", "fold")]
    shown = columns if len(rows) == 1 else columns[:3]
    show_table(shown, [(r.key, _shown(r.value), _origin(r.origin), r.doc)[: len(shown)] for r in rows])


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)


def _origin(origin: Origin) -> Text:
    """What nobody said is dim, so that what somebody said stands out."""
    from rich.text import Text

    return Text(clean(str(origin)), style="dim" if origin.layer == "default" else "")
