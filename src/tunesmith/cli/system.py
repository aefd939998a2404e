"""`tunesmith worker`, `doctor` and `estop`: the whole workspace at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    print_id,
    print_json,
    say,
    show_table,
)
from tunesmith.cli.parser import Json, Reason, a_noun, open_client

if TYPE_CHECKING:
    from tunesmith.runs.queries.switches import Switch

estop = a_noun("While it is on, nothing is trained or deployed.")


def worker(
    ctx: typer.Context,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End when there is nothing left to do.")] = False,
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,…", help="Only these kinds of tasks, e.g. train,evaluate.")
    ] = None,
) -> None:
    """Work on the queue until told to stop.

    TERM or Ctrl-C: write a checkpoint, give the task back, end. A second one: now.
    """
    from tunesmith.core import logs

    with open_client(ctx, serves=True) as client:
        wanted = None if kinds is None else [kind.strip() for kind in kinds.split(",")]
        process = client.system.worker(wanted)
        logs.show_on_stderr()
        process.install_signals()
        process.run(until_idle=until_idle)


def doctor(ctx: typer.Context, json: Json = False) -> int:
    """Check installation and workspace; say how to mend them.

    Exit code 1 if something is broken; warnings do not count.
    """
    with open_client(ctx) as client:
        checks = client.system.doctor()
    is_broken = any(check.state == "broken" for check in checks)
    if json:
        print_json(checks)
        return int(is_broken)
    marks = {"ok": "✓", "warning": "!", "broken": "✗"}
    rows = [
        (
            coloured(check.state, marks[check.state]),
            check.name,
            "\n".join([check.finding, *([f"→ {check.fix}"] if check.fix else [])]),
        )
        for check in checks
    ]
    show_table([Column(""), Column("CHECK", "fold"), Column("FINDING", "fold")], rows)
    return int(is_broken)


@estop.command("on")
def estop_on(ctx: typer.Context, reason: Reason = "") -> None:
    """Start nothing; interrupt what is open, with a checkpoint."""
    with open_client(ctx) as client:
        _switched(client.system.estop(True, reason))


@estop.command("off")
def estop_off(ctx: typer.Context, reason: Reason = "") -> None:
    """Let everything go on."""
    with open_client(ctx) as client:
        _switched(client.system.estop(False, reason))


@estop.command("show")
def estop_show(ctx: typer.Context, json: Json = False) -> None:
    """Whether it is on, who turned it, and why."""
    with open_client(ctx) as client:
        switch = client.system.show_estop()
    if json:
        print_json(switch)
    else:
        _switched(switch)


def _switched(switch: Switch) -> None:
    who = f" · {switch.actor}, {age(switch.moved_at)}" if switch.moved_at else ""
    say(f"the e-stop{who}{': ' + switch.reason if switch.reason else ''}")
    print_id("on" if switch.is_on else "off")
