"""The schema as the resolver sees it: which keys there are, where each lives, their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from tunesmith.core.section import Section
from tunesmith.profiles.known_keys import unknown_key
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
class Place:
    """Where a value belongs: a field of a section, and the rest of the path inside a field that is a mapping."""

    section: type[Section]
    prefix: Names
    field: str
    rest: Names = ()

    @property
    def info(self) -> FieldInfo:
        return self.section.model_fields[self.field]

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
def places() -> dict[str, Place]:
    """Every leaf of the schema by its dotted key, in the order it is declared."""
    return {".".join(place.path): place for place in _places(None, ())}


def _places(section: type[Section] | None, prefix: Names) -> Iterator[Place]:
    for name, info in fields_of(section).items():
        below = subsection(info)
        if below is not None:
            yield from _places(below, (*prefix, name))
        else:
            yield Place(_owner(section, name), prefix, name)


def find(path: Names) -> Place | type[Section]:
    """The place of a key, or the section it names; UnknownKey if there is none."""
    path = current_path(path)
    section: type[Section] | None = None
    for depth, key in enumerate(path):
        info = fields_of(section).get(key)
        if info is None:
            raise UnknownKey(_unknown(path[:depth], key, section))
        below = subsection(info)
        if below is None:
            return _inside(Place(_owner(section, key), path[:depth], key), path[depth + 1 :])
        section = below
    assert section is not None, "an empty path names nothing"
    return section


def _inside(place: Place, rest: Names) -> Place:
    if not rest:
        return place
    if get_origin(place.info.annotation) is not dict:
        reason = f"unknown key; {'.'.join(place.path)} has nothing below it"
        raise UnknownKey(Problem((*place.path, *rest), reason))
    if not is_free(place.info):
        rest = (".".join(rest),)  # its values are single ones, so a dot belongs to the name
    return Place(place.section, place.prefix, place.field, rest)


def is_free(info: FieldInfo) -> bool:
    """A mapping whose values may be anything, e.g. the options of a trainer."""
    arguments = get_args(info.annotation)
    return get_origin(info.annotation) is dict and arguments[1] is Any


def _unknown(prefix: Names, key: str, section: type[Section] | None) -> Problem:
    return Problem((*prefix, key), unknown_key(prefix, key, tuple(fields_of(section)), tuple(places())))


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
    for place in places().values():
        if not place.info.is_required():
            value = to_jsonable_python(place.info.get_default(call_default_factory=True, validated_data={}))
            found.update(_entries(place.path, value, place.info))
    return found
