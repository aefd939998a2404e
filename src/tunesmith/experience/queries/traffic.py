"""Requests by version: how many were answered in how many seconds, and how many failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from tunesmith.experience.rules.traffic import FAILED, KEPT, seconds_up_to, step_of
from tunesmith.experience.tables import traffic
from tunesmith.store.database import Tx

Key = tuple[str, str, int]
"""Profile, version, and range of seconds or `FAILED`."""


@dataclass(frozen=True)
class Requests:
    """Requests for one version in a stretch of time."""

    num_failed: int = 0
    seconds: Mapping[float, int] = field(default_factory=dict)
    """How many answers took up to so many seconds, by ranges."""

    @property
    def num_answered(self) -> int:
        return sum(self.seconds.values())


def add(tx: Tx, counts: Mapping[Key, int]) -> None:
    """Add counts to the present step of time."""
    begins_at = step_of(tx.now)
    for (profile, version, number), num in sorted(counts.items()):
        key = {"profile": profile, "version": version, "begins_at": begins_at, "range": number}
        mine = [traffic.c[name] == value for name, value in key.items()]
        more = traffic.update().where(*mine).values(num=traffic.c.num + num)
        if not tx.run(more) and not tx.insert_if_absent(traffic, **key, num=num):
            tx.run(more)  # another server was quicker


def delete_old(tx: Tx) -> int:
    """Delete the counts that nothing looks at any more; how many rows those were."""
    return tx.run(traffic.delete().where(traffic.c.begins_at < step_of(tx.now - KEPT)))


def between(tx: Tx, profile: str, version: str, begin: datetime, end: datetime | None) -> Requests:
    """Requests for a version from the step that `begin` lies in to the step that `end` lies in, or to now."""
    chosen = [traffic.c.profile == profile, traffic.c.version == version, traffic.c.begins_at >= step_of(begin)]
    if end is not None:
        chosen.append(traffic.c.begins_at <= end)
    query = sa.select(traffic.c.range, sa.func.sum(traffic.c.num)).where(*chosen).group_by(traffic.c.range)
    found = {int(number): int(num) for number, num in tx.conn.execute(query)}
    failed = found.pop(FAILED, 0)
    return Requests(failed, {seconds_up_to(number): num for number, num in sorted(found.items())})
