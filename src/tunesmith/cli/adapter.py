"""`tunesmith adapter`: list, show, live, history, evaluate, approve, deploy, reject, rollback, revoke."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.output import (
    MAX_LISTED,
    Column,
    age,
    coloured,
    first_line,
    heading,
    note_more,
    number,
    print_id,
    print_json,
    say,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, OfProfile, Profile, Reason, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.client.views import RequestResult

commands = command_group("The versions that runs made, and which one is live.")
Name = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="An id, its beginning, or a name such as dates@v7.", show_default=False)
]


@commands.command("list")
def list_adapters(
    ctx: typer.Context,
    profile: OfProfile = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="How many at most.")] = 100,
    json: Json = False,
) -> None:
    """Every version, the newest of each profile first."""
    with open_client(ctx) as client:
        adapters, num = client.adapters.page(profile, limit=limit)
    if json:
        print_json(adapters)
        return
    rows = [
        (a.name, coloured(a.state), a.id, a.run_id, coloured(a.run_state or ""), age(a.created_at), _metrics(a.metrics))
        for a in adapters
    ]
    columns = [Column("NAME", "fold"), Column("STATE"), Column("ID"), Column("RUN"), Column("RUN IS"), Column("AGE"),
               Column("METRICS", "cut")]  # fmt: skip
    show_table(columns, rows, empty="No adapter yet: a run makes one.")
    note_more(len(adapters), num)


@commands.command()
def show(ctx: typer.Context, adapter: Name, json: Json = False) -> None:
    """One version: its run, its place, its metrics, who serves it, how it was judged, what became of it."""
    from tunesmith.cli.run_page import show_history
    from tunesmith.cli.verdict_page import show_verdict

    with open_client(ctx) as client:
        found = client.adapters.show(adapter)
    if json:
        print_json(found)
        return
    show_fields(
        [
            ("adapter", found.name),
            ("id", found.id),
            ("state", coloured(found.state)),
            ("profile", found.profile),
            ("made by", f"{found.run_id} ({found.run_state})"),
            ("made", age(found.created_at)),
            ("metrics", _metrics(found.metrics)),
            ("path", found.path),
            ("digest", found.digest),
        ],
        indent=0,
    )
    _show_targets(found.targets)
    if found.evaluation is not None:
        show_verdict(found.evaluation)
    heading("History")
    show_history(found.events)


@commands.command()
def live(ctx: typer.Context, profile: Profile, json: Json = False) -> None:
    """What is live, and what each target serves."""
    with open_client(ctx) as client:
        deployment = client.adapters.deployment(profile)
    if json:
        print_json(deployment)
        return
    show_fields(
        [
            ("live", deployment.wanted or "the bare base"),
            ("before it", deployment.previous or "the bare base"),
            ("since", age(deployment.flipped_at)),
            ("by", deployment.flipped_by),
        ],
        indent=0,
    )
    _show_targets(deployment.targets)


@commands.command()
def history(
    ctx: typer.Context,
    profile: Profile,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Only what was live then: 2026-11-17T14:00 (UTC unless it says)."),
    ] = None,
    json: Json = False,
) -> None:
    """What was live when, who put it there and why; all times are UTC."""
    with open_client(ctx) as client:
        spans = client.adapters.history(profile, at=at)
    if json:
        print_json(spans if at is None else spans[0])
        return
    rows = [
        (_utc(span.since) or "ever", _utc(span.until) or "now", span.version, span.by, first_line(span.reason),
         span.ended_as and coloured(span.ended_as), first_line(span.ended_reason))
        for span in spans
    ]  # fmt: skip
    columns = [Column("SINCE"), Column("UNTIL"), Column("LIVE", "fold"), Column("BY", "fold"), Column("WHY", "cut"),
               Column("THEN"), Column("BECAUSE", "cut")]  # fmt: skip
    show_table(columns, rows)


@commands.command()
def evaluate(ctx: typer.Context, adapter: Name) -> None:
    """Measure any version on the held-out cases of now, against what is live.

    A held version goes on by the verdict. For any other one a run is queued that ends with the verdict: nothing goes
    live by it. Prints the run; `run show RUN` has the numbers and what the gate recommends.
    """
    with open_client(ctx) as client:
        _answer(client.adapters.evaluate(adapter))


@commands.command()
def approve(ctx: typer.Context, adapter: Name) -> None:
    """Let a held adapter go live.

    Evidence that has gone stale is measured again first.
    """
    with open_client(ctx) as client:
        _answer(client.adapters.approve(adapter))


@commands.command()
def deploy(
    ctx: typer.Context,
    adapter: Name,
    force: Annotated[bool, typer.Option("--force", help="Past the gate, without measuring; needs --reason.")] = False,
    reason: Reason = "",
) -> None:
    """Put any version live: one of before, a rejected one, one that was never deployed.

    It is measured against what is live first, and goes live if the gate promotes it.
    Prints the run that carries it out.
    """
    with open_client(ctx) as client:
        _answer(client.adapters.deploy(adapter, force=force, reason=reason))


@commands.command()
def reject(ctx: typer.Context, adapter: Name, reason: Reason = "") -> None:
    """Refuse a held adapter; its data is released."""
    with open_client(ctx) as client:
        _answer(client.adapters.reject(adapter, reason))


@commands.command()
def rollback(
    ctx: typer.Context,
    profile: Profile,
    to: Annotated[str | None, typer.Option("--to", metavar="ADAPTER", help="Which version instead.")] = None,
    reason: Reason = "",
) -> None:
    """Put the version before the live one in its place.

    Prints what is live now, `base` for the bare base.
    """
    with open_client(ctx) as client:
        now_live = client.adapters.rollback(profile, to=to, reason=reason)
        has_worker = bool(client.system.workers())
    brings = (
        "a worker brings the targets to it" if has_worker else "start `tunesmith worker` to bring the targets to it"
    )
    say(f"rolled back: {now_live or 'the bare base'} is live in the store; {brings}")
    print_id(now_live or "base")


@commands.command()
def revoke(
    ctx: typer.Context,
    adapter: Name,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the history.", show_default=False)],
) -> None:
    """Take it out of service, everywhere and for ever."""
    with open_client(ctx) as client:
        revoked = client.adapters.revoke(adapter, reason)
    say(f"{revoked.name} is revoked; no target may load it again")
    print_id(revoked.id)


def _show_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    """What each target should serve, was seen serving, and what is wrong with it."""
    if not targets:
        return
    heading("Targets")
    base = "the bare base"
    rows = [
        (t["target"], t["wanted"] or base, t["observed"] or base, _age(t["synced_at"]), t["error"]) for t in targets
    ]
    columns = [Column("TARGET", "fold"), Column("WANTED", "fold"), Column("SERVES", "fold"), Column("SINCE"),
               Column("ERROR", "fold")]  # fmt: skip
    show_table(columns, rows, indent=2)


def _answer(answer: RequestResult) -> None:
    say(f"{answer.id} is {answer.state}: {first_line(answer.message)}")
    print_id(answer.id)


def _age(instant: str | None) -> str:
    return "" if instant is None else age(datetime.fromisoformat(instant))


def _utc(instant: datetime | None) -> str:
    return "" if instant is None else f"{instant:%Y-%m-%dT%H:%M:%SZ}"


def _metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
