"""Who may do what: a scope for every route, and the scopes that a bearer token brings."""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tunesmith.errors import ConfigError, show
from tunesmith.gateway.refusals import ApiError


class Scope(StrEnum):
    READ = "read"  # which models there are, how the server is
    CHAT = "chat"
    FEEDBACK = "feedback"
    CONTROL = "control"  # loads and unloads; only with the server's own token


OPEN = frozenset({Scope.READ, Scope.CHAT, Scope.FEEDBACK})
"""What a caller from this machine may do without a key file, and what a key may by default."""
_BEARER = re.compile(r"Bearer ([\x21-\x7e]{1,512})\Z", re.IGNORECASE)
_MAX_KEY_FILE = 1 << 20
_SHORTEST_KEY = 16


@dataclass(frozen=True)
class Keys:
    """The tokens that open something, as hashes: all of one length to compare, and nothing that could be logged."""

    control: bytes
    others: tuple[tuple[bytes, frozenset[Scope]], ...] | None
    """From the key file; None: there is none, and callers of this machine need no key."""

    @classmethod
    def of(cls, token: str, key_file: Path | None) -> Keys:
        return cls(_hash(token), None if key_file is None else _read_key_file(key_file))

    def scopes_of(self, authorization: str | None) -> frozenset[Scope]:
        """What the header of a request opens; raises 401."""
        if authorization is None:
            if self.others is None:
                return OPEN
            raise _unauthorized("this server wants a key: Authorization: Bearer KEY")
        match = _BEARER.match(authorization)
        if match is None:
            raise _unauthorized("the Authorization header is not `Bearer KEY` with a key of 1 to 512 characters")
        given = _hash(match[1])
        found: frozenset[Scope] | None = OPEN if self.others is None else None
        for known, scopes in self.others or ():  # all of them, so that the time tells nothing
            found = scopes if hmac.compare_digest(known, given) else found
        if hmac.compare_digest(self.control, given):
            found = frozenset(Scope)
        if found is None:
            raise _unauthorized("that key opens nothing here")
        return found


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read_key_file(path: Path) -> tuple[tuple[bytes, frozenset[Scope]], ...]:
    """One key a line, with the scopes it has behind it (`KEY read,feedback`) where that is not all three."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_KEY_FILE:
            raise ConfigError(f"serve.key_file: {path} is no file with keys")
        if about.st_mode & 0o077:
            raise ConfigError(f"serve.key_file: others may read {path}; run chmod 600 on it")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.key_file: {path} cannot be read ({type(error).__name__})") from None
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words[0]) < _SHORTEST_KEY or len(words) > 2 or not _BEARER.match(f"Bearer {words[0]}"):
            raise ConfigError(
                f"serve.key_file: line {number} is not `KEY` or `KEY scope,scope` with a key of "
                f"{_SHORTEST_KEY} to 512 visible characters"
            )
        keys.append((_hash(words[0]), _scopes(words[1], number) if len(words) > 1 else OPEN))
    if not keys:
        raise ConfigError(f"serve.key_file: {path} holds no key; write one a line, or unset serve.key_file")
    return tuple(keys)


def _scopes(text: str, number: int) -> frozenset[Scope]:
    for name in text.split(","):
        if name not in OPEN:
            known = ", ".join(sorted(OPEN))
            raise ConfigError(f"serve.key_file: line {number} gives the scope {show(name)}; a key may have {known}")
    return frozenset(map(Scope, text.split(",")))
