"""Scopes: what each route needs, and the label and scopes of a bearer token."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tunesmith.core.errors import ConfigError
from tunesmith.core.ids import is_name
from tunesmith.serving.gateway.api_errors import ApiError


class Scope(StrEnum):
    READ = "read"  # which models there are, how the server is
    CHAT = "chat"
    FEEDBACK = "feedback"  # on answers that the same key was given
    ANY_VERSION = "any_version"  # chat with versions that never went live, or were taken back
    ANY_ANSWER = "any_answer"  # feedback on answers that other keys were given
    CONTROL = "control"  # loads and unloads; only with the server's own token


OPEN = frozenset({Scope.READ, Scope.CHAT, Scope.FEEDBACK})
"""What a key may do by default."""
GIVEN = frozenset(Scope) - {Scope.CONTROL}
"""What a key may have."""
_NEEDS = {Scope.ANY_VERSION: Scope.CHAT, Scope.ANY_ANSWER: Scope.FEEDBACK}
_BEARER = re.compile(r"Bearer ([\x21-\x7e]{1,512})\Z", re.IGNORECASE)
_MAX_KEY_FILE = 1 << 20
_MIN_KEY_LENGTH = 16
_LABEL = "label="
_DERIVED = "key-"


@dataclass(frozen=True)
class Caller:
    """Who sends a request: the label that answers and ratings are stored under, and the scopes of the key."""

    label: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes

    def owns(self, key_label: str | None) -> bool:
        """Whether this caller may rate an answer that was served to `key_label`; None: it was served to nobody."""
        return key_label is not None and (key_label == self.label or self.may(Scope.ANY_ANSWER))


LOCAL = Caller("local", OPEN | {Scope.ANY_VERSION})
"""Every caller of this machine where there is no key file: nobody can tell them apart, so they are one."""
SERVER = Caller("server", frozenset(Scope))
"""Who has the server's own token."""
_RESERVED = frozenset({LOCAL.label, SERVER.label})


@dataclass(frozen=True)
class Keys:
    """The tokens that open something, as hashes: all of one length to compare, and nothing that could be logged."""

    control: bytes
    others: tuple[tuple[bytes, Caller], ...] | None
    """From the key file; None: there is none, and callers of this machine need no key."""

    @classmethod
    def of(cls, token: str, key_file: Path | None) -> Keys:
        return cls(_hash(token), None if key_file is None else read_key_file(key_file))

    def caller_of(self, authorization: str | None) -> Caller:
        """Whose key the header of a request holds; raises 401."""
        if authorization is None:
            if self.others is None:
                return LOCAL
            raise _unauthorized("this server requires an API key: Authorization: Bearer KEY")
        match = _BEARER.match(authorization)
        if match is None:
            raise _unauthorized("the Authorization header is not `Bearer KEY` with a key of 1 to 512 characters")
        given = _hash(match[1])
        found: Caller | None = LOCAL if self.others is None else None
        for known, caller in self.others or ():  # all of them, so that the time tells nothing
            found = caller if hmac.compare_digest(known, given) else found
        if hmac.compare_digest(self.control, given):
            found = SERVER
        if found is None:
            raise _unauthorized("unknown API key; use a key from serve.key_file")
        return found


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def derived_label(key: str) -> str:
    """The label of a key whose line gives none: the same for ever, and nothing that the key could be told from."""
    return _DERIVED + hashlib.sha256(f"label of\0{key}".encode()).hexdigest()[:12]


def read_key_file(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """One key a line: `KEY [scope,scope] [label=NAME]`. No error repeats a word of the file: it holds secrets."""
    try:
        lines = _content(path).decode("utf-8-sig").splitlines()  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(
            f"serve.key_file: {path} does not exist; write one key a line into it and run chmod 600 on it, "
            "or take serve.key_file out of tunesmith.yaml"
        ) from None
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(
            f"serve.key_file: {path} cannot be read ({why}); whoever runs the server must own it, with mode 600"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"serve.key_file: {path} is no text in UTF-8; write one key a line into it") from None
    keys: dict[bytes, tuple[int, Caller]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = words.pop(0)
        if len(key) < _MIN_KEY_LENGTH or not _BEARER.match(f"Bearer {key}"):
            raise _wrong(number, f"does not begin with a key of {_MIN_KEY_LENGTH} to 512 visible ASCII characters")
        label = _label(words.pop(), number) if words and words[-1].startswith(_LABEL) else derived_label(key)
        scopes = _scopes(words.pop(), number) if words else OPEN
        if words:
            raise _wrong(number, "has words too many; write `KEY`, `KEY scope,scope` or `KEY scope,scope label=NAME`")
        hashed = _hash(key)
        if hashed in keys:
            raise _wrong(number, f"has the same key as line {keys[hashed][0]}; leave one of them out")
        keys[hashed] = (number, Caller(label, scopes))
    if not keys:
        raise ConfigError(f"serve.key_file: {path} holds no key; write one a line, or unset serve.key_file")
    return tuple((hashed, caller) for hashed, (_, caller) in keys.items())


def _content(path: Path) -> bytes:
    """What is read is the very file that was looked at, also where another one is put in its place meanwhile."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # a pipe would block
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_KEY_FILE:
            raise ConfigError(f"serve.key_file: {path} is no file with keys")
        if about.st_mode & 0o077:
            raise ConfigError(f"serve.key_file: others may read {path}; run chmod 600 on it")
        return file.read(_MAX_KEY_FILE)


def _label(word: str, number: int) -> str:
    label = word.removeprefix(_LABEL)
    if not is_name(label) or label in _RESERVED or label.startswith(_DERIVED):
        raise _wrong(
            number,
            "has a label that cannot be used; take lower-case letters, digits, . _ and -, beginning with a letter or "
            f"digit, not {' or '.join(sorted(_RESERVED))}, and not {_DERIVED}…",
        )
    return label


def _scopes(text: str, number: int) -> frozenset[Scope]:
    names = text.split(",")
    if not GIVEN.issuperset(names):
        raise _wrong(number, f"gives a scope that a key cannot have; a key may have {', '.join(sorted(GIVEN))}")
    scopes = frozenset(map(Scope, names))
    for wide, narrow in _NEEDS.items():
        if wide in scopes and narrow not in scopes:
            raise _wrong(number, f"gives {wide} without {narrow}, which opens nothing; give both")
    return scopes


def _wrong(number: int, problem: str) -> ConfigError:
    return ConfigError(f"serve.key_file: line {number} {problem}")
