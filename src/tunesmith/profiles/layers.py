"""The layers a config is made of, from weakest to strongest, and how one is read, checked and laid over another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

from tunesmith.core.errors import ConfigError, UsageError, quoted
from tunesmith.profiles.keys import Names, Problem, SchemaField, UnknownKey, current_path, defaults, find, flatten
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.value_checks import check_value, coerce_text, parsed_or_text
from tunesmith.profiles.workspace import PLAIN_VARIABLES
from tunesmith.profiles.yaml_files import Document, KeyPath

ENVIRONMENT_PREFIX = "TUNESMITH__"
SET_FLAG = "--set"
_MAX_SHOWN = 20


class Layer(StrEnum):
    """Who may say something about a key; a later one wins over an earlier one."""

    DEFAULT = "default"
    PROFILE = "profile"
    CAMPAIGN = "campaign"
    PROJECT = "project"
    ENVIRONMENT = "environment"
    OVERRIDE = "override"


@dataclass(frozen=True)
class Origin:
    """Where a value came from; `where` names the file and line, the variable, or the flag."""

    layer: Layer
    where: str

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True)
class Entry:
    value: Any
    origin: Origin


Entries = dict[Names, Entry]

_OF_THE_PROFILE = frozenset({("name",), ("role",), ("base", "path"), ("base", "revision"), ("base", "family")})
_ENABLED = frozenset({("enabled",), ("disabled_reason",)})
_API = "override"
_BY_CAMPAIGN = "campaign"
_BY_ENVIRONMENT = "environment"


def layer_problem(layer: Layer, path: Names) -> str | None:
    """Return why this layer must not set the key, or None."""
    if layer in (Layer.PROFILE, Layer.CAMPAIGN) and path[0] in Settings.model_fields:
        return "belongs in tunesmith.yaml: it holds for the whole workspace"
    if layer is not Layer.PROFILE and path in _ENABLED:
        return "belongs in the profile's own file: who disables a profile there stops every run of it"
    if layer is Layer.OVERRIDE and path[0] in Settings.model_fields:
        variable = ENVIRONMENT_PREFIX + "__".join(path).upper()
        return f"holds for the whole workspace, not for one run; set it in tunesmith.yaml or as {variable}"
    if layer is Layer.OVERRIDE and path == ("name",):
        return "cannot be overridden: it is the profile's identity"
    if layer is not Layer.PROFILE and path in _OF_THE_PROFILE:
        return "belongs in the profile's own file: it says what the profile is"
    return None


def is_from_a_file(where: str) -> bool:
    """Whether an origin, as a run's spec keeps it, is a file that can be read again."""
    return where not in (SET_FLAG, _API, _BY_CAMPAIGN) and not where.startswith(f"{_BY_ENVIRONMENT} ")


