"""What is wrong with a row that cannot be an example."""

from __future__ import annotations

from typing import Any

from tunesmith.datasets.example import Reason

_NAMES = {
    type(None): "null",
    list: "an array",
    dict: "an object",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


class BadRow(Exception):
    """A row that cannot be an example: why, where in it, and what to do."""

    def __init__(self, reason: Reason, field: str, problem: str, fix: str, at_byte: int | None = None) -> None:
        super().__init__(problem)
        self.at_byte = at_byte  # in the line, where one byte is to blame
        self.reason = reason
        self.field = field
        self.problem = problem
        self.fix = fix


def named(value: Any) -> str:
    """What a JSON value is, in words."""
    return _NAMES.get(type(value)) or f"a Python {type(value).__name__}"  # from a client, not from JSON
