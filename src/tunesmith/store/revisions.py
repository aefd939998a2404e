"""The schema versions of the store, in order."""

from __future__ import annotations

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009")
HEAD = REVISIONS[-1]
