"""One tree of errors. Each says what happened, to what, and what to do; none shows a traceback to a user.

TunesmithError                     exit 1
├── UsageError                     exit 2: the call's words are off
├── NotFound                       no such thing; lists the nearest known name
├── ConfigError                    a profile, project file, override or environment variable is wrong
│   └── LockedError                differs from the architecture lock
├── DataError                      an input file or dataset is wrong
├── Refused                        the state of things forbids it
│   ├── InvalidTransition          that state cannot follow this one
│   └── Conflict                   somebody else moved it first, or the same key came with another body
├── LeaseLost                      this worker no longer owns the task: stop, change nothing
├── ProgramError                   a trainer or evaluator broke the protocol, or lied
├── MissingExtra                   an optional package is not installed
└── StoreError                     the database cannot be used
    ├── StoreBusy                  another process holds its write lock; nothing was changed
    ├── StoreCorrupt               never repaired by resetting
    └── StoreTooNew                written by a newer tunesmith
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable


class TunesmithError(Exception):
    """The base of everything tunesmith raises on purpose."""

    code = "error"
    exit_code = 1
    http_status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class UsageError(TunesmithError):
    """The call itself is wrong: an argument is missing, malformed or out of range."""

    code = "usage"
    exit_code = 2
    http_status = 400


class NotFound(TunesmithError):
    """Nothing has that name or id."""

    code = "not_found"
    http_status = 404

    @classmethod
    def named(cls, kind: str, name: str, known: Iterable[str] = (), hint: str = "") -> NotFound:
        close = did_you_mean(name, known)
        joint = " " if close.endswith("?") else "; "
        return cls(f"no {kind} {quoted(name)}{close}{joint + hint if hint else ''}")


class ConfigError(TunesmithError):
    """A setting is unknown, of the wrong type, or out of range."""

    code = "config"
    http_status = 422


class LockedError(ConfigError):
    """The base model or the split differs from what was locked for this profile."""

    code = "locked"


class DataError(TunesmithError):
    """Input data cannot be used; the message names file, line and reason."""

    code = "data"
    http_status = 422


class Refused(TunesmithError):
    """The thing exists, but its state forbids the action."""

    code = "refused"
    http_status = 409


class InvalidTransition(Refused):
    """That state cannot follow this one."""

    code = "invalid_transition"


class Conflict(Refused):
    """Somebody else moved it first, or the same idempotency key came with another body."""

    code = "conflict"


class LeaseLost(TunesmithError):
    """The task is leased to somebody else now; this worker must change nothing."""

    code = "lease_lost"
    http_status = 409


class ProgramError(TunesmithError):
    """A trainer or evaluator broke the protocol or reported something that is not so."""

    code = "program"


class MissingExtra(TunesmithError):
    """An optional part of tunesmith is not installed."""

    code = "missing_extra"

    @classmethod
    def named(cls, extra: str, purpose: str) -> MissingExtra:
        return cls(f"{purpose} needs the '{extra}' extra; install it with: pip install 'tunesmith[{extra}]'")


class StoreError(TunesmithError):
    """The database cannot be opened or used."""

    code = "store"
    http_status = 503


class StoreBusy(StoreError):
    """Another process holds the database's write lock for too long. Nothing was changed."""

    code = "store_busy"


class StoreCorrupt(StoreError):
    """The database file is damaged. tunesmith stops; it never resets what it cannot read."""

    code = "store_corrupt"


class StoreTooNew(StoreError):
    """The database was written by a newer tunesmith."""

    code = "store_too_new"


def quoted(name: str, limit: int = 60) -> str:
    """Return the name as an error may show it: quoted, control characters escaped, at most `limit` characters."""
    text = repr(name)
    return text if len(text) <= limit else f"{text[:limit]}…'"


def _differing_code_points(name: str, other: str) -> str:
    """Return the code points in which two names that look alike differ, or nothing."""
    plain, plain_other = (unicodedata.normalize("NFKC", text).casefold() for text in (name, other))
    if (name + other).isascii() or plain != plain_other:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    wanted, given = (" ".join(f"U+{ord(c):04X}" for c in text[at : at + 3]) or "nothing" for text in (other, name))
    return f" (there with {wanted}, here {given})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or the first dozen that exist."""
    names = sorted(known)
    if not names:
        return ""
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'{_differing_code_points(name, close[0])}?"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"; known: {listed}"
