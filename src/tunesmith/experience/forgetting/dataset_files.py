"""Takes examples out of a published dataset: a new folder without them, and without what lies beside them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tunesmith.core.errors import DataError
from tunesmith.core.files import publish_folder, verify_folder
from tunesmith.core.staging import staging_for
from tunesmith.datasets.example import Split, codes_of, identity, num_prompt_of
from tunesmith.datasets.report import SplitDigest, fingerprint
from tunesmith.experience.forgetting.rules import talk_hash

QUARANTINE = "quarantine.jsonl"
_ID = re.compile(rb"\bxp-[0-9a-z]+")
Step = Callable[[str], None]
"""Called with the name of what is about to be done; a drill kills the process there."""


@dataclass(frozen=True)
class Erased:
    """The dataset as it is without them."""

    fingerprint: str
    counts: dict[str, int]
    num_examples: int
    """How many were taken out."""


def erase(
    folder: Path, final: Path, hashes: Collection[str], names: Collection[str], *, on_step: Step = lambda step: None
) -> Erased | None:
    """Publish `final`: the dataset in `folder` without the examples and kept-aside rows that have one of these hashes,
    and without lines that name one of the experiences `names`. None where it holds nothing of them.
    """
    manifest = verify_folder(folder)  # a damaged dataset is not made to look whole
    with staging_for(final) as staged:
        on_step("splits")
        writers = {split: _without(folder, staged, split, frozenset(hashes)) for split in Split}
        on_step("beside")
        others = [name for name in manifest.files if name not in {f"{split.value}.parquet" for split in Split}]
        dropped = {name: _copy_lines(folder / name, staged / name, hashes, names) for name in others}
        num = sum(removed for _, removed in writers.values())
        if not num and not any(dropped.values()):
            return None
        meta = _described(manifest.meta, writers, dropped.get(QUARANTINE, []))
        on_step("publish")
        publish_folder(staged, final, meta)
    on_step("published")
    return Erased(meta["fingerprint"], dict(meta["counts"]), num)


def _without(folder: Path, staged: Path, split: Split, hashes: frozenset[str]) -> tuple[Any, int]:
    """Write a split without these examples; its writer, and how many were left out."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from tunesmith.datasets.split_files import SplitWriter

    name = f"{split.value}.parquet"
    unwanted, removed = pa.array(sorted(hashes), pa.string()), 0
    writer = SplitWriter(staged / name)
    try:
        with pq.ParquetFile(folder / name) as source:
            for batch in source.iter_batches(1024):
                kept = batch.filter(pc.invert(pc.is_in(batch.column("id"), unwanted)))
                removed += batch.num_rows - kept.num_rows
                if kept.num_rows:
                    writer.write(kept)
        writer.finish()
    finally:
        writer.close()
    return writer, removed


def _copy_lines(source: Path, target: Path, hashes: Collection[str], names: Collection[str]) -> list[dict[str, Any]]:
    """Copy what lies beside the examples, line by line, without what is forgotten; what was left out."""
    if not source.name.endswith(".jsonl"):
        raise DataError(f"{source}: not a file that erasing knows; remove the dataset's folder to be rid of its text")
    wanted = frozenset(name.encode() for name in names)
    dropped: list[dict[str, Any]] = []
    mode = source.stat().st_mode & 0o777
    with (
        source.open("rb") as lines,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as sink,
    ):
        for line in lines:
            row = orjson.loads(line)
            if not wanted.isdisjoint(_ID.findall(line)) or not _hashes_of(row).isdisjoint(hashes):
                dropped.append({key: row[key] for key in ("source", "line", "findings") if key in row})
            else:
                sink.write(line)
    return dropped


def _hashes_of(row: Mapping[str, Any]) -> set[str]:
    """Return the keys by which a quarantined row is recognised: its example id and its texts."""
    messages, rejected = row.get("messages"), row.get("rejected")
    if not isinstance(messages, list):
        return set()
    codes = codes_of(messages)
    shape = codes if rejected is None else f"{codes}|{codes_of(rejected)}"
    worse = rejected or []
    found = {identity(shape, [message["content"] for message in (*messages, *worse)]), talk_hash(messages)}
    return found | ({talk_hash([*messages[: num_prompt_of(shape)], *worse])} if worse else set())


def _described(
    meta: Mapping[str, Any], writers: Mapping[Split, tuple[Any, int]], aside: list[dict[str, Any]]
) -> dict[str, Any]:
    """The report of the dataset as it is now. What it says of rows that were bad holds nothing of them."""
    digests: dict[Split, SplitDigest] = {split: writer.digest for split, (writer, _) in writers.items()}
    lengths = sum((writer.lengths for writer, _ in writers.values()), Counter[int]())
    num = sum(digest.num for digest in digests.values())
    score = sum(writer.total_score for writer, _ in writers.values())
    undesirable = {split.value: writer.num_undesirable for split, (writer, _) in writers.items()}
    now, before = fingerprint(digests), list(meta.get("earlier_fingerprints", ()))
    return {
        **meta,
        "fingerprint": now,
        "earlier_fingerprints": before if now == meta["fingerprint"] else [*before, meta["fingerprint"]],
        "counts": {split.value: digest.num for split, digest in digests.items()},
        "num_undesirable": undesirable if meta.get("num_undesirable") else {},
        "lengths": [{"below": 1 << bits, "num": each} for bits, each in sorted(lengths.items())],
        "mean_score": round(score / num, 4) if num else 0.0,
        "num_quarantined": meta.get("num_quarantined", 0) - len(aside),
        "quarantine": _fewer(meta.get("quarantine", ()), aside),
    }


def _fewer(quarantine: Any, aside: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the report of quarantined rows without the erased ones: their excerpts are text too."""
    gone = {(row.get("source"), row.get("line")) for row in aside}
    found = []
    for kept in quarantine:
        num = sum(any(each["screen"] == kept["screen"] for each in row.get("findings", ())) for row in aside)
        first = [each for each in kept["first"] if (each["source"], each["line"]) not in gone]
        if kept["num"] > num:
            found.append({**kept, "num": kept["num"] - num, "first": first})
    return found
