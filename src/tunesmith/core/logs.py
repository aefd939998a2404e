"""Logs: a sentence's worth of fields behind a stable action name, one line each, on stderr."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class ActionLogger:
    """`log.info("task_ended", run=…, outcome=…)`: the action is stable, the fields are facts."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"tunesmith.{name}")

    def info(self, action: str, **fields: Any) -> None:
        self._logger.info(_line(action, fields))

    def warning(self, action: str, **fields: Any) -> None:
        self._logger.warning(_line(action, fields))

    def exception(self, action: str, **fields: Any) -> None:
        self._logger.exception(_line(action, fields))


def logger(name: str) -> ActionLogger:
    return ActionLogger(name)


def show_on_stderr() -> None:
    """For programs that run on their own (a worker); libraries and the CLI stay quiet."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("tunesmith")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


def _line(action: str, fields: dict[str, Any]) -> str:
    facts = " ".join(
        f"{key}={json.dumps(value, default=str)}" for key, value in fields.items() if value not in (None, "")
    )
    return f"{action} {facts}".rstrip()
