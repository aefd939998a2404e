"""What people and scripts see: tables that fit the terminal, JSON, ages, errors. Colours only on a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Literal

from tunesmith.core.clock import utc_now
from tunesmith.core.errors import TunesmithError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

DEBUG_VARIABLE = "TUNESMITH_DEBUG"
MAX_LISTED = 10_000  # what --limit takes at most
_NARROWEST = 80
_PROSE_WIDTH = 78
_UNLIMITED = 100_000  # without a terminal nothing is cut: whoever reads the pipe wants the words

_STYLES = {
    "queued": "cyan", "training": "blue", "evaluating": "blue", "shadowing": "blue", "deploying": "blue",
    "watching": "blue", "paused": "yellow", "held": "yellow", "deployed": "green", "completed": "green",
    "validated": "green", "rejected": "magenta", "rolled_back": "magenta", "failed": "red", "cancelled": "dim",
    "skipped": "dim",
    "candidate": "cyan", "live": "green", "superseded": "dim", "revoked": "red",
    "active": "green", "archived": "dim",
    "open": "blue", "succeeded": "green", "stopped": "yellow", "interrupted": "yellow", "lost": "yellow",
    "promote": "green", "hold": "yellow", "reject": "magenta",
    "gold": "green", "needs_improvement": "yellow", "ambiguous": "cyan", "quarantined": "red",
    "ok": "green", "warning": "yellow", "broken": "red",
}  # fmt: skip
"""Colours by state, of whatever has one."""


@dataclass(frozen=True)
class Column:
    """`whole` is never cut (ids, states, ages); `fold` wraps; `cut` ends in an ellipsis where it does not fit."""

    name: str
    fit: Literal["whole", "fold", "cut"] = "whole"
    align: Literal["left", "right"] = "left"


def stdout() -> Console:
    return _console(sys.stdout)


def stderr() -> Console:
    return _console(sys.stderr)


@cache
def _console(stream: IO[str]) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - Rich calls this where it has caught one, and would end the process

    console = Plain(file=stream, highlight=False, markup=False, emoji=False)
    console.width = max(_NARROWEST, console.width) if console.is_terminal else _UNLIMITED
    return console


@dataclass
class _Told:
    """What this call has written to stdout so far."""

    ids: list[str]
    error: OSError | None = None
    is_closed: bool = False


_told = _Told([])


@contextlib.contextmanager
def _to_stdout() -> Iterator[None]:
    """A stdout that cannot be written must not lose what the command has done: the call goes on, and ends with it."""
    try:
        yield
    except OSError as error:
        _told.error = _told.error or error


def end_of_output() -> int:
    """Flush stdout. If anything was lost, tell the ids on stderr, and return 1."""
    with _to_stdout():
        sys.stdout.flush()
    if _told.error is None:
        if _told.is_closed and _told.ids:
            note(" ".join(_told.ids))  # what was made can still be found
        return 0
    abandon_stdout()
    ids, is_pipe = " ".join(_told.ids), isinstance(_told.error, BrokenPipeError)
    if ids or not is_pipe:  # a reader that has seen enough of a listing needs no word
        done = f"; the command was carried out: {ids}" if ids else ""
        report("stdout", f"stdout cannot be written ({_told.error.strerror}){done}", as_json=False)
    return 1


def say(line: Any = "") -> None:
    """One line of prose, or anything Rich can draw."""
    with _to_stdout():
        stdout().print(clean(line) if isinstance(line, str) else line)


def say_prose(text: str) -> None:
    """A sentence or two, indented and wrapped, so that it fits a narrow terminal and a pipe alike."""
    for line in textwrap.wrap(text, _PROSE_WIDTH, initial_indent="  ", subsequent_indent="  "):
        say(line)


def note(line: str) -> None:
    """A word to the person, on stderr; stdout holds results only."""
    sys.stderr.write(f"{clean(line)}\n")


def note_more(shown: int, num: int) -> None:
    """Say that a listing does not show everything, and how to see it."""
    if num > shown:
        everything = f"--limit {num} shows all" if num <= MAX_LISTED else f"--limit {MAX_LISTED} shows more"
        note(f"the newest {shown} of {num}; {everything}")


def print_id(text: str) -> None:
    """The last line of every write, and nothing else on it."""
    _told.ids.append(clean(text))
    with _to_stdout():
        sys.stdout.write(f"{text}\n")


def print_document(text: str) -> None:
    """A whole text as it is, for a file or a pipe."""
    with _to_stdout():
        sys.stdout.write(text)


def print_json(value: Any) -> None:
    """Strict JSON: a number that JSON cannot hold becomes its name."""
    from tunesmith.client.views import to_json

    text = json.dumps(_finite(to_json(value)), indent=2, ensure_ascii=False, allow_nan=False)
    with _to_stdout():
        sys.stdout.write(f"{text}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[Any]], *, empty: str = "", indent: int = 0) -> None:
    """A table that fits the terminal; `empty` is said instead of a table without rows."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if not rows:
        say(empty)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", collapse_padding=True)
    for column in columns:
        table.add_column(
            Text(clean(column.name)),
            no_wrap=column.fit == "whole",
            overflow="fold" if column.fit == "fold" else "ellipsis",
            justify=column.align,
        )
    for row in rows:
        table.add_row(*(_cell(value, column) for value, column in zip(row, columns, strict=True)))
    _draw(Padding(table, (0, 0, 0, indent), expand=False))


