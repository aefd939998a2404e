"""Counts requests by version for the watch: answered in how many seconds, or failed. Never delays an answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from tunesmith.core import logs
from tunesmith.experience.queries import traffic
from tunesmith.experience.queries.traffic import Key
from tunesmith.experience.rules.traffic import FAILED, range_of
from tunesmith.runs.session import Session
from tunesmith.serving.gateway.api_errors import status_of
from tunesmith.serving.gateway.bodies import ClientDisconnected

_INTERVAL_S = 1.0
_DELETE_INTERVAL_S = 3600.0
_FAULTS = frozenset({500, 502, 504})
"""Statuses that speak against what answered; 503 means busy, restarting or lent to a training, 4xx is the caller's."""
_ENDED_ENGINE = frozenset({"engine_died", "engine_hung"})
_ONE_END_S = 1.0
"""All answers of an engine fail at once when it ends; that is one failure."""
_MAX_UNSTORED = 10_000
log = logs.logger("traffic")


class TrafficCounter:
    """Counts in memory; a task adds them to the store every second. What a killed server had not stored is lost."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counts: Counter[Key] = Counter()
        self._ended: dict[str, float] = {}
        self._deleted_at: float | None = None

    def answered(self, profile: str, version: str, seconds: float) -> None:
        self._counts[profile, version, range_of(seconds)] += 1

    def failed(self, profile: str, version: str, error: Exception) -> None:
        """Count an error that speaks against the version or what serves it; others are left out."""
        if isinstance(error, ClientDisconnected | OSError):
            return
        if getattr(error, "code", None) in _ENDED_ENGINE:
            now = time.monotonic()
            if now - self._ended.get(version, -_ONE_END_S) < _ONE_END_S:
                return
            self._ended[version] = now
        elif status_of(error) not in _FAULTS:
            return
        self._counts[profile, version, FAILED] += 1

    async def run(self) -> None:
        """Store the counts until cancelled; while the store is away they wait."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await asyncio.to_thread(self.flush)
            except Exception as error:
                log.warning("traffic_not_stored", reason=f"{type(error).__name__}: {error}")

    def flush(self) -> None:
        """Add what was counted to the store; blocks. What could not be added is counted again."""
        counts, self._counts = self._counts, Counter()
        now = time.monotonic()
        is_due = self._deleted_at is None or now - self._deleted_at > _DELETE_INTERVAL_S
        if not counts and not is_due:
            return
        try:
            with self._session.database.write(durable=False) as tx:
                traffic.add(tx, counts)
                if is_due:
                    traffic.delete_old(tx)
        except BaseException:
            if len(self._counts) < _MAX_UNSTORED:
                self._counts.update(counts)
            raise
        self._deleted_at = now if is_due else self._deleted_at
