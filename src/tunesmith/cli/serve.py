"""`tunesmith serve`: answer chat requests with what is live, and learn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import first_line, say, show_fields
from tunesmith.cli.parser import open_client

if TYPE_CHECKING:
    from tunesmith.serving.gateway.server import Ready

EXAMPLE = "Example: tunesmith serve --port 8321, then OpenAI(base_url='http://127.0.0.1:8321/v1', api_key='any')"


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
        Server(client.serving.session, server, _show).run()


def _show(ready: Ready) -> None:
    say(f"serving at {ready.url}")
    for profile, version in ready.serving.items():
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
