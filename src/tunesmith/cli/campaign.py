"""`tunesmith campaign`: create, list, show, pause, resume, archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import Column, age, coloured, print_id, print_json, say, several, show_fields, show_table
from tunesmith.cli.parser import Json, OfProfile, Profile, Set, command_group, open_client

if TYPE_CHECKING:
    from tunesmith.profiles.queries import Campaign

commands = command_group("A profile under way, with overrides for all its runs.")
Id = Annotated[str, typer.Argument(metavar="CAMPAIGN", help="Id of a campaign, or its beginning.", show_default=False)]


@commands.command()
def create(ctx: typer.Context, profile: Profile, overrides: Set = None) -> None:
    """Open an active campaign; a profile has at most one."""
    with open_client(ctx) as client:
        campaign = client.campaigns.create(profile, overrides=overrides or ())
    say(f"campaign of {profile} is active with {several(len(campaign.overrides), 'override')}")
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
        (c.id, c.profile, coloured(c.state), age(c.created_at), _overrides(c), len(c.counters.failures))
        for c in campaigns
    ]
    columns = [Column("ID"), Column("PROFILE", "fold"), Column("STATE"), Column("AGE"), Column("OVERRIDES", "cut"),
               Column("FAILURES", align="right")]  # fmt: skip
    show_table(columns, rows, empty="No campaign yet: tunesmith campaign create PROFILE --set KEY=VALUE")


@commands.command()
def show(ctx: typer.Context, campaign_id: Id, json: Json = False) -> None:
    """Its overrides, and how its runs have ended."""
    with open_client(ctx) as client:
        campaign = client.campaigns.show(campaign_id)
    if json:
        print_json(campaign)
        return
    counters = campaign.counters
    show_fields(
        [
            ("campaign", campaign.id),
            ("profile", campaign.profile),
            ("state", coloured(campaign.state)),
            ("overrides", _overrides(campaign) or "none"),
            ("created", age(campaign.created_at)),
            ("parent", campaign.parent_id),
            ("recent failures", len(counters.failures)),
            ("rejections in a row", counters.num_rejections),
            ("last success", age(counters.last_success_at)),
            ("config", campaign.config_hash),
            ("code", campaign.code_version),
        ],
        indent=0,
    )


@commands.command()
def pause(ctx: typer.Context, campaign_id: Id) -> None:
    """Its overrides no longer hold."""
    with open_client(ctx) as client:
        _moved(client.campaigns.pause(campaign_id))


@commands.command()
def resume(ctx: typer.Context, campaign_id: Id) -> None:
    """Make a paused campaign the active one again."""
    with open_client(ctx) as client:
        _moved(client.campaigns.resume(campaign_id))


@commands.command()
def archive(ctx: typer.Context, campaign_id: Id) -> None:
    """End it for good; its history stays."""
    with open_client(ctx) as client:
        _moved(client.campaigns.archive(campaign_id))


def _moved(campaign: Campaign) -> None:
    say(f"campaign of {campaign.profile} is {campaign.state}")
    print_id(campaign.id)


def _overrides(campaign: Campaign) -> str:
    return ", ".join(f"{key}={value}" for key, value in campaign.overrides.items())
