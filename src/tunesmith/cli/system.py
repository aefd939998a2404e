"""`tunesmith worker`, `serve`, `inbox`, `doctor` and `estop`: commands about the whole workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    first_line,
    print_id,
    print_json,
    say,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, Reason, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.runs.queries.switches import Switch
    from tunesmith.serving.gateway.server import Ready

INBOX_EXAMPLE = "Example: tunesmith inbox --json"
SERVE_EXAMPLE = "Example: tunesmith serve --port 8321, then OpenAI(base_url='http://127.0.0.1:8321/v1', api_key='any')"
estop = command_group("While it is on, nothing is trained or deployed.")


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


def serve(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where to listen; anything but loopback needs serve.key_file.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="NUMBER", help="Which port; 0 takes any free one.")] = None,
) -> None:
    """Serve every profile over OpenAI's routes until told to stop.

    TERM or Ctrl-C: finish what is under way, then end. A second one: now.
    """
    from tunesmith.core import logs

    with open_client(ctx, serves=True) as client:
        server = client.serving.settings_for(host, port)
        from tunesmith.serving.gateway.server import Server

        logs.show_on_stderr()
        Server(client.serving.session, server, _show_ready).run()


def _show_ready(ready: Ready) -> None:
    say(f"serving at {ready.url}")
    for profile, version in ready.serving.items():
        if profile not in ready.problems:
            say(f"  {profile} = {version}")
    for profile, problem in ready.problems.items():
        what = "cannot answer" if profile in ready.serving else "is not served"
        say(f"  {profile} {what}: {first_line(problem)}")
    if ready.num_hosts is not None:
        allowed = "; it is empty" if not ready.num_hosts else ""
        say(f"  others must ask by a name in serve.allowed_hosts{allowed}")
    if not ready.serving and not ready.problems:
        say("  no profile yet: put one into profiles/, it is found at once")
    key = "one of serve.key_file" if ready.needs_key else "'any'"
    show_fields([("openai client", f"OpenAI(base_url='{ready.url}/v1', api_key={key})"), ("stop", "Ctrl-C")], indent=0)


def inbox(ctx: typer.Context, json: Json = False) -> None:
    """What waits for a person, the oldest first, each with what settles it.

    Held and failed runs, parked tasks, targets in trouble, suspects, erasures, quarantined rows.
    """
    with open_client(ctx) as client:
        items = client.system.inbox()
    if json:
        print_json(items)
        return
    if not items:
        say("Nothing waits for you.")
    for item in items:
        say(f"{item.id}  {item.kind} of {item.profile}, {age(item.since)}")
        show_fields(
            [
                ("why", first_line(item.reason)),
                ("newest", ", ".join(item.newest)),
                ("error", first_line(item.error)),
                ("next step", item.what_to_do),
            ]
        )


def doctor(ctx: typer.Context, json: Json = False) -> int:
    """Check installation and workspace; say how to fix them.

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
