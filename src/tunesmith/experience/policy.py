"""What holds for the experiences of a profile now: its policy with every layer, and its base's control tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from tunesmith.core.errors import NotFound, TunesmithError
from tunesmith.experience.capture import CaptureRules
from tunesmith.profiles.architecture import read_control_tokens
from tunesmith.profiles.checks import ProfileCheck
from tunesmith.profiles.resolve import resolve_now
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.profiles.sections.screens import chosen_screens
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.session import Session
from tunesmith.store.database import Database

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def rules_of(session: Session, profile: str) -> CaptureRules:
    """The rules of a profile; one that the store has never seen is checked and locked on the way."""
    return resolve_rules(
        session.database,
        session.workspace,
        profile,
        actor=session.actor,
        environ=session.environ,
        check=session.check_profile,
    )


def resolve_rules(
    database: Database,
    workspace: Workspace,
    profile: str,
    *,
    actor: str,
    environ: Mapping[str, str] | None,
    check: ProfileCheck,
) -> CaptureRules:
    """The same without a session, for a worker."""
    with database.read() as tx:
        is_locked = profiles.lock_of(tx, profile) is not None
    resolved = resolve_now(database, workspace, profile, environ=environ)[0].profile
    if not is_locked:
        lock = check(database, workspace, profile, environ=environ).lock
        with database.write() as tx:
            profiles.lock(tx, profile, lock, actor=actor)
    tokens = _control_tokens(workspace.locate(resolved.base.path))
    data = resolved.data
    return CaptureRules(
        resolved.experience, tokens, chosen_screens(data.screens), data.detectors, max_bad_share=data.max_bad_share
    )


def thresholds_of(
    database: Database, workspace: Workspace, profile: str, environ: Mapping[str, str] | None
) -> Thresholds:
    """Where the classes begin; the defaults for a profile whose file is gone: feedback about it still counts."""
    try:
        resolved, _ = resolve_now(database, workspace, profile, environ=environ)
    except NotFound:
        return Thresholds()
    return resolved.profile.experience.classes


def _control_tokens(folder: Path) -> tuple[str, ...]:
    """Those of the base, read again when its files change; none where the base is not on this machine."""
    stamps = []
    for name in _TOKENIZER_FILES:
        try:
            found = (folder / name).stat()
            stamps.append((name, found.st_size, found.st_mtime_ns))
        except OSError:
            continue
    return _read_tokens(folder, tuple(stamps)) if stamps else ()


@lru_cache(maxsize=64)
def _read_tokens(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    try:
        return read_control_tokens(folder)
    except TunesmithError:
        return ()  # preparing a dataset refuses such a base by name; an answer that was given is kept all the same
