"""`tunesmith dataset`: prepare, list, show, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.grammar import Json, OfProfile, Profile, Set, a_noun, open_client
from tunesmith.cli.output import Column, age, coloured, heading, print_id, print_json, say, show_fields, show_table
from tunesmith.cli.progress import preparing

if TYPE_CHECKING:
    from tunesmith.domain.dataset import DatasetReport
    from tunesmith.store.datasets import Dataset

verbs = a_noun("Examples with splits and a fingerprint, never changed.")
Id = Annotated[str, typer.Argument(metavar="DATASET", help="Id of a dataset, or its beginning.", show_default=False)]


@verbs.command()
def prepare(
    ctx: typer.Context,
    profile: Profile,
    files: Annotated[list[str], typer.Argument(metavar="FILES", help="JSONL files.", show_default=False)],
    overrides: Set = None,
) -> None:
    """Turn JSONL files into a dataset.

    Each line is validated and split by the hash of its prompt; a bad line is left out with its reason.
    """
    with open_client(ctx) as client, preparing() as on_progress:
        dataset, report = client.datasets.prepare(profile, files, overrides=overrides or (), on_progress=on_progress)
    _describe(dataset, report)
    print_id(dataset.id)


@verbs.command("list")
def list_datasets(ctx: typer.Context, profile: OfProfile = None, json: Json = False) -> None:
    """Every dataset, the newest first."""
    with open_client(ctx) as client:
        datasets = client.datasets.list(profile)
    if json:
        print_json(datasets)
        return
    rows = [
        (d.id, d.profile, d.kind, d.counts["train"], d.counts["validation"], d.counts["heldout"], age(d.created_at))
        for d in datasets
    ]
    counts = [Column(name, align="right") for name in ("TRAIN", "VALID", "HELD OUT")]
    columns = [Column("ID"), Column("PROFILE", "fold"), Column("KIND"), *counts, Column("AGE")]
    show_table(columns, rows, empty="No dataset yet: tunesmith dataset prepare PROFILE FILES…")


@verbs.command()
def show(ctx: typer.Context, dataset_id: Id, json: Json = False) -> None:
    """What went in, and what did not and why."""
    with open_client(ctx) as client:
        dataset, report = client.datasets.show(dataset_id)
    if json:
        print_json({"dataset": dataset, "report": report})
        return
    _describe(dataset, report)


@verbs.command()
def verify(ctx: typer.Context, dataset_id: Id, json: Json = False) -> None:
    """Recompute the fingerprint from the bytes on disk."""
    with open_client(ctx) as client:
        dataset = client.datasets.verify(dataset_id)
    if json:
        print_json({"id": dataset.id, "fingerprint": dataset.fingerprint, "is_sound": True})
        return
    say(coloured("ok", f"✓ every byte is what the fingerprint says: {dataset.fingerprint}"))
    print_id(dataset.id)


def _undesirable(report: DatasetReport) -> str | None:
    """How many of the labelled answers are to be avoided; None where there are no labels."""
    nums = {split.value: num for split, num in report.num_undesirable.items()}
    if not nums:
        return None
    return f"{nums['train']} train, {nums['validation']} validation, {nums['heldout']} held out (never judged on)"


def _describe(dataset: Dataset, report: DatasetReport) -> None:
    counts = dataset.counts
    show_fields(
        [
            ("dataset", dataset.id),
            ("profile", dataset.profile),
            ("kind", dataset.kind),
            ("examples", f"{counts['train']} train, {counts['validation']} validation, {counts['heldout']} held out"),
            ("undesirable", _undesirable(report)),
            ("duplicates", report.num_duplicates or None),
            ("mean score", f"{report.mean_score:.2f}"),
            ("prepared", age(dataset.created_at)),
            ("fingerprint", dataset.fingerprint),
        ],
        indent=0,
    )
    for warning in report.warnings:
        say(coloured("warning", f"! {warning}"))
    if report.drops:
        heading("Left out")
        rows = [(drop.num, drop.reason.value, str(drop.first[0]) if drop.first else "") for drop in report.drops]
        show_table([Column("LINES", align="right"), Column("REASON"), Column("FIRST", "fold")], rows, indent=2)
    if report.quarantine:
        heading("Kept aside for review, whole, in quarantine.jsonl of the dataset's folder")
        rows = [(found.num, found.screen, str(found.first[0])) for found in report.quarantine]
        show_table([Column("ROWS", align="right"), Column("SCREEN"), Column("FIRST", "fold")], rows, indent=2)
    heading("Sources")
    files = [(f.name, f.num_lines, f.num_bytes, f.sha256[:16]) for f in report.sources]
    columns = [
        Column("FILE", "fold"),
        Column("LINES", align="right"),
        Column("BYTES", align="right"),
        Column("SHA-256"),
    ]
    show_table(columns, files, indent=2)