def _draw(drawing: Any) -> None:
    """Onto the terminal; into a pipe without the blanks that fill a table's last column."""
    console = stdout()
    with _to_stdout():
        if console.is_terminal:
            console.print(drawing)
            return
        with console.capture() as captured:
            console.print(drawing)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _cell(value: Any, column: Column) -> Text:
    from rich.text import Text

    text = value if isinstance(value, Text) else Text(clean("" if value is None else str(value)))
    if column.fit == "cut":
        text.no_wrap, text.overflow = True, "ellipsis"
    return text


def show_fields(pairs: Sequence[tuple[str, Any]], *, indent: int = 2) -> None:
    """Names and values below each other; what is None or empty is left out."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            grid.add_row(Text(name), value if isinstance(value, Text) else Text(clean(str(value))))
    _draw(Padding(grid, (0, 0, 0, indent), expand=False))


def show_tree(tree: Any) -> None:
    """A tree of Rich that fits the terminal, and 80 columns in a pipe: its lines wrap, and nothing is cut."""
    console = stdout()
    with _to_stdout():
        if console.is_terminal:
            console.print(tree)
            return
        with console.capture() as captured:
            console.print(tree, width=_NARROWEST)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def heading(text: str) -> None:
    from rich.text import Text

    say()
    say(Text(text, style="bold"))


def coloured(state: str, text: str | None = None) -> Text:
    """A state in its colour."""
    from rich.text import Text

    return Text(clean(state if text is None else text), style=state_style(state))


def state_style(state: str | None) -> str:
    """The colour of a state; none for what has no state."""
    return _STYLES.get(str(state), "")


def clean(text: str) -> str:
    """Text from elsewhere without what could steer a terminal: control characters become visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def first_line(text: str | None) -> str:
    """What a table shows of a longer text."""
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "")


def age(instant: datetime | None) -> str:
    """How long ago, as people say it."""
    if instant is None:
        return ""
    passed = (utc_now() - instant).total_seconds()
    return f"{duration(passed)} ago" if passed >= 1 else "just now"


def duration(seconds: float | timedelta | None) -> str:
    """In the one or two units that matter."""
    if seconds is None:
        return ""
    total = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    if total < 9.95:
        return f"{max(total, 0.0):.1f} s"
    for size, unit, smaller_size, smaller in _UNITS:
        if total >= 2 * size or (total >= size and not smaller):
            rest = int(total % size // smaller_size) if smaller and total < 10 * size else 0
            return f"{int(total // size)} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{total:.0f} s"


_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, ""))


def number(value: float | None, sign: bool = False) -> str:
    """Four figures that matter; huge and tiny ones with an exponent."""
    return "" if value is None else f"{value:{'+' if sign else ''}.4g}"


def several(num: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{num} {what}{'' if num == 1 else 's'}"


def passes(epochs: float, max_steps: int | None) -> str:
    """How long a recipe trains: epochs, or the steps that end it before."""
    told = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
    return told if max_steps is None else f"at most {several(max_steps, 'step')} (max_steps), within {told}"


def prepare_streams() -> None:
    """Closed streams swallow what is written; a character that the terminal cannot show is escaped."""
    _told.ids, _told.error, _told.is_closed = [], None, sys.stdout is None
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # open for as long as the process lives
            setattr(sys, name, open(nowhere, "w", closefd=False))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def abandon_stdout() -> None:
    """The reader of our output has gone: leave nothing for Python to flush at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_path(path: Any) -> str:
    """A file's name as people can read it, whatever bytes it holds."""
    return os.fsdecode(path).encode(errors="backslashreplace").decode() if isinstance(path, str | bytes) else str(path)


def report(code: str, message: str, *, as_json: bool) -> None:
    """An error, on stderr: one line for each problem, or one JSON object; stdout stays clean."""
    if as_json:
        sys.stderr.write(json.dumps({"error": {"code": code, "message": message}}, ensure_ascii=False) + "\n")
        return
    for line in message.splitlines() or [""]:
        sys.stderr.write(f"error: {clean(line)}\n")


def explain_error(error: Exception) -> tuple[str, str, int]:
    """Code, message and exit code of anything that can go wrong."""
    if isinstance(error, TunesmithError):
        return error.code, error.message, error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{show_path(error.filename)}: " if error.filename is not None else ""
        return "os", f"{where}{error.strerror}", 1
    if isinstance(error, UnicodeEncodeError):  # only a name or text that came with the call can hold such characters
        return "usage", f"{show_path(error.object)[:100]} is not valid UTF-8; rename the file, or fix the text", 2
    if isinstance(error, ValueError) and "null byte" in str(error):
        return "usage", "a name or text holds a NUL character; leave it out", 2
    if isinstance(error, MemoryError):
        return "memory", "out of memory", 1
    first = first_line(str(error))[:300]
    hint = f"this is a bug in tunesmith; run it again with {DEBUG_VARIABLE}=1 to see where"
    return "unexpected", f"unexpected {type(error).__name__}{': ' if first else ''}{first}; {hint}", 1
