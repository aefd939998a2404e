"""Whether the worker still renews the keepalive file, told by one's own clock.

The file holds ``COUNTER BOOT_SECONDS BOOT_ID``. The counter says that it was renewed; the stamp says when, which
matters after this process itself was stopped: a renewal seen late is not a renewal made late.
"""

from __future__ import annotations

import os
import time


class KeepaliveClock:
    """How long ago the file was renewed, as far as this process can know."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._boot = _boot_id()
        self._content = self._read()
        self._looked = self._renewed = _now()

    def age_s(self) -> float:
        """Look at the file; seconds since its last renewal. A file that cannot be read counts as not renewed."""
        content, now = self._read(), _now()
        if content and content != self._content:
            # it changed between the last look and now; the stamp may say when, nothing may say more than that
            self._renewed = min(max(self._stamp(content), self._looked), now)
            self._content = content
        self._looked = now
        return now - self._renewed

    def _read(self) -> bytes:
        try:
            handle = os.open(self._path, os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.read(handle, 200)
        except OSError:
            return b""
        finally:
            os.close(handle)

    def _stamp(self, content: bytes) -> float:
        try:
            _, seconds, boot = content.split()
            return float(seconds) if boot == self._boot else 0.0
        except ValueError:
            return 0.0


def keepalive_content(counter: int) -> bytes:
    """What a renewal writes."""
    return b"%d %.6f %s\n" % (counter, _now(), _boot_id())


def _now() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as source:
            return source.read(100).strip()
    except OSError:
        return b"unknown-boot"
