"""Where tests keep their files: in memory where there is room."""

from __future__ import annotations

import os
import shutil

MEMORY = "/dev/shm"
_ROOM = 4 << 30


def has_roomy_memory() -> bool:
    return os.path.isdir(MEMORY) and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > _ROOM


def roomy_folder() -> str | None:
    """For `tempfile`: in memory where there is room, else its own default."""
    return MEMORY if has_roomy_memory() else None
