"""The one resolver: schema defaults < profile < campaign < project file < environment < overrides, with origins."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import ValidationError

from tunesmith.core.errors import ConfigError, NotFound, quoted
from tunesmith.core.files import canonical_json, sha256_text
from tunesmith.core.ids import is_name
from tunesmith.core.section import Section
from tunesmith.profiles.keys import Problem, SchemaField, UnknownKey, current_path, find, schema_fields, subsection
from tunesmith.profiles.layers import (
    Entries,
    Layer,
    Origin,
    Problems,
    default_layer,
    document_layer,
    dotted,
    environment_layer,
    mapping_layer,
    merge,
    override_layer,
)
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.sections.watch import QualityWatch
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.value_checks import describe
from tunesmith.profiles.workspace import Workspace
from tunesmith.profiles.yaml_files import KeyPath, parse_yaml, read_text

if TYPE_CHECKING:
    from tunesmith.profiles.queries import Campaign
    from tunesmith.store.database import Database

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Resolved:
    """A profile as it holds for one run, the workspace's settings, and who said what."""

    profile: Profile
    settings: Settings
    values: dict[str, Any]
    """Every value there is, by dotted key, as JSON holds it."""
    origins: dict[str, Origin]
    """Who said it, for the same keys."""

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the profile's values; who said them does not matter, nor what opens the next round, or a cycle."""
        values = self.profile.model_dump(mode="json", exclude={"campaign"})
        if values["curriculum"]["enabled"] == "auto":
            values["curriculum"]["enabled"] = False  # what stood there before there was `auto`: a run is the same by it
        if self.profile.watch.quality == QualityWatch():
            del values["watch"]["quality"]  # a run keeps the fingerprint that it had before there was this section
        return sha256_text(canonical_json(values))

    def said(self) -> dict[str, str]:
        """Where each key of the profile that is not a schema default came from."""
        return {
            key: str(origin)
            for key, origin in self.origins.items()
            if origin.layer is not Layer.DEFAULT and key.partition(".")[0] in Profile.model_fields
        }


@dataclass(frozen=True)
class ProfileEntry:
    """One line of `profile list`: the profile, or why it cannot be read."""

    name: str
    profile: Profile | None
    error: str | None


def resolve(
    profile_name: str,
    *,
    workspace: Workspace,
    campaign_overrides: Mapping[str, Any] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    environ: Mapping[str, str] | None = None,
    kept: Entries | None = None,
) -> Resolved:
    """The profile and settings that hold now; one ConfigError with every problem, one line each.

    `kept` is what an earlier run was told and is told again: stronger than all but the overrides.
    """
    files = (workspace.profiles_dir / f"{profile_name}.yaml", workspace.project_file)
    with _repeating_nothing_of_foreign(files, workspace):
        return _resolve(profile_name, workspace, campaign_overrides, overrides, environ, kept)


def resolve_now(
    database: Database,
    workspace: Workspace,
    profile_name: str,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    environ: Mapping[str, str] | None = None,
    kept: Entries | None = None,
) -> tuple[Resolved, Campaign | None]:
    """The same with the overrides of the campaign that is in force for the profile, and that campaign."""
    from tunesmith.profiles.queries import in_force  # now: who only reads files needs no SQL

    with database.read() as tx:
        campaign = in_force(tx, profile_name)
    resolved = resolve(
        profile_name,
        workspace=workspace,
        campaign_overrides=None if campaign is None else campaign.overrides,
        overrides=overrides,
        environ=environ,
        kept=kept,
    )
    return resolved, campaign


def _resolve(
    profile_name: str,
    workspace: Workspace,
    campaign_overrides: Mapping[str, Any] | None,
    overrides: Sequence[str] | Mapping[str, Any],
    environ: Mapping[str, str] | None,
    kept: Entries | None,
) -> Resolved:
    profile = _profile_text(workspace, profile_name)
    project = _Text(read_text(workspace.project_file, workspace.project_file.name), workspace.project_file.name)
    ours = _of_ours(os.environ if environ is None else environ)
    if kept or overrides:
        return _lay(profile_name, profile, project, campaign_overrides or {}, ours, kept or {}, overrides)
    return _lay_once(profile_name, profile, project, json.dumps(dict(campaign_overrides or {})), ours)


class _Text(NamedTuple):
    """A file as it was read, and how errors call it."""

    content: str
    shown: str


_Environ = tuple[tuple[str, str], ...]


def _of_ours(environ: Mapping[str, str]) -> _Environ:
    return tuple(sorted(item for item in environ.items() if item[0].upper().startswith("TUNESMITH")))


