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
from typing import Annotated, Any, NoReturn

import typer

from tunesmith.cli import (
    adapter,
    campaign,
    curriculum,
    dataset,
    dataset_quarantine,
    experience,
    forget,
    init,
    outliers,
    output,
    plan,
    profile,
    review,
    run,
    system,
)
from tunesmith.cli.parser import CallError, SuggestingGroup, hoist_workspace, usage_message
from tunesmith.core.errors import UsageError

app = typer.Typer(
    cls=SuggestingGroup,
    add_completion=False,
    rich_markup_mode=None,  # panels cost a hundred milliseconds, and help must be quick and fit any pipe
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 refused or failed, 2 usage. Every listing and `show` takes --json.",
)
app.command("init")(init.init)
app.command("demo")(init.demo)
app.command("worker")(system.worker)
app.command("serve", epilog=system.SERVE_EXAMPLE)(system.serve)
app.command("plan")(plan.plan)
app.command("inbox", epilog=system.INBOX_EXAMPLE)(system.inbox)
app.command("doctor")(system.doctor)
app.add_typer(system.estop, name="estop")
app.add_typer(profile.commands, name="profile")
app.add_typer(campaign.commands, name="campaign")
app.add_typer(profile.config_commands, name="config")
experience.commands.command(epilog=review.EXAMPLE)(review.review)
experience.commands.command(epilog=forget.EXAMPLE)(forget.forget)
dataset.commands.command(epilog=outliers.EXAMPLE)(outliers.outliers)
dataset.commands.command()(dataset_quarantine.quarantine)
dataset.commands.command(epilog=dataset_quarantine.EXAMPLE)(dataset_quarantine.release)
app.add_typer(experience.commands, name="experience")
app.add_typer(experience.feedback_commands, name="feedback")
app.add_typer(curriculum.commands, name="curriculum")
app.add_typer(dataset.commands, name="dataset")
app.add_typer(run.commands, name="run")
app.add_typer(adapter.commands, name="adapter")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.say(f"tunesmith {version('tunesmith')}")
        raise typer.Exit


@app.callback(invoke_without_command=False)
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
def command_tree() -> Any:
    """Return the tree of all commands. Built once: that is most of the time of a second call in the same process."""
    return typer.main.get_command(app)


def _invoke(words: list[str]) -> int:
    command = command_tree()
    try:
        with command.make_context("tunesmith", words) as context:
            code = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
