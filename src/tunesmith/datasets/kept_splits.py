"""Groups of prompts that keep the split they had before a profile's shares were changed, as a file for every parser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tunesmith.datasets.example import Split

_PLACES = {split: place for place, split in enumerate(Split)}


def write_kept(path: Path, kept: Mapping[str, Split]) -> None:
    """Groups in hex with their split."""
    path.write_text(json.dumps({group: _PLACES[split] for group, split in kept.items()}), encoding="utf-8")


def read_kept(path: str) -> dict[bytes, int]:
    """The same for a parser: raw groups, and the place of their split among all."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return {bytes.fromhex(group): place for group, place in found.items()}


def groups_in(folder: Path) -> Iterator[tuple[str, Split]]:
    """Every group of a published dataset, with the split it is in."""
    import pyarrow.parquet as pq

    for split in Split:
        with pq.ParquetFile(folder / f"{split.value}.parquet") as source:
            for batch in source.iter_batches(65_536, columns=["group"]):
                for group in batch.column(0).unique().to_pylist():
                    yield group, split
