"""The header of a safetensors file: which tensors it says it holds. Standard library only, no weight is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tunesmith.core import strict_json
from tunesmith.core.files import open_plain


class HeaderCut(ValueError):
    """The header is longer than the file, or than its reader takes."""


def read_header(
    path: Path, limit: int, *, on_duplicate: strict_json.OnDuplicate | None = None
) -> tuple[dict[str, Any], int, int]:
    """The entries by tensor as they stand in the file, where its data begins, and its size. Judges no entry.

    Without `on_duplicate`, the last of two entries with one name is taken.

    Raises OSError, HeaderCut, and ValueError or RecursionError for what is no JSON object.
    """
    with open_plain(path, follow_links=True) as source:
        size = os.fstat(source.fileno()).st_size
        length = int.from_bytes(source.read(8), "little")
        if size < 8 or length > min(limit, size - 8):
            raise HeaderCut
        text = source.read(length)
    entries = json.loads(text) if on_duplicate is None else strict_json.loads(text, on_duplicate)
    if not isinstance(entries, dict):
        raise ValueError("not an object")
    entries.pop("__metadata__", None)
    return entries, 8 + length, size
