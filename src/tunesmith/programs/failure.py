"""How an exception inside a program becomes an error class that the retry table knows."""

from __future__ import annotations

import errno

from tunesmith.core.disk import is_disk_trouble
from tunesmith.core.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    NotFound,
    ProgramError,
    TunesmithError,
    UsageError,
)
from tunesmith.runs.rules.task import ErrorClass

_MAX_MESSAGE = 2000
_BY_TYPE: tuple[tuple[type[BaseException], ErrorClass], ...] = (
    (DataError, ErrorClass.DATA),
    (ConfigError, ErrorClass.CONFIG),
    (UsageError, ErrorClass.CONFIG),
    (NotFound, ErrorClass.CONFIG),
    (MissingExtra, ErrorClass.MISSING),
    (ProgramError, ErrorClass.PROTOCOL),
    (ImportError, ErrorClass.MISSING),
    (FileNotFoundError, ErrorClass.MISSING),
    (PermissionError, ErrorClass.CONFIG),
    (OSError, ErrorClass.TRANSIENT),
)
_TRAIN_EXTRA = frozenset({"torch", "transformers", "peft", "safetensors", "accelerate", "numpy"})
_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class ProgramFailure(Exception):
    """Raise it to end the program as failed with that class."""

    def __init__(self, error_class: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message


def as_failure(error: BaseException) -> ProgramFailure:
    """The class and one line for people; the traceback belongs into the log."""
    if isinstance(error, ProgramFailure):
        return ProgramFailure(error.error_class, error.message[:_MAX_MESSAGE])
    if _is_oom(error):
        return ProgramFailure(ErrorClass.OOM, f"out of memory: {_line(error)}")
    if is_disk_trouble(error):
        return ProgramFailure(ErrorClass.DISK, _line(error))
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _TRAIN_EXTRA:
        error = MissingExtra.named("train", "training and scoring")
    for kind, error_class in _BY_TYPE:
        if isinstance(error, kind):
            message = error.message if isinstance(error, TunesmithError) else _line(error)
            return ProgramFailure(error_class, message[:_MAX_MESSAGE])
    return ProgramFailure(ErrorClass.BUG, _line(error))


def _is_oom(error: BaseException) -> bool:
    """By name, because torch must not be imported to know its errors; some builds raise a bare RuntimeError."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OOM_WORDS)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_MESSAGE]
