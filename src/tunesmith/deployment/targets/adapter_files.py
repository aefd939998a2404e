"""What every server asks of an adapter's folder before it is shown to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import verify_folder
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.profiles.profile import TargetSettings as TargetConfig
from tunesmith.profiles.rules.target_limits import adapter_violations, whole_model_refusal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; raises DataError."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise DataError(f"{folder.name}: {CONFIG} is not readable JSON")
    return config


def folder_refusal(adapter: ServedAdapter, kind: str, options: dict[str, Any]) -> str | None:
    """Why a server of that kind cannot take the adapter, by its files alone; None if nothing is known against it."""
    try:
        verify_folder(adapter.path, adapter.digest)
        if not (adapter.path / CONFIG).exists():
            return whole_model_refusal(kind)
        violations = adapter_violations(read_config(adapter.path), TargetConfig(name=kind, kind=kind, options=options))
        if not violations and not (adapter.path / WEIGHTS).is_file():
            return f"{adapter.path.name}: {WEIGHTS} is missing"
    except (DataError, OSError) as error:
        return str(error)
    return "; ".join(violations) or None
