"""What every server asks of an adapter's folder before it is shown to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import verify_folder
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.profiles.base_model import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunesmith.profiles.profile import TargetSettings as TargetConfig
from tunesmith.profiles.rules.target_limits import adapter_violations, whole_model_refusal
from tunesmith.programs.adapter_config import read_content


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; raises DataError."""
    try:
        config = read_content(folder)
    except DataError:
        config = None
    if not isinstance(config, dict):
        raise DataError(f"{folder.name}: {ADAPTER_CONFIG} is not readable JSON")
    return config


def folder_refusal(adapter: ServedAdapter, kind: str, options: dict[str, Any]) -> str | None:
    """Why a server of that kind cannot take the adapter, by its files alone; None if nothing is known against it."""
    try:
        verify_folder(adapter.path, adapter.digest)
        if not (adapter.path / ADAPTER_CONFIG).exists():
            return whole_model_refusal(kind)
        violations = adapter_violations(read_config(adapter.path), TargetConfig(name=kind, kind=kind, options=options))
        if not violations and not (adapter.path / ADAPTER_WEIGHTS).is_file():
            return f"{adapter.path.name}: {ADAPTER_WEIGHTS} is missing"
    except (DataError, OSError) as error:
        return str(error)
    return "; ".join(violations) or None
