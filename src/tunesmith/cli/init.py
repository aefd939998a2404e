"""`tunesmith init` and `tunesmith demo`: where everybody begins."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli import output
from tunesmith.core.errors import UsageError, quoted

if TYPE_CHECKING:
    from tunesmith.client.start import Started


Base = Annotated[
    str | None,
    typer.Option("--base", metavar="BASE", help="Folder of your base model, ORG/NAME on a hub, or smollm2."),
]
Task = Annotated[str | None, typer.Option("--task", metavar="NAME", help="What the tuned model is called.")]
RoleName = Annotated[
    str | None, typer.Option("--role", help="assistant, extractor, classifier, rewriter or coder; else assistant.")
]
Tier = Annotated[
    str | None, typer.Option("--tier", help="Where it will train, if not on this machine: see docs/start.md.")
]


def init(
    ctx: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Where, else here; made if it is missing.", show_default=False),
    ] = None,
    base: Base = None,
    task: Task = None,
    role: RoleName = None,
    tier: Tier = None,
    no_campaign: Annotated[bool, typer.Option("--no-campaign", help="Open no rounds by itself.")] = False,
) -> None:
    """Make a workspace in a folder.

    It holds tunesmith.yaml, profiles/ with a sample, and .tunesmith/ for the store, datasets, runs and adapters.
    With --base and --task, also a profile that works and its campaign; in a workspace that is there, these are added.
    The base is used where it lies, not copied.
    """
    from tunesmith.client import Client

    place = _place(ctx, folder) or Path(".")
    if base is None and task is None and role is None and tier is None and not no_campaign:
        _empty(place)
        return
    from tunesmith.cli.progress import fetching
    from tunesmith.client.start import start, wish_of

    wish = wish_of(base, task, role, tier, with_campaign=not no_campaign)
    with fetching(wish.base) as on_progress:
        client, started = start(place, wish, Client, on_progress)
    client.close()
    _show(started)


def _empty(place: Path) -> None:
    from tunesmith.client import Client

    with Client.init(place) as client:
        root = client.workspace.root
    output.say("A workspace with an empty store. Next:")
    output.show_fields(
        [
            ("1", "tunesmith init --base BASE --task NAME, in this folder: a profile for your base model"),
            ("2", "tunesmith profile check NAME"),
            ("3", "tunesmith run submit NAME examples.jsonl, and tunesmith worker"),
        ]
    )
    output.print_id(str(root))


def _show(started: Started) -> None:
    from tunesmith.profiles.settings import ServeSettings

    profile, shares, serve = started.profile, started.profile.shares, ServeSettings()
    made = "A new workspace with" if started.is_new_workspace else "The workspace has now"
    campaign = "and its campaign" if started.campaign is not None else "and no campaign"
    file = started.file.relative_to(started.root).as_posix()
    output.say(f"{made} profile {profile.task} ({file}) {campaign}.")
    rounds = (
        f"open by themselves with {profile.num_new} new answers, {profile.window} {profile.time_zone}; "
        f"why not now: tunesmith campaign show {started.campaign.name}"
        if started.campaign is not None
        else f"only by hand; tunesmith campaign create {profile.task} has them open by themselves"
    )
    output.show_fields(
        [
            ("base", f"{started.base} (used there, not copied)"),
            ("model", f"{profile.model}, context {profile.architecture.context}"),
            ("trains on", f"{profile.tier}; {profile.device}"),
            ("memory", profile.memory),
            ("held out", f"{shares.heldout:.0%} of prompts, about {shares.expected_cases(profile.num_new)} of "
                         f"{profile.num_new}; the gate wants {shares.min_cases}"),
            ("answers", f"up to {profile.max_tokens} tokens unless a request says otherwise"),
            ("rounds", rounds),
        ]
    )  # fmt: skip
    if profile.target != "embedded":
        output.note("torch is not installed here: pip install 'tunesmith[train]' before serve and worker")
    is_here = started.root == Path.cwd()
    output.say(f"Next{'' if is_here else f', after: cd {shlex.quote(str(_shown(started.root)))}'}")
    output.show_fields(
        [
            ("1  tunesmith serve", f"answers at http://{serve.host}:{serve.port}/v1 as model {profile.task}"),
            ("2  tunesmith worker", "in another terminal: trains, judges and puts live"),
            (f"3  tunesmith run submit {profile.task} examples.jsonl", "a first version from examples of yours"),
        ]
    )
    output.say("No examples? Rate and correct the answers of 1; they become the first round (docs/start.md).")
    output.print_id(str(started.root))


def _shown(root: Path) -> Path:
    """Relative to here where that is shorter."""
    here = Path.cwd()
    return root.relative_to(here) if root.is_relative_to(here) else root


def _place(ctx: typer.Context, folder: Path | None) -> Path | None:
    """The folder that was named, as the argument or with --workspace."""
    said = ctx.find_root().obj
    if said is not None and folder is not None and Path(said) != folder:
        raise UsageError(f"--workspace {quoted(said)} and {quoted(str(folder))} name two folders; give one of them")
    return folder if said is None else Path(said)


def demo(
    ctx: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="The demo's workspace; else tunesmith-demo.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less training: a minute instead of a few.")] = False,
) -> int:
    """The whole loop once, for real, on a small model.

    Trains, judges and deploys an adapter, and writes a report. Needs no GPU.
    """
    from rich.console import Console

    from tunesmith.demo.story import run_demo

    return run_demo(
        _place(ctx, folder) or Path("tunesmith-demo"), quick=quick, console=Console(highlight=False, emoji=False)
    )
