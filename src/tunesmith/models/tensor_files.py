"""Writing safetensors so that a failed write is what it is: an OSError that says whether the disk is full."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write the tensors; the library wraps the system's error into one of its own, which is unwrapped here."""
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
