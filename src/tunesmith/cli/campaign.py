"""`tunesmith campaign`: create, list, show, rounds, trigger, pause, resume, archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    first_line,
    heading,
    number,
    print_id,
    print_json,
    say,
    several,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, OfProfile, Profile, Set, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.client.campaigns import NextRound
    from tunesmith.orchestration.rounds.history import Round
    from tunesmith.profiles.queries import Campaign
    from tunesmith.triggers.base import Condition

commands = command_group("A profile under way: overrides for all its runs, and rounds that open themselves.")
Id = Annotated[
    str, typer.Argument(metavar="CAMPAIGN", help="Name or id of a campaign, or the id's beginning.", show_default=False)
]
Name = Annotated[str | None, typer.Option("--name", help="What it is called; unset: the profile's name.")]
Description = Annotated[str, typer.Option("--description", help="One line for people.")]
GpuHours = Annotated[float | None, typer.Option("--gpu-hours", help="Most hours that its rounds may use.", min=0.0)]
Money = Annotated[
    float | None, typer.Option("--money", help="Most that it may cost; needs campaign.budget.gpu_hour_price.", min=0.0)
]


@commands.command()
def create(
    ctx: typer.Context,
    profile: Profile,
    overrides: Set = None,
    name: Name = None,
    description: Description = "",
    gpu_hours: GpuHours = None,
    money: Money = None,
) -> None:
    """Open an active campaign; a profile has at most one. Workers open its rounds from now on."""
    budget = {key: value for key, value in (("gpu_hours", gpu_hours), ("money", money)) if value is not None}
    with open_client(ctx) as client:
        campaign = client.campaigns.create(
            profile, overrides=overrides or (), budget=budget, name=name, description=description
        )
    say(f"campaign of {profile} is active with {several(len(campaign.overrides), 'override')}")
    say(f"why it opens a round or not: tunesmith campaign show {campaign.name}")
    print_id(campaign.id)


@commands.command("list")
def list_campaigns(ctx: typer.Context, profile: OfProfile = None, json: Json = False) -> None:
    """Every campaign, the newest first."""
    with open_client(ctx) as client:
        campaigns = client.campaigns.list(profile)
    if json:
        print_json(campaigns)
        return
    rows = [
        (c.id, c.name, c.profile, coloured(c.state), age(c.created_at), _overrides(c), len(c.counters.failures))
        for c in campaigns
    ]
    columns = [Column("ID"), Column("NAME", "fold"), Column("PROFILE", "fold"), Column("STATE"), Column("AGE"),
               Column("OVERRIDES", "cut"), Column("FAILURES", align="right")]  # fmt: skip
    show_table(columns, rows, empty="No campaign yet: tunesmith campaign create PROFILE --set KEY=VALUE")


@commands.command()
def show(ctx: typer.Context, campaign_id: Id, json: Json = False) -> None:
    """Why it opens a round now or not, what the next one may cost and gain, and how its runs have ended."""
    with open_client(ctx) as client:
        campaign = client.campaigns.show(campaign_id)
        upcoming = client.campaigns.next_round(campaign.id)
    if json:
        print_json(_as_json(campaign, upcoming))
        return
    counters = campaign.counters
    show_fields(
        [
            ("campaign", f"{campaign.id}  {campaign.name}"),
            ("about", campaign.description),
            ("profile", campaign.profile),
            ("state", coloured(campaign.state)),
            ("overrides", _overrides(campaign) or "none"),
            ("overrides hold", "yes" if campaign.in_force else "no"),
            ("created", age(campaign.created_at)),
            ("parent", campaign.parent_id),
            ("rounds", upcoming.num_rounds),
            ("recent failures", len(counters.failures)),
            ("rejections in a row", counters.num_rejections),
            ("last success", age(counters.last_success_at)),
            ("config", campaign.config_hash),
            ("code", campaign.code_version),
        ],
        indent=0,
    )
    _next_round(upcoming)


def _next_round(upcoming: NextRound) -> None:
    decision, expected = upcoming.status.decision, upcoming.expected
    heading("A round is due: the next worker that looks opens it" if decision.opens else "Why no round is opened now")
    columns = [Column("CONDITION"), Column("NOW", "fold"), Column("WANTED", "fold"), Column("")]
    rows = [_row(each, "blocks") for each in decision.guards] + [_row(each, "no") for each in decision.triggers]
    show_table(columns, rows, indent=2)
    heading("The next round")
    facts = upcoming.status.facts
    start, data = (None, None) if facts is None else (facts.start, facts.data)
    gain = "not measured" if expected.gain is None else f"{number(expected.gain, sign=True)} {expected.metric}"
    ended = [
        ("expected cost", f"{number(expected.gpu_hours)} GPU hours, {number(expected.money)} money"),
        ("expected gain", gain),
        ("went live", f"{expected.num_live} of {several(expected.num_rounds, 'round')}"),
    ]
    show_fields(
        [
            ("start", "" if start is None else f"{start.name}: {start.reason}"),
            ("learns", "" if data is None else f"{_roles(data.roles) or 'nothing yet'}; {data.method_reason}"),
            *(ended if expected.num_rounds else [("expected", "no round has ended yet: nothing to expect it from")]),
        ]
    )


def _row(condition: Condition, otherwise: str) -> tuple[Any, ...]:
    said = coloured("ok", "ok") if condition.holds else coloured("warning", otherwise)
    return condition.name, condition.value, condition.threshold, said


def _as_json(campaign: Campaign, upcoming: NextRound) -> dict[str, Any]:
    """The campaign's own fields as they ever were, and the next round beside them."""
    from tunesmith.client.views import to_json

    decision, facts = upcoming.status.decision, upcoming.status.facts
    told = {
        "opens": decision.opens,
        "why_not": decision.why_not,
        "conditions": to_json(decision.guards),
        "triggers": to_json(decision.triggers),
        "expected": to_json(upcoming.expected),
        "start": None if facts is None else to_json(facts.start),
        "data": None if facts is None else to_json(facts.data),
    }
    return {**to_json(campaign), "num_rounds": upcoming.num_rounds, "next_round": told}


