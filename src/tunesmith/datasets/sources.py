"""Opens a source as Parquet or (compressed) text, by its first bytes, and parses the `--where` conditions."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import DataError, UsageError, quoted
from tunesmith.datasets.readers.text import LineReader

if TYPE_CHECKING:
    from tunesmith.datasets.readers.parquet import ParquetReader
    from tunesmith.datasets.report import PrepareOptions

_PARQUET = b"PAR1"


def open_source(path: Path, source: int, options: PrepareOptions) -> LineReader | ParquetReader:
    """A reader of a regular file."""
    with path.open("rb") as beginning:
        is_parquet = beginning.read(len(_PARQUET)) == _PARQUET
    if not is_parquet:
        return LineReader(path, source, options.max_line_bytes)
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


_MISSING = object()


@dataclass(frozen=True, slots=True)
class Condition:
    """A FIELD=VALUE or FIELD!=VALUE condition on the objects of a source, checked before any other parsing."""

    text: str
    path: tuple[str, ...]
    value: str
    is_equal: bool

    def refuses(self, fields: dict[str, Any]) -> str | None:
        """Why the object does not meet it, to be counted; None: it does."""
        found: Any = fields
        for name in self.path:
            found = found.get(name, _MISSING) if type(found) is dict else _MISSING
        if found is _MISSING and self.is_equal:
            return f"no field {'.'.join(self.path)[:60]}"
        return None if _same(found, self.value) is self.is_equal else f"not {self.text[:60]}"


def read_conditions(texts: Sequence[str]) -> tuple[Condition, ...]:
    """Conditions as people write them; raises UsageError."""
    return tuple(map(_condition, texts))


def _condition(text: str) -> Condition:
    name, equals, value = text.partition("=")
    is_equal = not name.endswith("!")
    path = tuple(name.removesuffix("!").strip().split("."))
    if not equals or not all(path):
        raise UsageError(f"{quoted(text)} is no condition; write FIELD=VALUE or FIELD!=VALUE, e.g. metadata.lang=en")
    return Condition(text, path, value.strip(), is_equal)


def _same(found: Any, value: str) -> bool:
    """Whether a JSON value is what somebody wrote; of a list, whether one of its values is."""
    if type(found) is list:
        return any(_same(inner, value) for inner in found)
    if type(found) is str:
        return found == value
    if found is None or type(found) is bool:
        return value.lower() == {None: "null", True: "true", False: "false"}[found]
    if type(found) in (int, float):
        try:
            return bool(float(value) == found)
        except ValueError:
            return False
    return False
