"""Repeat: what a new run takes over from one that has ended, beside its dataset.

Whatever was said when the old run was submitted holds again: on the command line, over the API, in the environment, by
its campaign. What files say is read again, so that a mended profile counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tunesmith.core.errors import Refused
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.keys import current_path
from tunesmith.profiles.layers import Entries, Entry, Layer, Origin, is_from_a_file
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.spec import AdapterRef, RunSpec
from tunesmith.store.database import Database

_SECTIONS = (
    "recipe",
    "budgets",
    "validation",
    "checkpoints",
    "evaluation",
    "gate",
    "shadow",
    "deploy",
    "watch",
    "targets",
)  # fmt: skip
"""What a spec holds as the profile says it."""


def said_at_submit(spec: RunSpec) -> Entries:
    """The values of a run that no file said, each with the origin it had."""
    values = _as_a_profile_says_it(spec)
    found: Entries = {}
    for key, origin in spec.origins.items():
        names = current_path(tuple(key.split(".")))
        if not is_from_a_file(origin) and names[0] in values:
            known, value, path = _look_up(values, names)
            if known:
                found[path] = Entry(value, Origin(Layer.OVERRIDE, origin))
    return found


def start_of(
    database: Database,
    workspace: Workspace,
    profile: str,
    wanted: Literal["live", "base", "same"],
    repeats: RunSpec | None,
    version_id: str | None = None,
) -> AdapterRef | None:
    """The weights a run starts from: None for the bare base. `same` is what the repeated run started from.

    `version_id`: from this version, whatever is wanted else.
    """
    before = repeats if wanted == "same" else None
    if version_id is None and (wanted == "base" or (before is not None and before.start is None)):
        return None
    with database.read() as tx:
        known = version_id or (None if before is None or before.start is None else before.start.id)
        adapter = adapters.live(tx, profile) if known is None else adapters.get(tx, known)
    if adapter is None:
        return None
    if adapter.state is AdapterState.REVOKED:
        if version_id is not None:
            raise Refused(f"a run cannot start from {adapter.name}: it is revoked")
        raise Refused(
            f"the run started from {adapter.name}, which is revoked since; "
            "choose where to start: `run retry --start live` or `--start base`"
        )
    return AdapterRef(id=adapter.id, path=str(workspace.data_dir / adapter.path), digest=adapter.digest)


def _as_a_profile_says_it(spec: RunSpec) -> dict[str, Any]:
    whole = spec.model_dump(mode="json")
    trainer: dict[str, Any] = {"options": whole["trainer_options"]}
    if not spec.dry_run:  # a dry run has a trainer of its own
        trainer["kind"] = spec.trainer
    return {
        **{section: whole[section] for section in _SECTIONS},
        "trainer": trainer,
        "hardware": {"tier": spec.hardware_tier, "processes": spec.num_processes, "memory_gb": spec.memory_gb},
        "base": {"context": spec.base.context},
    }


def _look_up(values: Mapping[str, Any], names: tuple[str, ...]) -> tuple[bool, Any, tuple[str, ...]]:
    """Whether the key is there, its value, and its path; in a mapping of free names a dot may belong to the name."""
    at: Any = values
    for depth, name in enumerate(names):
        rest = ".".join(names[depth:])
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, Mapping) and rest in at:
            return True, at[rest], (*names[:depth], rest)
        else:
            return False, None, names
    return True, at, names
