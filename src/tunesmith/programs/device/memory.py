"""How much memory this machine gives its programs: what is built in, or what a container's limit leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def usable_ram(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes; the smallest limit from this process's control group upwards, never more than the machine has."""
    built_in = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([built_in, *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> list[int]:
    """Of control groups: version 2 is one tree; of version 1, a container sees its own as the root."""
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        entries = []
    found = [_limit(groups / "memory" / "memory.limit_in_bytes")]
    for entry in entries:
        if len(entry) == 3 and entry[0] == "0":
            folder = groups / entry[2].lstrip("/")
            found += [
                _limit(place / "memory.max") for place in (folder, *folder.parents) if place.is_relative_to(groups)
            ]
    return [limit for limit in found if limit is not None]


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None
