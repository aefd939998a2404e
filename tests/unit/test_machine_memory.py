"""How much memory programs get: the machine's, or what a container leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunesmith.programs.device.memory import usable_ram

BUILT_IN = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def groups(folder: Path, own: str, **limits: str) -> tuple[Path, Path]:
    """Control groups whose limits are given by name; `_` stands for a slash, `root` for the top."""
    for name, limit in limits.items():
        place = folder / "groups" / name.replace("root", "").replace("_", "/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
    (folder / "own").write_text(own)
    return folder / "groups", folder / "own"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, BUILT_IN),
        ({"a_b": "max", "a": "max"}, BUILT_IN),
        ({"a_b": "1048576", "a": "max"}, 1 << 20),
        ({"a_b": "2097152", "a": "1048576"}, 1 << 20),
        ({"a_b": "max", "root": "4096"}, 4096),
        ({"a_b": str(BUILT_IN * 2)}, BUILT_IN),
        ({"a_b": "nonsense", "other": "1"}, BUILT_IN),
    ],
)
def test_smallest_limit_from_here_upwards_counts(tmp_path: Path, limits: dict[str, str], expected: int) -> None:
    assert usable_ram(*groups(tmp_path, "0::/a/b\n", **limits)) == expected


def test_older_groups_and_none_at_all_are_understood(tmp_path: Path) -> None:
    assert usable_ram(tmp_path, tmp_path / "missing") == BUILT_IN
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("8192\n")
    (tmp_path / "own").write_text("9:memory:/somewhere\nnonsense\n")
    assert usable_ram(tmp_path, tmp_path / "own") == 8192
