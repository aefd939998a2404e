"""The embedded engine's program: one base model in a process of its own, asked over a socket that it inherits.

``python -m tunesmith.serving.engine.main FD SPEC``: it ends as soon as the other side of the socket is closed, and with
the process that started it.
"""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

from tunesmith.core.errors import ConfigError, TunesmithError
from tunesmith.core.files import verify_folder
from tunesmith.core.logs import show_on_stderr
from tunesmith.profiles.base_model import base_digest
from tunesmith.programs.shim import PR_SET_PDEATHSIG, set_process_option
from tunesmith.serving.engine_spec import EngineSpec


def main(argv: list[str]) -> int:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)  # first: what follows takes seconds
    show_on_stderr()
    channel = socket.socket(fileno=int(argv[0]))
    if _is_closed(channel):  # whoever started us died before we asked to die with it
        return 0
    spec = EngineSpec.model_validate_json(argv[1])
    try:
        _check_files(spec)
        from tunesmith.serving.engine.program import serve  # only now: it takes seconds

        serve(spec, channel)
    except TunesmithError as error:
        print(error, file=sys.stderr)  # noqa: T201 (the gateway shows the end of it)
        return error.exit_code
    return 0


def _is_closed(channel: socket.socket) -> bool:
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _check_files(spec: EngineSpec) -> None:
    """What is loaded must be what was asked for."""
    if spec.digest is not None and base_digest(Path(spec.base)) != spec.digest:
        raise ConfigError(f"the base model in {spec.base} is not the one that was asked for; put it back")
    if spec.weights is not None:
        verify_folder(Path(spec.weights), spec.weights_digest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
