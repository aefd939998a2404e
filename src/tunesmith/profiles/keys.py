"""The keys of the settings schema: where each belongs, its default, and what an unknown key was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tunesmith.core.errors import did_you_mean
from tunesmith.core.section import Section, doc_of
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.yaml_files import KeyPath

ROOTS: tuple[type[Section], ...] = (Settings, Profile)
Names = tuple[str, ...]
_Part = TypeVar("_Part", bound=str | int)


@dataclass(frozen=True)
class Problem:
    """What is wrong with one key."""

    path: KeyPath
    reason: str


@dataclass(frozen=True)
class SchemaField:
    """A field of a section; `rest` is the path inside a field that is a mapping."""

    section: type[Section]
    prefix: Names
    field: str
    rest: Names = ()

    @property
    def info(self) -> FieldInfo:
        return self.section.model_fields[self.field]

    @property
    def doc(self) -> str:
        return doc_of(self.section, self.field)

    @property
    def path(self) -> Names:
        return (*self.prefix, self.field, *self.rest)


class UnknownKey(Exception):
    """No such key; carries the problem to report."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def subsection(info: FieldInfo) -> type[Section] | None:
    """The section a field holds, if it holds one."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@cache
def fields_of(section: type[Section] | None) -> Mapping[str, FieldInfo]:
    """The fields of a section; None stands for the top, where settings and profile keys meet."""
    if section is not None:
        return section.model_fields
    return {name: info for root in ROOTS for name, info in root.model_fields.items()}


def _owner(section: type[Section] | None, key: str) -> type[Section]:
    return section or next(root for root in ROOTS if key in root.model_fields)


def current_name(section: type[Section] | None, key: str) -> str:
    """The name of a key; an earlier name of it counts as the current one."""
    for owner in ROOTS if section is None else (section,):
        key = owner.aliases.get(key, key)
    return key


def current_path(path: tuple[_Part, ...]) -> tuple[_Part | str, ...]:
    """The path with the current name of every key; parts that the schema does not know stay as they are."""
    section: type[Section] | None = None
    names: list[str] = []
    for part in path:
        name = current_name(section, str(part))
        info = fields_of(section).get(name)
        if info is None:
            break
        names.append(name)
        section = subsection(info)
        if section is None:
            break
    return (*names, *path[len(names) :])


@cache
def schema_fields() -> dict[str, SchemaField]:
    """Return every leaf of the schema by its dotted key, in the order of declaration."""
    return {".".join(place.path): place for place in _schema_fields(None, ())}


def _schema_fields(section: type[Section] | None, prefix: Names) -> Iterator[SchemaField]:
    for name, info in fields_of(section).items():
        below = subsection(info)
        if below is not None:
            yield from _schema_fields(below, (*prefix, name))
        else:
            yield SchemaField(_owner(section, name), prefix, name)


def find(path: Names) -> SchemaField | type[Section]:
    """Return the field of a key, or the section it names. Raises UnknownKey."""
    path = current_path(path)
    section: type[Section] | None = None
    for depth, key in enumerate(path):
        info = fields_of(section).get(key)
        if info is None:
            raise UnknownKey(_unknown(path[:depth], key, section))
        below = subsection(info)
        if below is None:
            return _inside(SchemaField(_owner(section, key), path[:depth], key), path[depth + 1 :])
        section = below
    assert section is not None, "an empty path names nothing"
    return section


def _inside(place: SchemaField, rest: Names) -> SchemaField:
    if not rest:
        return place
    if get_origin(place.info.annotation) is not dict:
        reason = f"unknown key; {'.'.join(place.path)} has nothing below it"
        raise UnknownKey(Problem((*place.path, *rest), reason))
    if not is_free(place.info):
        rest = (".".join(rest),)  # its values are single ones, so a dot belongs to the name
    return SchemaField(place.section, place.prefix, place.field, rest)


def is_free(info: FieldInfo) -> bool:
    """A mapping whose values may be anything, e.g. the options of a trainer."""
    arguments = get_args(info.annotation)
    return get_origin(info.annotation) is dict and arguments[1] is Any


def _unknown(prefix: Names, key: str, section: type[Section] | None) -> Problem:
    return Problem((*prefix, key), unknown_key(prefix, key, tuple(fields_of(section)), tuple(schema_fields())))


def flatten(tree: Mapping[str, Any], problems: list[Problem]) -> dict[Names, Any]:
    """The values of a nested mapping by their path, under the current name of each key.

    Keys that the schema does not know, and keys given under two names, go to `problems`.
    """
    found: dict[Names, Any] = {}
    _flatten(None, (), tree, found, problems)
    return found


def _flatten(
    section: type[Section] | None,
    prefix: Names,
    tree: Mapping[str, Any],
    found: dict[Names, Any],
    problems: list[Problem],
) -> None:
    fields = fields_of(section)
    for key, value in tree.items():
        name = current_name(section, key)
        path = (*prefix, name)
        if key != name and name in tree:
            reason = f"is given twice: {key} is an earlier name of it; keep only {name}"
            problems.append(Problem(path, reason))
            continue
        info = fields.get(name)
        if info is None:
            problems.append(_unknown(prefix, key, section))
            continue
        below = subsection(info)
        if below is None:
            found.update(_entries(path, value, info))
        elif isinstance(value, Mapping):
            _flatten(below, path, value, found, problems)
        elif value is not None:  # a section whose keys are all commented out says nothing
            keys = ", ".join(below.model_fields)
            problems.append(Problem(path, f"is a section, so it holds keys, not a value; its keys: {keys}"))


def _entries(path: Names, value: Any, info: FieldInfo) -> dict[Names, Any]:
    """A mapping is one entry per key, so that layers add to each other; an empty one replaces what is below."""
    if get_origin(info.annotation) is not dict or not isinstance(value, Mapping) or not value:
        return {path: value}
    if not is_free(info):
        return {(*path, str(key)): inner for key, inner in value.items()}
    return {place: inner for key, inner in value.items() for place, inner in _deep((*path, str(key)), inner).items()}


def _deep(path: Names, value: Any) -> dict[Names, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    return {place: inner for key, below in value.items() for place, inner in _deep((*path, str(key)), below).items()}


def defaults() -> dict[Names, Any]:
    """What the schema says where nobody says anything."""
    found: dict[Names, Any] = {}
    for place in schema_fields().values():
        if not place.info.is_required():
            value = to_jsonable_python(place.info.get_default(call_default_factory=True, validated_data={}))
            found.update(_entries(place.path, value, place.info))
    return found


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
    "gradient_clipping": "recipe.max_grad_norm",
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
