"""Why a line is not JSON: the slow second look at a line that the fast parser refused."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, NoReturn

from tunesmith.core.errors import quoted
from tunesmith.datasets.bad_row import BadRow
from tunesmith.datasets.example import Reason

if TYPE_CHECKING:
    from orjson import JSONDecodeError

_MAX_DIGITS = 308  # of the largest number that a double holds
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def explain(line: bytes, error: JSONDecodeError, *, ends_open: bool) -> BadRow:
    """What to tell the user about such a line. `ends_open`: no newline follows, so it may be cut off."""
    if line.startswith(b"\xef\xbb\xbf"):
        return BadRow(Reason.BYTE_ORDER_MARK, "", "begins with a byte-order mark", "remove its first three bytes")
    if b"\0" in line:
        fix = "remove the NUL bytes; is the file damaged, or UTF-16?"
        return BadRow(Reason.NUL, "", "holds a NUL byte", fix, at_byte=line.index(0))
    try:
        text = line.decode()
    except UnicodeDecodeError as wrong:
        if ends_open and wrong.end == len(line):
            return _cut_off()
        return BadRow(Reason.INVALID_UTF8, "", "is not UTF-8", "write the file as UTF-8", at_byte=wrong.start)
    return _explain_text(text, error, ends_open)


def _explain_text(text: str, error: JSONDecodeError, ends_open: bool) -> BadRow:
    try:
        json.loads(text, parse_constant=_refuse_non_finite, parse_float=_refuse_overflow, parse_int=_refuse_long_number)
    except BadRow as found:
        return found
    except RecursionError:
        return BadRow(Reason.NOT_JSON, "", "is nested too deeply", "flatten it, or remove the line")
    except ValueError:
        has_other_ends = "\r" in text.rstrip()
        if ends_open and not has_other_ends and text.lstrip().startswith("{"):
            return _cut_off()
        fix = "write one JSON object per line" + ("; end lines with LF" if has_other_ends else "")
        return BadRow(Reason.NOT_JSON, "", f"is not JSON at character {error.pos + 1}", fix)
    if _HALF_PAIR.search(text):
        fix = "write characters beyond U+FFFF as a pair of escapes, or as UTF-8"
        return BadRow(Reason.BAD_ESCAPE, "", "holds half of a surrogate pair", fix)
    return BadRow(Reason.NOT_JSON, "", f"is not usable JSON ({error.msg})", "simplify it, or remove the line")


def _cut_off() -> BadRow:
    fix = "the file ends inside this line: copy it again, or remove the line"
    return BadRow(Reason.CUT_OFF, "", "is cut off", fix)


def _refuse_non_finite(text: str) -> NoReturn:
    raise BadRow(Reason.NON_FINITE, "", f"holds {quoted(text, 20)}, which is not a number", "replace it, or use null")


def _refuse_long_number(text: str) -> None:
    if len(text) > _MAX_DIGITS:
        problem = f"holds a number of {len(text)} digits, too large to be one"
        raise BadRow(Reason.NON_FINITE, "", problem, "write it as a text, or use null")


def _refuse_overflow(text: str) -> None:
    if math.isinf(float(text)):
        _refuse_non_finite(text)
