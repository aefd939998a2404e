"""The card of a dataset on a terminal: what is in it, where it came from, how long it is, what was left out and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunesmith.cli.output import Column, age, coloured, heading, say, say_prose, show_fields, show_table

if TYPE_CHECKING:
    from tunesmith.datasets.listings import Dataset
    from tunesmith.datasets.report import DatasetReport, MixReport

_BAR = 32  # characters of the longest bar
_NAMES = {"train": "train", "validation": "validation", "heldout": "held out"}


def show_card(dataset: Dataset, report: DatasetReport) -> None:
    from tunesmith.profiles.sections.screens import blind_spots

    show_fields(
        [
            ("dataset", dataset.id),
            ("profile", dataset.profile),
            ("kind", dataset.kind),
            ("examples", _splits(report)),
            ("undesirable", _undesirable(report)),
            ("duplicates", report.num_duplicates or None),
            ("passed over", "; ".join(f"{num} {why}" for why, num in report.passed_over.items()) or None),
            ("read as", _reading(report)),
            ("mean score", f"{report.mean_score:.2f}"),
            ("prepared", age(dataset.created_at)),
            ("fingerprint", dataset.fingerprint),
            ("before", _earlier(report)),
        ],
        indent=0,
    )
    for warning in report.warnings:
        say(coloured("warning", f"! {warning}"))
    if report.mix is not None:
        show_mix(report.mix)
    _show_left_out(report)
    say_prose(blind_spots(report.options.detectors))
    _show_lengths(report)
    _show_sources(report)


def show_mix(mix: MixReport) -> None:
    """What a dataset was assembled from, which rules were needed, and why other experiences are not in."""
    from tunesmith.experience.rules.mix import FIRST_ROUND

    heading("Mix of what is trained")
    policy = mix.policy.model_copy(update={"replay": 0.0}) if FIRST_ROUND in mix.shortages else mix.policy
    wanted = {
        "corrected": policy.corrected_places,
        "gold": policy.new_places - policy.corrected_places,
        "replay": policy.replay_places,
    }
    rows = [(role.value, num, wanted[role.value]) for role, num in mix.roles.items()]
    show_table([Column("ROLE"), Column("TAKEN", align="right"), Column("PLACES", align="right")], rows, indent=2)
    show_fields(
        [
            ("kind", mix.kind),
            ("new", f"{mix.num_new} to train on, at least {mix.policy.min_new} wanted"),
            ("reserved", f"{mix.num_reserved}, held-out and validation ones with them"),
            ("task types", ", ".join(mix.policy.task_types) or None),
            ("seed", mix.policy.seed),
        ]
    )
    for shortage in mix.shortages:
        say(f"  {shortage}")
    if mix.warning is not None:
        say(coloured("warning", f"! {mix.warning}"))
    if mix.left_out:
        heading("Experiences that are not in")
        rows_out = sorted(((num, why) for why, num in mix.left_out.items()), key=lambda row: -row[0])
        show_table([Column("NUMBER", align="right"), Column("BECAUSE THEY ARE, OR HAVE", "fold")], rows_out, indent=2)


def _earlier(report: DatasetReport) -> str | None:
    """What it was before forgotten experiences were taken out; runs of that time name it."""
    if not report.earlier_fingerprints:
        return None
    return f"{', '.join(each[:16] for each in report.earlier_fingerprints)} (forgotten experiences were taken out)"


def _splits(report: DatasetReport) -> str:
    """How many examples are in each split, and which share of all that is."""
    num = sum(report.counts.values())
    return ", ".join(
        f"{count} {_NAMES[split.value]} ({count / num:.0%})" if num else f"{count} {_NAMES[split.value]}"
        for split, count in report.counts.items()
    )


def _undesirable(report: DatasetReport) -> str | None:
    """How many of the labelled answers are to be avoided; None where there are no labels."""
    nums = {split.value: num for split, num in report.num_undesirable.items()}
    if not nums:
        return None
    share = sum(nums.values()) / max(1, sum(report.counts.values()))
    parts = f"{nums['train']} train, {nums['validation']} validation, {nums['heldout']} held out (never judged on)"
    return f"{parts}; {share:.0%} of all answers"


def _reading(report: DatasetReport) -> str | None:
    """What was asked for beside the files."""
    options = report.options
    asked = [f"format {options.format}"] if options.format != "auto" else []
    asked += [f"windows {options.windows}"] if options.windows != "whole" else []
    asked += [f"where {condition}" for condition in options.where]
    asked += [f"at most {options.first_examples} examples"] if options.first_examples else []
    return ", ".join(asked) or None


def _show_left_out(report: DatasetReport) -> None:
    if report.drops:
        heading("Left out")
        rows = [(drop.num, drop.reason.value, str(drop.first[0]) if drop.first else "") for drop in report.drops]
        show_table([Column("LINES", align="right"), Column("REASON"), Column("FIRST", "fold")], rows, indent=2)
    if report.quarantine:
        heading("Kept aside for review: tunesmith dataset quarantine DATASET")
        rows = [(found.num, found.screen, str(found.first[0]) if found.first else "") for found in report.quarantine]
        show_table([Column("ROWS", align="right"), Column("SCREEN"), Column("FIRST", "fold")], rows, indent=2)


def _show_lengths(report: DatasetReport) -> None:
    """A bar for each doubling of the length, the longest one full."""
    if not report.lengths:
        return
    heading("Length of examples, in characters")
    most = max(bucket.num for bucket in report.lengths)
    rows = [
        (f"{bucket.below // 2}–{bucket.below - 1}", bucket.num, "█" * max(1, round(_BAR * bucket.num / most)))
        for bucket in report.lengths
    ]
    columns = [Column("LENGTH", align="right"), Column("EXAMPLES", align="right"), Column("")]
    show_table(columns, rows, indent=2)


def _show_sources(report: DatasetReport) -> None:
    heading("Sources")
    files = [(f.name, f.num_lines, f"{f.unit}s", f.num_bytes, f.sha256[:16]) for f in report.sources]
    columns = [
        Column("FILE", "fold"),
        Column("NUMBER", align="right"),
        Column("OF"),
        Column("BYTES", align="right"),
        Column("SHA-256"),
    ]
    show_table(columns, files, indent=2)
