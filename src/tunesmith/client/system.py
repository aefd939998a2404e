"""`client.system`: the e-stop, the inbox, workers, the doctor. What only one of them needs is imported there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunesmith.core.errors import UsageError, did_you_mean, quoted
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.client.inbox import InboxItem
    from tunesmith.orchestration.worker import Worker
    from tunesmith.runs.queries.switches import Switch
    from tunesmith.runs.queries.workers import Worker as AliveWorker


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    state: str  # ok | warning | broken
    finding: str
    fix: str = ""


class System:
    def __init__(self, session: Session) -> None:
        self._session = session

    def estop(self, on: bool, reason: str = "") -> Switch:
        """On: no training, curriculum or deployment is started, and what is open is interrupted with a checkpoint."""
        from tunesmith.runs.queries import switches

        with self._session.database.write() as tx:
            switches.turn(tx, switches.ESTOP, on, actor=self._session.actor, reason=reason)
            return switches.show(tx, switches.ESTOP)

    def show_estop(self) -> Switch:
        from tunesmith.runs.queries import switches

        with self._session.database.read() as tx:
            return switches.show(tx, switches.ESTOP)

    def workers(self) -> list[AliveWorker]:
        from tunesmith.runs.queries import workers

        with self._session.database.read() as tx:
            return workers.alive(tx)

    def worker(self, kinds: Collection[str] | None = None) -> Worker:
        """A worker for this workspace, to be run in this process; by default for every kind of task there is."""
        from tunesmith.orchestration.worker import STAGES, Worker

        session, known = self._session, {kind.value: kind for kind in STAGES}
        for name in kinds or ():
            if name not in known:
                raise UsageError(f"no kind of task {quoted(name)} that a worker does{did_you_mean(name, known)}")
        wanted = list(STAGES) if kinds is None else [known[name] for name in kinds]
        return Worker(session.database, session.workspace, session.settings, wanted)

    def inbox(self) -> list[InboxItem]:
        """Everything that waits for a person, the oldest first."""
        from tunesmith.client.inbox import read_inbox

        return read_inbox(self._session)

    def doctor(self) -> list[Check]:
        """Look at the installation and the workspace; every finding says how to repair it."""
        from tunesmith.client.doctor import Doctor

        return Doctor(self._session).look()