@lru_cache(maxsize=64)
def _lay_once(name: str, profile: _Text, project: _Text, campaign: str, environ: _Environ) -> Resolved:
    """The same words mean the same profile: every captured answer asks, and the files hardly ever change."""
    return _lay(name, profile, project, json.loads(campaign), environ, {}, ())


def _lay(
    profile_name: str,
    profile_text: _Text,
    project: _Text,
    campaign_overrides: Mapping[str, Any],
    environ: _Environ,
    kept: Entries,
    overrides: Sequence[str] | Mapping[str, Any],
) -> Resolved:
    document = parse_yaml(*profile_text)
    problems = Problems()
    entries = merge(default_layer(), document_layer(Layer.PROFILE, document, problems))
    named = document.tree.get("name")
    if isinstance(named, str) and named != profile_name:
        reason = f"is {quoted(named)}, but the file is {profile_name}.yaml; make them equal"
        problems.add(document.where(("name",)), Problem(("name",), reason))
    entries = merge(entries, mapping_layer(Layer.CAMPAIGN, "campaign", campaign_overrides, problems))
    entries = _lay_workspace_over(entries, project, environ, problems)
    entries = merge(entries, kept)
    entries = merge(entries, override_layer(overrides, problems, Layer.OVERRIDE))
    problems.raise_any()
    profile = _build(Profile, entries, document.shown)
    settings = _build(Settings, entries, project.shown)
    dump = {**settings.model_dump(mode="json"), **profile.model_dump(mode="json")}
    paths = sorted(entries, key=_rank)
    return Resolved(
        profile,
        settings,
        values={".".join(path): reduce(getitem, path, dump) for path in paths},
        origins={".".join(path): entries[path].origin for path in paths},
    )


