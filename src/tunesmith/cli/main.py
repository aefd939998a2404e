"""`tunesmith`: the command line. Registration of the nouns, and the one place where a call ends.

Exit codes: 0 ok, 1 refused or failed, 2 usage, 130 interrupted. Errors are one line each on stderr and leave stdout
empty; with --json they are one object there: {"error": {"code": …, "message": …}}.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from tunesmith.cli import output
from tunesmith.cli.parser import CallError, SuggestingGroup, hoist_workspace, take_plain_values, usage_message
from tunesmith.core.errors import UsageError

NOUNS = {
    "init": ("init", "init"),
    "demo": ("init", "demo"),
    "base": ("base", "commands"),
    "worker": ("system", "worker"),
    "serve": ("system", "serve"),
    "plan": ("plan", "plan"),
    "inbox": ("system", "inbox"),
    "doctor": ("system", "doctor"),
    "estop": ("system", "estop"),
    "profile": ("profile", "commands"),
    "campaign": ("campaign", "commands"),
    "config": ("profile", "config_commands"),
    "experience": ("experience", "commands"),
    "feedback": ("experience", "feedback_commands"),
    "curriculum": ("curriculum", "commands"),
    "dataset": ("dataset", "commands"),
    "run": ("run", "commands"),
    "adapter": ("adapter", "commands"),
    "gate": ("gate", "commands"),
    "lineage": ("lineage", "lineage"),
}
"""By its first word, where a command or a group of them is; a call imports only its own."""
VERBS = {
    "campaign": (("file_drop", "drop"),),
    "experience": (("review", "review"), ("forget", "forget")),
    "adapter": (("adapter_papers", "provenance"), ("adapter_papers", "card")),
    "run": (("lineage", "lineage"),),
    "dataset": (("outliers", "outliers"), ("dataset_quarantine", "quarantine"), ("dataset_quarantine", "release")),
}
"""Commands of a group that have a module of their own."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.say(f"tunesmith {version('tunesmith')}")
        raise typer.Exit


def root(
    ctx: typer.Context,
    workspace: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The workspace; else TUNESMITH_WORKSPACE, else the nearest one from here upwards."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Keeps a model that you own getting better from its own use, and never lets it get worse."""
    if workspace == "":
        raise UsageError("--workspace names no folder; write --workspace DIR")
    ctx.obj = workspace


def main() -> NoReturn:
    """The `tunesmith` script."""
    sys.exit(call(sys.argv[1:]))


def call(words: Sequence[str]) -> int:
    """One call of the command line, from words to exit code; never raises."""
    output.prepare_streams()
    try:
        code = _invoke(hoist_workspace(words))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        output.abandon_stdout()
        return 1
    except Exception as error:
        if os.environ.get(output.DEBUG_VARIABLE):
            traceback.print_exc()
        is_usage = isinstance(error, CallError)
        name, message, code = ("usage", usage_message(error), 2) if is_usage else output.explain_error(error)
        output.report(name, message, as_json="--json" in words)
    return output.end_of_output() or code


@cache
def command_tree(noun: str | None = None) -> Any:
    """Return the tree of all commands, or of one noun's. Built once, because that is most of a second call's time."""
    app = typer.Typer(
        cls=SuggestingGroup,
        add_completion=False,
        rich_markup_mode=None,  # panels cost a hundred milliseconds, and help must be quick and fit any pipe
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 ok, 1 refused or failed, 2 usage. Every listing and `show` takes --json.",
    )
    app.callback(invoke_without_command=False)(root)
    for name in NOUNS if noun is None else (noun,):
        place, attribute = NOUNS[name]
        module = import_module(f"tunesmith.cli.{place}")
        found = getattr(module, attribute)
        if isinstance(found, typer.Typer):
            _add_verbs(name)
            app.add_typer(found, name=name)
        else:
            app.command(name, epilog=getattr(module, f"{name.upper()}_EXAMPLE", None))(found)
    return take_plain_values(typer.main.get_command(app))


@cache
def _add_verbs(noun: str) -> None:
    for place, verb in VERBS.get(noun, ()):
        group, module = import_module(f"tunesmith.cli.{noun}").commands, import_module(f"tunesmith.cli.{place}")
        group.command(epilog=getattr(module, f"{verb.upper()}_EXAMPLE", None))(getattr(module, verb))


def _invoke(words: list[str]) -> int:
    command = command_tree(_noun(words))
    try:
        with command.make_context("tunesmith", words) as context:
            code = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return code if isinstance(code, int) else 0


def _noun(words: list[str]) -> str | None:
    """The noun that a call names; None where it names none, which only the whole tree can answer."""
    own = words
    while own and own[0].startswith("--workspace"):  # which `hoist_workspace` has put in front
        own = own[1:] if "=" in own[0] else own[2:]
    return own[0] if own and own[0] in NOUNS else None


if __name__ == "__main__":
    main()
