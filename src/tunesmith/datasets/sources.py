"""Opens a source as what its first bytes say it is: Parquet, or text that may be packed."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.core.errors import DataError, quoted
from tunesmith.datasets.readers.text import LineReader
from tunesmith.datasets.report import PrepareOptions

if TYPE_CHECKING:
    from tunesmith.datasets.readers.parquet import ParquetReader

_PARQUET = b"PAR1"


def open_source(path: Path, source: int, options: PrepareOptions) -> LineReader | ParquetReader:
    """A reader of a regular file."""
    with path.open("rb") as beginning:
        is_parquet = beginning.read(len(_PARQUET)) == _PARQUET
    if not is_parquet:
        return LineReader(path, source, options.max_line_bytes)
    from tunesmith.datasets.filters import read_conditions
    from tunesmith.datasets.readers.parquet import ParquetReader

    filtered = frozenset(condition.path[0] for condition in read_conditions(options.where))
    return ParquetReader(path, source, options.max_line_bytes, filtered)


def expanded(files: Sequence[str | Path]) -> list[Path]:
    """The files that are meant: a pattern such as data/*.jsonl stands for all that match it, by name."""
    found: list[Path] = []
    for file in files:
        text = str(file)
        if not glob.has_magic(text) or _is_there(Path(file)):
            found.append(Path(file))
            continue
        matches = sorted(name for name in glob.glob(text, recursive=True) if not Path(name).is_dir())
        if not matches:
            raise DataError(f"no file matches {quoted(text, 200)}; check the pattern and the folder you are in")
        found += map(Path, matches)
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return True  # not a path at all: whoever opens it says why
