"""The scheduler: the worker that holds its lease opens the rounds that are due. No process of its own.

Two never open the same round: the transaction that queues it requires the lease, and the store has room for one
unfinished automatic run per campaign. A holder that was suspended past its lease finds it lost and changes nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tunesmith.core import logs
from tunesmith.core.clock import boot_seconds
from tunesmith.core.errors import LeaseLost, StoreCorrupt, TunesmithError
from tunesmith.orchestration.rounds.facts import next_dataset, round_status
from tunesmith.orchestration.rounds.open import open_round
from tunesmith.orchestration.rounds.rules import NextDataset, RoundFacts
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import scheduler_leases as leases
from tunesmith.runs.queries.scheduler_leases import SchedulerLease
from tunesmith.store.database import STOP_SIGNALS, Database

NAME = "scheduler"
_LOOK_AGAIN_S = 600.0
"""How long a reading of what a round would be made of counts, while nothing new came in and it did not suffice."""

log = logs.logger("scheduler")


class Scheduler:
    def __init__(self, database: Database, workspace: Workspace, worker_id: str, lease_s: float) -> None:
        self.database = database
        self.workspace = workspace
        self.worker_id = worker_id
        self.lease_s = lease_s
        self._lease: SchedulerLease | None = None
        self._seen: dict[str, tuple[object, float, NextDataset]] = {}

    def open_due(self) -> list[str]:
        """Open a round for every campaign whose next one is due; the ids of the runs. Nothing without the lease."""
        with self.database.read() as tx:
            active = campaigns.all_active(tx)
        if not active or not self._take():
            return []
        with self._renewed() as lease:
            opened = [self._open_if_due(campaign, lease) for campaign in active]
        return [run_id for run_id in opened if run_id is not None]

    def leave(self) -> None:
        """Let another worker look at once."""
        if self._lease is not None:
            with self.database.write() as tx:
                leases.release(tx, self._lease)
            self._lease = None

    def _take(self) -> bool:
        with self.database.write(durable=False) as tx:
            self._lease = leases.take(tx, NAME, self.worker_id, self.lease_s, self._lease)
        return self._lease is not None

    def _open_if_due(self, campaign: Campaign, lease: SchedulerLease) -> str | None:
        """One campaign that cannot be opened hides no other."""
        about = {"campaign": campaign.id, "profile": campaign.profile}
        try:
            status = round_status(self.database, self.workspace, campaign, look_at_data=self._look_at_data)
            if not status.decision.opens:
                return None
            made = open_round(
                self.database, self.workspace, status, actor=self.worker_id, fence=partial(leases.require, lease=lease)
            )
        except StoreCorrupt:
            raise
        except LeaseLost as error:
            log.warning("scheduler_lease_lost", reason=str(error), **about)
            return None
        except TunesmithError as error:  # also a store without room for a dataset: the worker's own tasks go on
            log.warning("round_not_opened", reason=str(error), **about)
            return None
        except Exception:  # a full disk, or an error of ours: never a worker that dies
            log.exception("round_not_opened", **about)
            return None
        start = "" if status.facts is None or status.facts.start is None else status.facts.start.name
        log.info("round_opened", run=made.run_id, reason=status.decision.because, start=start, **about)
        return made.run_id

    def _look_at_data(self, checked: CheckedProfile, facts: RoundFacts) -> NextDataset:
        """Read what the round would be made of; not every minute again where it did not suffice and nothing changed."""
        name = checked.profile.name
        state = (facts.about.new, checked.resolved.fingerprint, checked.profile.campaign, facts.start)
        known = self._seen.get(name)
        if known is not None and known[0] == state and boot_seconds() - known[1] < _LOOK_AGAIN_S:
            return known[2]
        data = next_dataset(self.database, self.workspace, checked, facts)
        self._seen[name] = (state, boot_seconds(), data)
        return data

    @contextmanager
    def _renewed(self) -> Iterator[SchedulerLease]:
        """Keep the lease while a dataset is assembled, which may take longer than it lasts."""
        lease, ended = self._lease, threading.Event()
        assert lease is not None

        def renew() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Ctrl-Z is the main thread's
            while not ended.wait(self.lease_s / 3):
                try:
                    with self.database.write(durable=False) as tx:
                        leases.renew(tx, lease, self.lease_s)
                except LeaseLost:
                    return
                except TunesmithError as error:  # the lease may run out, and the next opening is refused
                    log.warning("scheduler_lease_not_renewed", reason=str(error))

        thread = threading.Thread(target=renew, name="scheduler-lease", daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            ended.set()
            thread.join()
