"""How many quarantined rows of a dataset nobody has decided about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import read_manifest

FILE_NAME = "quarantine.jsonl"


def num_quarantined(folder: Path) -> int:
    """As the manifest says."""
    if not (folder / FILE_NAME).is_file():
        return 0
    try:
        return int(read_manifest(folder).meta.get("num_quarantined", 0))
    except DataError:
        return 0  # damaged; `dataset verify` tells


def num_undecided(folder: Path, decisions: Sequence[dict[str, Any]]) -> int:
    """Return how many nobody has released or dismissed. Reads the rows only if some were released."""
    if any("places" not in detail for detail in decisions):
        return 0  # all of them were dismissed
    decided = {place for detail in decisions for place in detail["places"]}
    if not decided:
        return num_quarantined(folder)
    from tunesmith.datasets.quarantine.review import places

    return sum(place not in decided for place in places(folder))
