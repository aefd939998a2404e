"""One thread of another process stopped, the others running: by a tracer process that holds it until it is told to end.

SIGSTOP stops whole processes. A thread that is traced (ptrace) stops alone, as if it waited for a lock for ever.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # it starts itself as a script

from support.workspaces import wait_for

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000


def thread_named(pid: int, name: str) -> int:
    """Its id; `compute` is the main thread."""
    if name == "compute":
        return pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return int(task.name)
    raise AssertionError(f"process {pid} has no thread {name!r}")


@contextmanager
def stuck_thread(pid: int, name: str) -> Iterator[None]:
    """Let one thread stand still, until the block ends or its process does; skips where tracing is not allowed."""
    thread_id = thread_named(pid, name)
    with subprocess.Popen([sys.executable, __file__, str(thread_id)], stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        if tracer.stdout.readline().strip() != "stopped":
            pytest.skip("this machine does not allow one process to trace another")
        wait_for(lambda: _is_stopped(pid, thread_id), 5.0)
        try:
            yield
        finally:
            tracer.kill()  # whatever it traced goes on


def _is_stopped(pid: int, thread_id: int) -> bool:
    stat = Path(f"/proc/{pid}/task/{thread_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] in "tT"


def _trace(thread_id: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    done = [libc.ptrace(request, thread_id, 0, 0) for request in (_SEIZE, _INTERRUPT)]
    sys.stdout.write("stopped\n" if done == [0, 0] else "refused\n")
    sys.stdout.flush()
    while True:  # a traced thread that was killed is gone only once its tracer has looked
        try:
            os.waitpid(-1, _WALL)
        except ChildProcessError:
            return


if __name__ == "__main__":
    _trace(int(sys.argv[1]))
