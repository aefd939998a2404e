"""`tunesmith dataset outliers`: what the base finds far more surprising than the rest of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.dataset import Id
from tunesmith.cli.output import Column, coloured, number, print_id, print_json, say, several, show_fields, show_table
from tunesmith.cli.parser import Json, Set, open_client
from tunesmith.cli.progress import scoring

if TYPE_CHECKING:
    from tunesmith.evaluation.outliers import OutlierReport

OUTLIERS_EXAMPLE = "Example: tunesmith dataset outliers ds-4t9k --quarantine"
_SHOWN = 20


def outliers(
    ctx: typer.Context,
    dataset_id: Id,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Make a new dataset in which they are quarantined.")
    ] = False,
    keep_aside: Annotated[bool, typer.Option("--keep-aside", hidden=True)] = False,  # the former name of --quarantine
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="Z", help="From how many spreads above the median.")
    ] = 6.0,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.")] = _SHOWN,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Examples that the base finds far more surprising than the rest: garbled, foreign, or somebody else's answer.

    Each is scored under the profile's base, on the device that training would use. The dataset stays as it is.
    """
    with open_client(ctx) as client, scoring() as on_progress:
        found = client.datasets.outliers(
            dataset_id,
            threshold=threshold,
            quarantine=quarantine or keep_aside,
            limit=limit,
            overrides=overrides or (),
            on_progress=on_progress,
        )
    if json:
        print_json(found)
        return
    _show(found)
    if found.made is not None:
        say(coloured("ok", f"✓ {several(found.num_outliers, 'example')} quarantined in a new dataset; to list them:"))
        say(f"  tunesmith dataset quarantine {found.made.id}")
        print_id(found.made.id)
    elif found.num_outliers:
        say("Nothing was changed: --quarantine makes a dataset without them.")


def _show(found: OutlierReport) -> None:
    is_fine = found.fit == "judged" and not found.num_outliers
    say(coloured("ok" if is_fine else "warning", found.reason))
    show_fields(
        [
            (
                "usual loss",
                None if found.median is None else f"{number(found.median)} per token, spread {number(found.spread)}",
            ),
            (
                "outlier above",
                None if found.limit is None else f"{number(found.limit)} (threshold {found.threshold:g})",
            ),
            ("not scored", _unscored(found)),
        ]
    )
    columns = [
        Column("LOSS", align="right"),
        Column("SPLIT"),
        Column("FROM", "fold"),
        Column("QUESTION", "cut"),
        Column("ANSWER", "cut"),
    ]
    rows = [
        (number(each.loss), each.split, f"{each.source}:{each.line}", each.question, each.answer)
        for each in found.outliers
    ]
    if rows:
        show_table(columns, rows, indent=2)
    if found.num_outliers > len(rows):
        say(f"… and {found.num_outliers - len(rows)} more; --limit N shows more")


def _unscored(found: OutlierReport) -> str | None:
    if not found.num_unscored:
        return None
    why = "answers to avoid" if found.unscored_because is None else f"the first because: {found.unscored_because}"
    return f"{found.num_unscored}, {why}"
