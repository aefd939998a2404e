"""What an unknown key was meant to be: a near name, the word another tool uses, or a key of another section."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from tunesmith.core.errors import did_you_mean

ALIASES = {
    "learning_rate": "recipe.lr",
    "peak_lr": "recipe.lr",
    "num_epochs": "recipe.epochs",
    "num_train_epochs": "recipe.epochs",
    "steps": "recipe.max_steps",
    "batch_size": "recipe.batch_tokens",
    "train_batch_size": "recipe.batch_tokens",
    "micro_batch_size": "recipe.micro_batch_tokens",
    "per_device_train_batch_size": "recipe.micro_batch_tokens",
    "gradient_checkpointing": "recipe.activation_checkpointing",
    "memory_limit_gb": "hardware.memory_gb",
    "gradient_accumulation_steps": "recipe.batch_tokens",
    "max_seq_length": "recipe.max_length",
    "max_seq_len": "recipe.max_length",
    "sequence_len": "recipe.max_length",
    "sequence_length": "recipe.max_length",
    "cutoff_len": "recipe.max_length",
    "r": "recipe.lora_rank",
    "rank": "recipe.lora_rank",
    "lora_r": "recipe.lora_rank",
    "alpha": "recipe.lora_alpha",
    "dropout": "recipe.lora_dropout",
    "modules": "recipe.target_modules",
    "lora_target_modules": "recipe.target_modules",
    "warmup_ratio": "recipe.warmup",
    "warmup_steps": "recipe.warmup",
    "scheduler": "recipe.schedule",
    "lr_scheduler": "recipe.schedule",
    "lr_scheduler_type": "recipe.schedule",
    "max_grad_norm": "recipe.clip",
    "gradient_clipping": "recipe.clip",
    "random_seed": "recipe.seed",
    "model": "base.path",
    "base_model": "base.path",
    "model_name": "base.path",
    "model_name_or_path": "base.path",
    "model_type": "base.family",
    "context_length": "base.context",
    "eval_steps": "validation.every_steps",
    "metric_for_best_model": "validation.best_metric",
    "greater_is_better": "validation.best_direction",
    "save_steps": "checkpoints.every_steps",
    "save_total_limit": "checkpoints.keep",
    "timeout": "budgets.wall_s",
    "max_tokens": "budgets.tokens",
    "eval_batch_size": "evaluation.batch_size",
    "test_size": "data.heldout_share",
    "val_size": "data.validation_share",
    "threshold": "gate.floors",
    "database": "store.url",
    "database_url": "store.url",
}
"""Words that other tools use, and what they are called here."""


REFUSED = {
    "trust_remote_code": "tunesmith never executes code that comes with a model; remove this key",
}
"""Keys that are understood, and refused on purpose wherever they stand."""


def unknown_key(prefix: Sequence[str], key: str, siblings: Iterable[str], all_keys: Iterable[str]) -> str:
    """The reason to show for a key that is not there. `all_keys` are the dotted keys of the whole schema."""
    name = key.lower().replace("-", "_")[:100]
    if name in REFUSED:
        return REFUSED[name]
    names = tuple(siblings)
    everywhere = tuple(all_keys)
    if key in everywhere:
        return "unknown key; write one level per dot, the inner key indented under the outer one"
    parent = ".".join(prefix)
    here = {alias: target for alias, target in ALIASES.items() if everywhere and _parent(target) == parent}
    here.update({sibling: f"{parent}.{sibling}" for sibling in names})
    elsewhere = {**_unique_endings(everywhere), **ALIASES} if everywhere else {}
    meant = (
        here.get(name)
        or elsewhere.get(name)
        or _closest(name, here, cutoff=0.6)
        or _closest(name, elsewhere, cutoff=0.75)
    )
    if meant is None:
        return f"unknown key{did_you_mean(name, names)}"
    return f"unknown key; did you mean '{meant.rpartition('.')[2] if _parent(meant) == parent else meant}'?"


def _closest(name: str, candidates: dict[str, str], cutoff: float) -> str | None:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return candidates[close[0]] if close else None


def _parent(dotted: str) -> str:
    return dotted.rpartition(".")[0]


def _unique_endings(dotted_keys: Iterable[str]) -> dict[str, str]:
    """Last words that belong to one key only, so that naming it helps."""
    found: dict[str, list[str]] = {}
    for dotted in dotted_keys:
        found.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    return {ending: keys[0] for ending, keys in found.items() if len(keys) == 1}