@commands.command()
def rounds(ctx: typer.Context, campaign_id: Id, json: Json = False) -> None:
    """Where each round started, what it learnt from, scored and cost, what became of it, and why; the newest first."""
    with open_client(ctx) as client:
        found = client.campaigns.rounds(campaign_id)
    if json:
        print_json(found)
        return
    if not found:
        say(f"No round yet; see why: tunesmith campaign show {campaign_id}")
        return
    show_rounds(found)


def show_rounds(found: Sequence[Round]) -> None:
    """What there is in figures, then the reasons, which need room."""
    metrics = {each.metric for each in found}
    score = metrics.pop() if len(metrics) == 1 else "SCORE"
    columns = [Column("RUN"), Column("START"), Column("LEARNT FROM", "fold"), Column(score, "fold"),
               Column("GPU H", align="right"), Column("COST", align="right"), Column("STATE")]  # fmt: skip
    rows = [
        (each.run_id, each.start.rpartition("@")[2], _learnt(each), _score(each, score), f"{each.gpu_hours:.3g}",
         f"{each.money:.3g}", coloured(each.state))
        for each in found
    ]  # fmt: skip
    show_table(columns, rows)
    heading("Why")
    why = [
        (each.run_id, f"{age(each.opened_at)}: {each.opened_by}",
         each.start_reason or ("" if each.is_automatic else "chosen by a person"), first_line(each.reason))
        for each in found
    ]  # fmt: skip
    show_table([Column("RUN"), Column("OPENED", "fold"), Column("START", "fold"), Column("END", "fold")], why)


def _learnt(each: Round) -> str:
    return f"{_roles(each.learnt_from)} ({each.method})"


def _roles(roles: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {role}" for role, num in roles.items())


def _score(each: Round, header: str) -> str:
    """Before and after; with the metric's name where it is not the column's."""
    if each.before is None or each.after is None:
        return "not measured"
    name = "" if each.metric == header else f"{each.metric} "
    return f"{name}{number(each.before)} → {number(each.after)}"


@commands.command()
def trigger(ctx: typer.Context, campaign_id: Id) -> None:
    """Open a round now, whatever window, cooldowns, breaker and triggers say; never beside another or past a budget."""
    with open_client(ctx) as client:
        made = client.campaigns.trigger(campaign_id)
    say(f"round opened on dataset {made.dataset_id}; follow it: tunesmith run watch {made.run_id}")
    if made.warning is not None:
        say(made.warning)
    print_id(made.run_id)


@commands.command()
def pause(ctx: typer.Context, campaign_id: Id) -> None:
    """Open no more rounds; its overrides still hold, and what is under way goes on."""
    with open_client(ctx) as client:
        _moved(client.campaigns.pause(campaign_id))


@commands.command()
def resume(ctx: typer.Context, campaign_id: Id) -> None:
    """Make a paused campaign the active one again."""
    with open_client(ctx) as client:
        _moved(client.campaigns.resume(campaign_id))


@commands.command()
def archive(ctx: typer.Context, campaign_id: Id) -> None:
    """End it for good, with its overrides; its history stays."""
    with open_client(ctx) as client:
        _moved(client.campaigns.archive(campaign_id))


def _moved(campaign: Campaign) -> None:
    say(f"campaign of {campaign.profile} is {campaign.state}")
    print_id(campaign.id)


def _overrides(campaign: Campaign) -> str:
    return ", ".join(f"{key}={value}" for key, value in campaign.overrides.items())
