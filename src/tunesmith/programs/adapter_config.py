"""adapter_config.json of a LoRA adapter: what it may say. Looked at without torch, in bounded time and memory.

peft takes several of its fields as regular expressions, and makes matrices of the rank that it names before anybody
looks at the weights. So only plain names and sane numbers pass: before an adapter is registered, and before it is
loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.core import strict_json
from tunesmith.core.errors import DataError, quoted
from tunesmith.core.files import FileTooLarge, NotPlainFile, read_capped
from tunesmith.profiles.base_model import ADAPTER_CONFIG

MAX_RANK = 4096
_MAX_CONFIG = 1 << 20
_MAX_NAMES = 20_000
_NAME = re.compile(r"\^?[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100}){0,20}\Z")
_LISTS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern")
_FLAGS = ("ensure_weight_tying", "fan_in_fan_out", "use_rslora", "use_dora", "lora_bias")
_USED = frozenset(
    {
        *_LISTS,
        *_FLAGS,
        "r",
        "lora_alpha",
        "lora_dropout",
        "bias",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
    }
)
_WITHOUT_EFFECT = frozenset(
    {
        "peft_type",
        "task_type",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "init_lora_weights",  # the file's weights replace the initial ones
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
    }
)


def read_content(folder: Path) -> Any:
    """The JSON of an adapter's configuration, of whatever kind it is; raises DataError."""
    try:
        text = read_capped(
            folder / ADAPTER_CONFIG, _MAX_CONFIG, follow_links=True
        ).decode()  # UTF-8 always, as peft reads it
        return strict_json.loads(text, _stands_twice)
    except (FileNotFoundError, NotADirectoryError, NotPlainFile, FileTooLarge):
        raise DataError(f"{ADAPTER_CONFIG} is missing, or larger than any adapter's") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{ADAPTER_CONFIG} cannot be read, so it does not describe a LoRA adapter ({error})") from None


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a LoRA adapter that have an effect; raises DataError on anything that must not be loaded."""
    raw = read_content(folder)
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        raise DataError(f"{ADAPTER_CONFIG} does not describe a LoRA adapter")
    for key, value in raw.items():
        if key not in _USED and key not in _WITHOUT_EFFECT and value:
            raise DataError(f"{ADAPTER_CONFIG} uses {quoted(key)}, which tunesmith does not load")
    settings = {key: value for key, value in raw.items() if key in _USED}
    problem = _problem(settings)
    if problem is not None:
        raise DataError(f"{ADAPTER_CONFIG}: {problem}")
    return settings


def rank_of(settings: Mapping[str, Any], module: str) -> int:
    """The rank that peft gives a module: that of the first pattern which is its name or the end of it."""
    for key, rank in (settings.get("rank_pattern") or {}).items():
        plain = key.removeprefix("^")
        if module == plain or module.endswith(f".{plain}"):
            return int(rank)
    return int(settings["r"])


def _stands_twice(name: str) -> ValueError:
    return ValueError("a name stands twice in one object")


def _problem(settings: Mapping[str, Any]) -> str | None:
    """The first field that is not what an adapter's may be."""
    if not _is_rank(settings.get("r")):
        return f"r must be a whole number from 1 to {MAX_RANK}"
    if not _is_number(settings.get("lora_alpha", 8)):
        return "lora_alpha must be a finite number"
    dropout = settings.get("lora_dropout", 0.0)
    if not _is_number(dropout) or not 0.0 <= dropout < 1.0:
        return "lora_dropout must be at least 0 and less than 1"
    if settings.get("bias", "none") not in ("none", "all", "lora_only"):
        return "bias must be none, all or lora_only"
    for key in _FLAGS:
        if settings.get(key) not in (None, True, False):
            return f"{key} must be true or false"
    return _problem_of_names(settings) or _problem_of_patterns(settings)


def _problem_of_names(settings: Mapping[str, Any]) -> str | None:
    for key in _LISTS:
        value = settings.get(key)
        if value is None or (key == "target_modules" and value == "all-linear"):
            continue
        names = [value] if isinstance(value, str) and key == "layers_pattern" else value
        if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(_is_name(name) for name in names):
            return f"{key} must be a list of plain module names; patterns are not loaded"
    layers = settings.get("layers_to_transform")
    indices = [layers] if isinstance(layers, int) else layers
    if indices is not None and not (
        isinstance(indices, list)
        and len(indices) <= _MAX_NAMES
        and all(type(index) is int and 0 <= index <= _MAX_NAMES for index in indices)
    ):
        return "layers_to_transform must be a list of layer numbers"
    return None


def _problem_of_patterns(settings: Mapping[str, Any]) -> str | None:
    for key, is_fine in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        value = settings.get(key)
        if value is None:
            continue
        if not isinstance(value, dict) or len(value) > _MAX_NAMES:
            return f"{key} must map module names to numbers"
        if not all(_is_name(name) and is_fine(number) for name, number in value.items()):
            return f"{key} must map plain module names to numbers in range; patterns are not loaded"
    return None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.match(value) is not None


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 <= value <= 1e9  # NaN is not