class Problems:
    """Everything that is wrong, one line each, so that a user fixes it in one go."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, problem: Problem) -> None:
        joint = " " if where == SET_FLAG else ": "
        self.lines.append(f"{where}{joint}{dotted(problem.path)}: {problem.reason}")

    def raise_any(self) -> None:
        if self.lines:
            raise self.as_error()

    def as_error(self) -> ConfigError:
        lines = list(dict.fromkeys(self.lines))
        rest = len(lines) - _MAX_SHOWN
        return ConfigError("\n".join(lines[:_MAX_SHOWN] + ([f"… and {rest} more"] if rest > 0 else [])))


def dotted(path: KeyPath) -> str:
    """A key path as people write it; what may be strange in a key is escaped and cut."""
    text = ".".join(map(str, path))
    return text if text and text.isprintable() and len(text) <= 120 else quoted(text, 120)


def put(entries: Entries, path: Names, entry: Entry) -> None:
    """Set a key; what stood at it, below it, or as a single value above it is gone."""
    depth = len(path)
    for other in [other for other in entries if other[:depth] == path or path[: len(other)] == other]:
        del entries[other]
    entries[path] = entry


def merge(below: Entries, above: Entries) -> Entries:
    """Merge two layers; `above` wins."""
    merged = dict(below)
    for path, entry in above.items():
        put(merged, path, entry)
    return merged


def default_layer() -> Entries:
    return dict(_default_entries())


@cache
def _default_entries() -> Entries:
    origin = Origin(Layer.DEFAULT, "schema default")
    return {path: Entry(value, origin) for path, value in defaults().items()}


def document_layer(layer: Layer, document: Document, problems: Problems) -> Entries:
    """What a YAML file says; each key remembers its line."""
    entries: Entries = {}
    unknown: list[Problem] = []
    document = replace(document, lines={current_path(path): line for path, line in document.lines.items()})
    for path, value in flatten(document.tree, unknown).items():
        _put_checked(entries, path, Entry(value, Origin(layer, document.where(path))), problems, document)
    for problem in unknown:
        problems.add(document.where(problem.path), problem)
    return entries


def mapping_layer(layer: Layer, where: str, mapping: Mapping[str, Any], problems: Problems) -> Entries:
    """What a mapping says whose keys are nested, dotted, or both."""
    entries: Entries = {}
    for key, value in mapping.items():
        try:
            place = find(tuple(str(key).split(".")))
        except UnknownKey as unknown:
            problems.add(where, unknown.problem)
            continue
        path = place.path if isinstance(place, SchemaField) else tuple(str(key).split("."))
        if ".".join(path) != key and ".".join(path) in mapping:
            problems.add(where, Problem(path, f"is given twice: {key} is an earlier name of it; keep only one"))
            continue
        _put_tree(entries, path, value, Origin(layer, where), problems)
    return entries


def environment_layer(environ: Mapping[str, str], problems: Problems) -> Entries:
    """What ``TUNESMITH__SECTION__KEY=value`` says."""
    entries: Entries = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            origin = Origin(Layer.ENVIRONMENT, f"{_BY_ENVIRONMENT} {name if name.isprintable() else quoted(name)}")
            meant = ENVIRONMENT_PREFIX + "__".join(current_path(path)).upper()
            if meant != name.upper() and meant in environ:
                reason = f"is given twice: {meant} is the current name of the same setting; keep only that one"
                problems.add(origin.where, Problem(path, reason))
                continue
            _put_text(entries, path, environ[name], origin, problems)
        elif name.upper().startswith("TUNESMITH_") and name not in PLAIN_VARIABLES:
            _tell_misspelt(name, problems)
    return entries


def _tell_misspelt(name: str, problems: Problems) -> None:
    """A variable that looks like a setting and would be ignored; others of that beginning are nobody's business."""
    rest = name.upper().removeprefix("TUNESMITH_").strip("_").lower()
    section, _, key = rest.replace("__", "_").partition("_")
    for path in (tuple(rest.split("__")), (section, key)):
        with contextlib.suppress(UnknownKey):
            if isinstance(place := find(path), SchemaField):
                meant = ENVIRONMENT_PREFIX + "__".join(place.path).upper()
                problems.add(f"environment {name}", Problem(place.path, f"would be ignored; write {meant}"))
                return


def override_layer(overrides: Sequence[str] | Mapping[str, Any], problems: Problems, layer: Layer) -> Entries:
    """What ``--set key=value`` says, or a mapping from the API; a later one wins."""
    if isinstance(overrides, Mapping):
        return mapping_layer(layer, _BY_CAMPAIGN if layer is Layer.CAMPAIGN else _API, overrides, problems)
    entries: Entries = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{SET_FLAG} {quoted(text)}: write it as key=value, e.g. {SET_FLAG} recipe.lr=2e-4")
        _put_text(entries, tuple(key.strip().split(".")), value, Origin(layer, SET_FLAG), problems)
    return entries


def _put_text(entries: Entries, path: Names, text: str, origin: Origin, problems: Problems) -> None:
    try:
        place = find(path)
    except UnknownKey as unknown:
        problems.add(origin.where, unknown.problem)
        return
    if not isinstance(place, SchemaField):
        _put_tree(entries, path, parsed_or_text(text), origin, problems)
        return
    value, found = coerce_text(place, text)
    for problem in found:
        problems.add(origin.where, problem)
    if not found:
        _put_tree(entries, place.path, value, origin, problems)


def _put_tree(entries: Entries, path: Names, value: Any, origin: Origin, problems: Problems) -> None:
    """Add a value, or every value of a nested mapping, at `path`."""
    for part in reversed(path):
        value = {part: value}
    unknown: list[Problem] = []
    for place, inner in flatten(value, unknown).items():
        _put_checked(entries, place, Entry(inner, origin), problems)
    for problem in unknown:
        problems.add(origin.where, problem)


def _put_checked(
    entries: Entries, path: Names, entry: Entry, problems: Problems, document: Document | None = None
) -> None:
    """Add one value if this layer may say it and it can stand there."""
    where = entry.origin.where
    reason = layer_problem(entry.origin.layer, path)
    if reason is not None:
        problems.add(where, Problem(path, reason))
        return
    place = find(path)
    assert isinstance(place, SchemaField), "flatten yields values, not sections"
    found = check_value(place, entry.value)
    for problem in found:
        problems.add(document.where(problem.path) if document else where, problem)
    if not found:
        put(entries, path, entry)
