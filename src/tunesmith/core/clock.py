"""The only source of time. Instants are aware UTC; durations come from the boot clock, which no one can set."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


def utc_now() -> datetime:
    """Wall time, for people and for ages; never for leases or order."""
    return datetime.now(UTC)


def boot_seconds() -> float:
    """Seconds since this machine started, suspend included; the same in every process of the machine."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@cache
def boot_id() -> str:
    """Which start of which machine the boot clock counts from."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown-boot"
