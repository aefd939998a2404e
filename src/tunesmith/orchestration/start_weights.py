"""The weights that a run starts from: of what is live, of another version, or of the bare base.

Which of them a campaign's round takes is decided by `rounds/start_point.py`.
"""

from __future__ import annotations

from typing import Literal

from tunesmith.core.errors import Refused
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.spec import AdapterRef, RunSpec
from tunesmith.store.database import Database


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
