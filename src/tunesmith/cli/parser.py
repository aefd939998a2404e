"""How the command line is read: --workspace anywhere, the nearest name for a misspelt word, arguments many share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tunesmith.cli.output import note
from tunesmith.core.errors import UsageError, did_you_mean, quoted

if TYPE_CHECKING:
    from tunesmith.client import Client

CallError: type[Exception] = typer.BadParameter.__mro__[2]
"""The base of what the parser raises, whether typer brings its own click or imports the other."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and errors as JSON on stderr.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. recipe.lr=2e-4.")
]
Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a profile.", show_default=False)]
OfProfile = Annotated[str | None, typer.Option("--profile", metavar="NAME", help="Only those of this profile.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason, recorded in the event history.")]


class SuggestingGroup(TyperGroup):
    """A command group that shows its help when called without a command, and suggests the nearest command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not self.invoke_without_command:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return list(super().parse_args(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name not in self.commands:
            raise UsageError(f"no command {quoted(f'{ctx.command_path} {name}')}{did_you_mean(name, self.commands)}")
        return name, self.commands[name], args[1:]


def take_plain_values(command: Any) -> Any:
    """The command, whose parameters take text and what was not given as it is.

    The parser would build a pydantic model to find out that a text is a text, and importing pydantic takes longer than
    a listing. Whatever is not so plain, or is refused, goes the parser's own way.
    """
    for param in command.params:
        _plain_first(param)
    find_help = command.get_help_option
    command.get_help_option = lambda ctx: _plain_first(find_help(ctx))
    for below in getattr(command, "commands", {}).values():
        take_plain_values(below)
    return command


def _plain_first(param: Any) -> Any:
    descriptor = getattr(param, "type_descriptor", None)  # of this generation of typer; others take the long way
    kind, convert = getattr(descriptor, "annotation", None), getattr(param, "process_value", None)
    if kind is None or convert is None or param.nargs != 1 or param.multiple or "process_value" in vars(param):
        return param

    def process(ctx: Any, value: Any) -> Any:
        is_missing = value is None and not param.required
        is_text = kind is str and type(value) is str
        is_default = kind is int and type(value) is int and value == param.default
        if not (is_missing or is_text or is_default):
            return convert(ctx, value)
        return value if param.callback is None else param.callback(ctx, param, value)

    param.process_value = process
    return param


def command_group(text: str) -> typer.Typer:
    """Return a group for the commands of one resource."""
    return typer.Typer(cls=SuggestingGroup, help=text, add_completion=False, rich_markup_mode=None)


def hoist_workspace(words: Sequence[str]) -> list[str]:
    """`--workspace DIR` may stand anywhere; the parser knows it in front only."""
    front: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            return [*front, *rest, word, *left]
        if word == "--workspace":
            front += [word, next(left, "")]
        elif word.startswith("--workspace="):
            front.append(word)
        else:
            rest.append(word)
    return [*front, *rest]


def usage_message(error: Exception) -> str:
    """What the parser complains about, as one line with the nearest flag."""
    context = getattr(error, "ctx", None)
    flag = getattr(error, "option_name", None)
    if flag is not None and context is not None and type(error).__name__ == "NoSuchOption":
        flags = [name for param in context.command.params for name in param.opts if name.startswith("--")]
        return f"no option {quoted(flag)} for `{context.command_path}`{did_you_mean(flag, [*flags, '--help'])}"
    message = " ".join(str(error.format_message()).split()) if hasattr(error, "format_message") else str(error)
    message = message[:1].lower() + message[1:].rstrip(".").replace("Value error, ", "")
    return message if context is None else f"{message}; see `{context.command_path} --help`"


def open_client(ctx: typer.Context, *, serves: bool = False) -> Client:
    """Open the client. It is imported here, because `--help` must not pay for a database.

    A person is told soon who holds the store's lock; what `serves` for hours waits longer and tries again by itself.
    """
    from tunesmith.client import Client
    from tunesmith.store.lock_holder import Patience

    patience = None if serves else Patience(busy_s=20.0, stopped_s=3.0, on_wait=note)
    return Client(ctx.find_root().obj, patience=patience)
