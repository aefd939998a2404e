"""`tunesmith profile`: list, show, check, lock; `tunesmith config explain`: where each setting comes from."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    Column,
    clean,
    coloured,
    first_line,
    passes,
    print_id,
    print_json,
    say,
    say_prose,
    several,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, Profile, Set, command_group, open_client

if TYPE_CHECKING:
    from rich.text import Text

    from tunesmith.profiles.layers import Origin
    from tunesmith.profiles.rules.lock import ArchitectureLock, ProfileLock
    from tunesmith.profiles.sections.evaluation import GateSettings

commands = command_group("What is tuned: a YAML file each in profiles/.")


@commands.command("list")
def list_profiles(ctx: typer.Context, json: Json = False) -> None:
    """Every profile, and what is wrong with a broken one."""
    with open_client(ctx) as client:
        entries = client.profiles.list()
    if json:
        print_json(entries)
        return
    rows = []
    for entry in entries:
        profile = entry.profile
        if profile is None:
            rows.append((entry.name, coloured("broken"), "", "", first_line(entry.error)))
            continue
        state = coloured("ok") if profile.enabled else coloured("paused", "disabled")
        note = profile.description if profile.enabled else (profile.disabled_reason or "")
        rows.append((entry.name, state, profile.role.value, profile.base.path, note))
    columns = [Column("NAME", "fold"), Column("STATE"), Column("ROLE"), Column("BASE", "fold"), Column("NOTE", "cut")]
    show_table(columns, rows, empty="No profile yet: tunesmith init --base BASE --task NAME writes one.")


@commands.command()
def show(ctx: typer.Context, name: Profile, overrides: Set = None, json: Json = False) -> None:
    """A profile as it holds now, and its lock."""
    with open_client(ctx) as client:
        resolved, lock = client.profiles.show(name, overrides or ())
    if json:
        print_json({"profile": resolved.profile, "fingerprint": resolved.fingerprint, "lock": lock})
        return
    profile = resolved.profile
    recipe = profile.recipe
    trained = "full" if recipe.tuning == "full" else f"rank {recipe.lora_rank}"
    show_fields(
        [
            ("name", profile.name),
            ("description", profile.description),
            ("state", "enabled" if profile.enabled else f"disabled: {profile.disabled_reason}"),
            ("role", profile.role),
            ("base", f"{profile.base.path} ({profile.base.family})"),
            ("trainer", f"{profile.trainer.kind} on {profile.hardware.tier or 'its default tier'}"),
            (
                "recipe",
                f"{recipe.method} · {passes(recipe.epochs, recipe.max_steps)} · lr {recipe.peak_lr:g} · {trained}",
            ),
            ("gate", _gate_text(profile.gate)),
            ("deploy", f"when {profile.deploy.when}, to {', '.join(target.name for target in profile.targets)}"),
            ("locked", "not yet" if lock is None else _facts(lock.architecture)),
            ("config", resolved.fingerprint),
        ],
        indent=0,
    )
    say(f"\nEvery key and who said it: tunesmith config explain {profile.name}")


@commands.command()
def check(ctx: typer.Context, name: Profile, overrides: Set = None, json: Json = False) -> None:
    """Check all that is checked before a run is queued."""
    from tunesmith.profiles.sections.screens import blind_spots

    with open_client(ctx) as client:
        checked = client.profiles.check(name, overrides or ())
        warning = client.profiles.heldout_warning(name, overrides or ())
    if json:
        facts = {"profile": name, "tier": checked.tier, "context": checked.context, "lock": checked.lock}
        print_json({**facts, "warning": warning})
        return
    say(coloured("ok", f"✓ profile {name} can be run"))
    show_fields(
        [
            ("base", _facts(checked.architecture)),
            ("tier", checked.tier),
            ("context", f"{checked.context} tokens"),
            ("held out", _split(checked.lock)),
        ]
    )
    if warning is not None:
        say(coloured("warning", f"! {warning}"))
    say_prose(blind_spots(checked.profile.data.detectors))


@commands.command()
def lock(
    ctx: typer.Context,
    name: Profile,
    new_split: Annotated[
        bool, typer.Option("--new-split", help="Split new prompts by the shares that the profile says now.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why the split changes; kept in the history.")] = "",
) -> None:
    """Lock the base model's facts; later differences are refused.

    With --new-split: what was trained on or held out before keeps its split, for ever.
    """
    with open_client(ctx) as client:
        locked = client.profiles.lock(name, new_split=new_split, reason=reason)
    show_fields([("base", _facts(locked.architecture)), ("held out", _split(locked))])
    print_id(name)


def _gate_text(gate: GateSettings) -> str:
    """What a candidate must show, in one line; `run show` has every check."""
    return f"{gate.primary} better by ≥ {gate.min_gain:g}, surely at {gate.confidence:.0%}, n ≥ {gate.min_cases}"


def _split(lock: ProfileLock) -> str:
    """Which share of prompts is held out, and whether that may still change."""
    decided = "decided" if lock.is_split_decided else "the first run that trains decides it for good"
    return f"{lock.heldout_share:.0%} of prompts (data.heldout_share; {decided})"


def _facts(architecture: ArchitectureLock) -> str:
    return (
        f"{architecture.architecture} · {several(architecture.num_layers, 'layer')} of {architecture.hidden_size} · "
        f"vocabulary {architecture.vocab_size} · context {architecture.context}"
    )


_SHORT_ORIGIN = 28  # beside the longest key of an 80-column terminal, this leaves room for values
config_commands = command_group("What holds, and who said it.")


@config_commands.command()
def explain(
    ctx: typer.Context,
    profile: Profile,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key or a section, e.g. recipe.lr.")] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Every key, its value and its origin.

    Precedence: schema default < profile < campaign < tunesmith.yaml < environment < --set.
    """
    with open_client(ctx) as client:
        rows = client.profiles.explain(profile, key, overrides or ())
    if json:
        print_json([{"key": r.key, "value": r.value, "origin": r.origin, "doc": r.doc} for r in rows])
        return
    is_short = all(len(str(r.origin)) <= _SHORT_ORIGIN for r in rows)
    origin = Column("ORIGIN", "whole" if is_short else "fold")
    columns = [Column("KEY"), Column("VALUE", "fold"), origin, Column("WHAT IT IS FOR", "fold")]
    shown = columns if len(rows) == 1 else columns[:3]
    show_table(shown, [(r.key, _value_text(r.value), _origin(r.origin), r.doc)[: len(shown)] for r in rows])


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)


def _origin(origin: Origin) -> Text:
    """What nobody said is dim, so that what somebody said stands out."""
    from rich.text import Text

    return Text(clean(str(origin)), style="dim" if origin.layer == "default" else "")