def resolve_settings(
    workspace: Workspace,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> Settings:
    """The workspace's settings, without any profile; `overrides` are options of one command, such as `serve --port`."""
    problems = Problems()
    with _repeating_nothing_of_foreign((workspace.project_file,), workspace):
        name = workspace.project_file.name
        project = _Text(read_text(workspace.project_file, name), name)
        ours = _of_ours(os.environ if environ is None else environ)
        entries = _lay_workspace_over(default_layer(), project, ours, problems)
        # what holds for the whole workspace may be said here, which an override of one run may not
        entries = merge(entries, override_layer(overrides, problems, Layer.ENVIRONMENT))
        problems.raise_any()
        return _build(Settings, entries, name)


@contextmanager
def _repeating_nothing_of_foreign(files: Sequence[Path], workspace: Workspace) -> Iterator[None]:
    """An error quotes a file's words. A link may lead to a file that whoever sees the error must not read."""
    try:
        yield
    except ConfigError:
        for path in files:
            if path.is_symlink() and not path.resolve().is_relative_to(workspace.root.resolve()):
                raise ConfigError(
                    f"{path.relative_to(workspace.root)}: cannot be used. It is a link to a file outside the "
                    "workspace, so no word of it is repeated here; copy the file into the workspace to see why"
                ) from None
        raise


def check_overrides(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What a campaign may say, checked when it is created; returned flat, by dotted key, ready to store."""
    problems = Problems()
    entries = override_layer(overrides, problems, Layer.CAMPAIGN)
    problems.raise_any()
    return {".".join(path): entry.value for path, entry in entries.items()}


def list_profiles(workspace: Workspace, environ: Mapping[str, str] | None = None) -> list[ProfileEntry]:
    """Every profile of the workspace; a broken one carries its error instead of hiding the others."""
    return [_entry(path, workspace, environ) for path in _profile_files(workspace)]


def _entry(path: Path, workspace: Workspace, environ: Mapping[str, str] | None) -> ProfileEntry:
    name, shown = path.stem, f"{path.parent.name}/{path.name}"
    if path.suffix != ".yaml":
        return ProfileEntry(name, None, f"{shown}: is not read; rename it to {name}.yaml")
    if not is_name(name):
        reason = "use lower-case letters, digits, '.', '_' and '-' only in the file's name, at most 63"
        return ProfileEntry(name, None, f"{shown}: {reason}")
    try:
        return ProfileEntry(name, resolve(name, workspace=workspace, environ=environ).profile, None)
    except ConfigError as error:
        return ProfileEntry(name, None, error.message)


def why_no_runs(workspace: Workspace, name: str) -> str | None:
    """What a profile's own file says against training and deploying for it now; None: nothing.

    No other layer has a say in this, so that who disables a profile has stopped what waits, too.
    """
    try:
        with _repeating_nothing_of_foreign((workspace.profiles_dir / f"{name}.yaml",), workspace):
            document = parse_yaml(*_profile_text(workspace, name))
    except NotFound:
        return f"profile {name} is gone: there is no {workspace.profiles_dir.name}/{name}.yaml"
    except ConfigError as error:
        return f"profile {name} cannot be read: {error.message}"
    enabled = document.tree.get("enabled", True)
    if enabled is True:
        return None
    return f"profile {name} is disabled: {document.tree.get('disabled_reason') or 'its file gives no reason'}"


def _lay_workspace_over(entries: Entries, project: _Text, environ: _Environ, problems: Problems) -> Entries:
    """Project file and environment hold for every profile, and for the settings."""
    entries = merge(entries, document_layer(Layer.PROJECT, parse_yaml(*project), problems))
    return merge(entries, environment_layer(dict(environ), problems))


def _profile_text(workspace: Workspace, name: str) -> _Text:
    path = workspace.profiles_dir / f"{name}.yaml"
    if not is_name(name) or not path.exists():
        hint = f"profiles are files in {workspace.profiles_dir.name}/, e.g. profiles/NAME.yaml"
        known = [known.stem for known in _profile_files(workspace)]
        raise NotFound.named("profile", name, known, hint)
    shown = f"{workspace.profiles_dir.name}/{path.name}"
    return _Text(read_text(path, shown), shown)


def _profile_files(workspace: Workspace) -> list[Path]:
    if not workspace.profiles_dir.is_dir():
        return []
    return sorted(path for path in workspace.profiles_dir.iterdir() if path.suffix in (".yaml", ".yml"))


def _build(model: type[S], entries: Entries, shown: str) -> S:
    """The model of everything said; only what takes several keys to see can still be wrong."""
    tree: dict[str, Any] = {name: {} for name, info in model.model_fields.items() if subsection(info)}
    for path, entry in entries.items():
        if path[0] in model.model_fields:
            _plant(tree, path, entry.value)
    try:
        return model.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problems = Problems()
        for detail in error.errors():
            if detail["type"] == "missing":
                key = dotted(detail["loc"])
                doc = schema_fields()[key].doc.rstrip(".")
                problems.add(shown, Problem(detail["loc"], f"is required ({describe(key)}): {doc}"))
            else:  # a rule of ours: "key: reason"
                key, _, reason = detail["msg"].removeprefix("Value error, ").partition(": ")
                path = tuple(key.split("."))
                problems.add(_where(entries, path, shown), Problem(path, reason))
        raise problems.as_error() from None


def _plant(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _where(entries: Entries, path: KeyPath, otherwise: str) -> str:
    """Who said the key that a rule complains about; for a default, the strongest layer that spoke in its section."""
    for place in (path, path[:-1]):
        said = [entry.origin for known, entry in entries.items() if place and known[: len(place)] == place]
        said = [origin for origin in said if origin.layer is not Layer.DEFAULT]
        if said:
            return max(said, key=lambda origin: list(Layer).index(origin.layer)).where
    return otherwise


def _rank(path: tuple[str, ...]) -> int:
    """In the order of the schema, so that listings read well."""
    place = find(path)
    assert isinstance(place, SchemaField), "entries are values, not sections"
    return _ranks()[".".join((*place.prefix, place.field))]


@cache
def _ranks() -> dict[str, int]:
    return {key: rank for rank, key in enumerate(schema_fields())}


_PASSWORD = re.compile(r"(?<=://)([^/@:]*):.*@|(?<=password=)[^&]*")


@dataclass(frozen=True)
class ExplainedKey:
    """One key as `config explain` shows it: its value, which layer set it, and its documentation."""

    key: str
    value: Any
    origin: Origin
    doc: str


def explain(resolved: Resolved, key: str | None = None) -> list[ExplainedKey]:
    """Return all keys, or one key, or the keys of one section."""
    if key:
        wanted = current_path(tuple(key.split(".")))
        key = ".".join(wanted)
        try:
            find(wanted)
        except UnknownKey as unknown:
            raise NotFound(f"{dotted(wanted)}: {unknown.problem.reason}") from None
    return [
        ExplainedKey(
            name, without_password(resolved.values[name]) if name == "store.url" else resolved.values[name], origin, doc
        )
        for name, origin in resolved.origins.items()
        if not key or name == key or name.startswith(f"{key}.")
        for doc in [_doc(name)]
    ]


def without_password(url: str | None) -> str | None:
    """A database URL that may be shown."""
    return _PASSWORD.sub(lambda found: f"{found[1]}:…@" if found[1] is not None else "…", url) if url else url


def _doc(name: str) -> str:
    field = next(known for known in schema_fields() if name == known or name.startswith(f"{known}."))
    return schema_fields()[field].doc
