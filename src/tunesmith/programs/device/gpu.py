"""Which GPU this machine gives its programs, as torch will see it; asked in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.environment import child_environment

_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")
"""Names in /dev: a GPU of NVIDIA, one under Windows, one of AMD."""
_TIMEOUT_S = 120.0
_QUESTION = """
import json, torch
about = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps(None if about is None else [about.name, about.total_memory]))
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    gb: float
    """Its whole memory, in GB of 2^30 bytes."""


def find_gpu(devices: Path = Path("/dev")) -> Gpu | None:
    """The first GPU that torch can use; None: there is none, or no torch. Takes no time where there is none."""
    if not any(next(devices.glob(pattern), None) for pattern in _DEVICES):
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            env=child_environment(os.environ),
        )  # fmt: skip
        said = json.loads(done.stdout.splitlines()[-1])
        return None if said is None else Gpu(str(said[0]), int(said[1]) / 2**30)
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError, TypeError):
        return None
