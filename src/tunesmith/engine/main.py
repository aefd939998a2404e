"""The embedded engine's program: one base model in a process of its own, asked over a socket that it inherits.

``python -m tunesmith.engine.main FD SPEC``: it ends as soon as the other side of the socket is closed, and with the
process that started it.
"""

from __future__ import annotations

import signal
import socket
import sys

from tunesmith.domain.engine_spec import EngineSpec
from tunesmith.errors import TunesmithError
from tunesmith.logs import show_on_stderr
from tunesmith.programs.shim import PR_SET_PDEATHSIG, set_process_option


def main(argv: list[str]) -> int:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)  # first: what follows takes seconds
    show_on_stderr()
    channel = socket.socket(fileno=int(argv[0]))
    spec = EngineSpec.model_validate_json(argv[1])
    from tunesmith.engine.program import serve

    try:
        serve(spec, channel)
    except TunesmithError as error:
        print(error, file=sys.stderr)  # noqa: T201 (the gateway shows the end of it)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
