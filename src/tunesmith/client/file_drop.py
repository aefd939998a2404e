"""`client.file_drops`: answer the requests that another program writes into a folder it shares with us."""

from __future__ import annotations

import pwd
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.core.errors import NotFound, UsageError
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.orchestration.file_drop.rules import Answer
    from tunesmith.orchestration.file_drop.units import Units


class FileDrops:
    def __init__(self, session: Session) -> None:
        self._session = session

    def answer(
        self,
        folder: str | Path,
        *,
        once: bool = False,
        campaign: str | None = None,
        allow_users: Sequence[str] = (),
        keep: int = 100,
        tell: Callable[[Answer], None] = lambda answer: None,
    ) -> bool:
        """Answer every request, follow its run to the end, and return when nothing is asked any more.

        With `once`, return when the run under way has to be waited for; False if another process is at work there.
        `campaign` is then the only one that may be asked for. `tell` is called with every answer that is written.
        """
        from tunesmith.orchestration.file_drop.answer import DropSettings, FileDrop

        if keep < 1:
            raise UsageError(f"keep is {keep}; at least one archived request stays")
        session = self._session
        users = [_user_id(name) for name in allow_users]
        settings = DropSettings(Path(folder).absolute().resolve(), campaign, users, keep)
        drop = FileDrop(
            session.database, session.workspace, settings, actor=session.actor, environ=session.environ, tell=tell
        )
        return drop.work(once=once, poll_s=session.settings.worker.poll_s)

    def units(
        self,
        folder: str | Path,
        *,
        campaign: str | None = None,
        allow_users: Sequence[str] = (),
        keep: int = 100,
    ) -> Units:
        """The systemd units that call `tunesmith campaign drop` for this folder; nothing is installed."""
        from tunesmith.orchestration.file_drop.units import units_for

        place = Path(folder).absolute().resolve()
        root = str(self._session.workspace.root)
        command = [sys.executable, "-m", "tunesmith", "--workspace", root, "campaign", "drop", str(place)]
        if campaign is not None:
            command += ["--campaign", campaign]
        for name in allow_users:
            _user_id(name)
            command += ["--allow-user", name]
        if keep != 100:
            command += ["--keep", str(keep)]
        return units_for(place, command)


def _user_id(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise NotFound.named("user", name, [entry.pw_name for entry in pwd.getpwall()]) from None
