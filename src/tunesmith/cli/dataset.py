"""`tunesmith dataset`: prepare, assemble, list, show, verify, diff, export."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from tunesmith.cli.dataset_card import show_card, show_mix
from tunesmith.cli.output import Column, age, coloured, heading, print_id, print_json, say, show_fields, show_table
from tunesmith.cli.parser import Json, OfProfile, Profile, Set, command_group, open_client
from tunesmith.cli.progress import preparing
from tunesmith.core.errors import Refused

commands = command_group("Examples with splits and a fingerprint, never changed.")
Id = Annotated[str, typer.Argument(metavar="DATASET", help="Id of a dataset, or its beginning.", show_default=False)]


@commands.command()
def prepare(  # noqa: PLR0913 - the options of one command
    ctx: typer.Context,
    *,
    profile: Profile,
    files: Annotated[
        list[str], typer.Argument(metavar="FILES", help="Files, or patterns like 'data/*.jsonl'.", show_default=False)
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help="Read the files as this format only; see docs/data.md.")
    ] = "auto",
    windows: Annotated[
        str, typer.Option(metavar="HOW", help="Of long conversations: whole, the last answer, or all as examples.")
    ] = "whole",
    where: Annotated[
        list[str] | None, typer.Option("--where", metavar="FIELD=VALUE", help="Only objects with this value, or !=.")
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option("--max-examples", min=1, metavar="N", help="Stop after so many examples.")
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Turn files into a dataset: JSONL, JSON arrays, Parquet; packed with gzip or zstd.

    Each line is validated and split by the hash of its prompt; a bad line is left out with its reason.
    """
    with open_client(ctx) as client, preparing() as on_progress:
        dataset, report = client.datasets.prepare(
            profile,
            files,
            overrides=overrides or (),
            on_progress=on_progress,
            format=form,
            windows=windows,
            where=where or (),
            max_examples=max_examples,
        )
    if json:
        print_json({"dataset": dataset, "report": report})
        return
    show_card(dataset, report)
    print_id(dataset.id)


class Kind(enum.StrEnum):
    """What --kind takes; importing the real one would slow `--help`."""

    AUTO = "auto"
    SFT = "sft"
    PREFERENCE = "preference"


@commands.command()
def assemble(  # noqa: PLR0913 - the options of one command
    ctx: typer.Context,
    *,
    profile: Profile,
    task_type: Annotated[
        list[str] | None, typer.Option("--task-type", metavar="NAME", help="Only experiences of this task type.")
    ] = None,
    kind: Annotated[
        Kind, typer.Option(help="Answers, or pairs of a correction and what it corrects; auto: as recipe.method.")
    ] = Kind.AUTO,
    max_examples: Annotated[
        int | None, typer.Option("--max-examples", metavar="N", help="Maximum number of examples to train on.")
    ] = None,
    min_new: Annotated[
        int | None, typer.Option("--min-new", metavar="N", help="Minimum number of new examples.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed for the selection of experiences.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be chosen; reserve nothing.")] = False,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Make a dataset from what the profile's model did: good answers, corrected ones, and some learnt before.

    It reserves them for 24 hours, or until the last run on it has ended. Example:
    tunesmith dataset assemble support --task-type order --max-examples 100 --min-new 20
    """
    with open_client(ctx) as client:
        verb = client.datasets.preview_assembly if dry_run else client.datasets.assemble
        made = verb(
            profile,
            kind=kind.value,
            overrides=overrides or (),
            task_types=task_type,
            max_examples=max_examples,
            min_new=min_new,
            seed=seed,
        )
    if not isinstance(made, tuple):
        if json:
            print_json(made)
        else:
            show_mix(made)
        if made.refusal is not None:
            raise Refused(made.refusal)
        if not json:
            say("Nothing was reserved: without --dry-run, a dataset is made of what the screens let through of these.")
        return
    dataset, report = made
    if json:
        print_json({"dataset": dataset, "report": report})
        return
    show_card(dataset, report)
    print_id(dataset.id)


@commands.command("list")
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


@commands.command()
def show(ctx: typer.Context, dataset_id: Id, json: Json = False) -> None:
    """What went in, and what did not and why."""
    with open_client(ctx) as client:
        dataset, report = client.datasets.show(dataset_id)
    if json:
        print_json({"dataset": dataset, "report": report})
        return
    show_card(dataset, report)


@commands.command()
def verify(ctx: typer.Context, dataset_id: Id, json: Json = False) -> None:
    """Recompute the fingerprint from the bytes on disk."""
    with open_client(ctx) as client:
        dataset = client.datasets.verify(dataset_id)
    if json:
        print_json({"id": dataset.id, "fingerprint": dataset.fingerprint, "is_sound": True})
        return
    say(coloured("ok", f"✓ every byte is what the fingerprint says: {dataset.fingerprint}"))
    print_id(dataset.id)


@commands.command()
def diff(
    ctx: typer.Context,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="Id of a dataset.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Id of another one.", show_default=False)],
    json: Json = False,
) -> None:
    """What the second dataset has more, has less, and answers differently."""
    with open_client(ctx) as client:
        found = client.datasets.diff(before, after)
    if json:
        print_json(found)
        return
    moved = f", {found.num_moved} of them in another split" if found.num_moved else ""
    show_fields(
        [
            ("same", f"{found.num_same}{moved}"),
            ("added", found.num_added),
            ("removed", found.num_removed),
            ("changed", f"{found.num_changed} prompts with other answers"),
        ],
        indent=0,
    )
    columns = [Column("ID"), Column("SPLIT"), Column("QUESTION", "cut"), Column("ANSWER", "cut")]
    for name, examples in (("Added", found.added), ("Removed", found.removed)):
        if examples:
            heading(name)
            show_table(columns, [(e.id[:12], e.split, e.question, e.answer) for e in examples], indent=2)
    if found.changed:
        heading("Changed")
        rows = [(prompt.question, prompt.before, prompt.after) for prompt in found.changed]
        show_table([Column("QUESTION", "cut"), Column("BEFORE", "cut"), Column("AFTER", "cut")], rows, indent=2)


@commands.command()
def export(
    ctx: typer.Context,
    *,
    dataset_id: Id,
    target: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it.", show_default=False)],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="jsonl or parquet; the file's name tells unless given."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only train, validation or heldout; all unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    json: Json = False,
) -> None:
    """Write the examples for other tools: JSONL as OpenAI's fine-tuning reads it, or Parquet."""
    with open_client(ctx) as client:
        written = client.datasets.export(dataset_id, target, form=form, split=split, force=force)
    if json:
        print_json(written)
        return
    say(coloured("ok", f"✓ {written.num_examples} examples, {written.num_bytes} bytes"))
    print_id(str(written.path))
