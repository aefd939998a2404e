"""Where fetched bases are kept on this machine, and which ones are there. One place for all workspaces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError, Refused
from tunesmith.core.files import Manifest, read_manifest, verify_folder

SOURCE, REVISION, FETCHED_AT = "source", "revision", "fetched_at"


@dataclass(frozen=True)
class FetchedBase:
    """A published folder with a base model, and where it came from."""

    folder: Path
    source: str
    """Its id on the hub, or `smollm2`."""
    revision: str
    """The commit on the hub, or the version of the package."""
    num_bytes: int
    fetched_at: str
    is_new: bool = False
    """It was fetched just now."""
    note: str = ""
    """What a person must know about it."""


def bases_place(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of all fetched bases. It is no cache: profiles refer to what is in it."""
    said = (os.environ if environ is None else environ).get("XDG_DATA_HOME")
    return (Path(said) if said else Path.home() / ".local" / "share") / "tunesmith" / "bases"


def origin_of(source: str, revision: str) -> dict[str, Any]:
    """What the manifest of a base that is fetched now says about where it came from."""
    return {SOURCE: source, REVISION: revision, FETCHED_AT: datetime.now(UTC).isoformat(timespec="seconds")}


def fetched_bases(place: Path) -> list[FetchedBase]:
    """Every base of a place, the newest first; what is no published base is left out."""
    folders = [path for pattern in ("*/manifest.json", "*/*/manifest.json") for path in place.glob(pattern)]
    found = [base for path in folders if (base := read_fetched(path.parent)) is not None]
    return sorted(found, key=lambda base: (base.fetched_at, base.folder), reverse=True)


def read_fetched(folder: Path) -> FetchedBase | None:
    """What a folder says about where it came from; None if it was not fetched. Reads no weights."""
    try:
        return as_fetched(folder, read_manifest(folder))
    except DataError:
        return None


def as_fetched(folder: Path, manifest: Manifest, *, is_new: bool = False) -> FetchedBase | None:
    said = [manifest.meta.get(key) for key in (SOURCE, REVISION, FETCHED_AT)]
    if not all(isinstance(each, str) for each in said):
        return None
    num_bytes = sum(entry["bytes"] for entry in manifest.files.values())
    return FetchedBase(folder, str(said[0]), str(said[1]), num_bytes, str(said[2]), is_new)


def find_whole(place: Path, source: str, revision: str | None = None) -> FetchedBase | None:
    """The newest fetched base of a source, or of exactly that revision, whose bytes still have their hashes."""
    for base in fetched_bases(place):
        if base.source == source and revision in (None, base.revision) and is_whole(base.folder):
            return base
    return None


def is_whole(folder: Path) -> bool:
    try:
        verify_folder(folder)
    except (DataError, OSError):
        return False
    return True


def check_destination(to: Path, source: str) -> None:
    """Refuse a folder that holds anything else than a fetched base of that source: it would be replaced."""
    if to.is_symlink() or (to.exists() and not to.is_dir()):
        raise Refused(f"--to {to}: is not a folder; name one that does not exist yet")
    known = read_fetched(to)
    if known is not None and known.source != source:
        raise Refused(f"--to {to}: holds {known.source}; name another folder")
    if known is None and to.is_dir() and any(to.iterdir()):
        raise Refused(f"--to {to}: is not empty, and nothing there was fetched by tunesmith; name another folder")
