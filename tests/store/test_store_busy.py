"""A process that holds SQLite's write lock: who waits is told who it is, soon, and nothing blames the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy.pool import QueuePool

from support.rows import a_task
from support.workspaces import a_workspace, cli, wait_for
from tunesmith.client import Client
from tunesmith.core.errors import StoreBusy
from tunesmith.store.lock_holder import Patience, find_holder
from tunesmith.store.schema import open_store

_HOLD = """
import sys, time
from tunesmith.store.schema import open_store
database = open_store(sys.argv[1])
with database.write() as tx:
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
print("let go", flush=True)
"""


@contextmanager
def _held(store: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the write lock for that long; it has ended afterwards."""
    words = [sys.executable, "-c", _HOLD, f"sqlite:///{store}", str(seconds)]
    # a group of its own: the kernel throws a terminal's stop away in an orphaned one, as a background job's may be
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path / "w") as client:
        yield client


@pytest.mark.slow
def test_stopped_holder_is_named_within_seconds_and_the_disk_is_not_blamed(client: Client) -> None:
    with _held(client.workspace.store_file, 600) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        wait_for(lambda: _state(holder.pid) == "T" or None)
        ended = cli("estop", "on", cwd=client.workspace.root)
        assert ended.code == 1
        assert ended.took_s < 15  # 3 s of patience, and the start of Python on a loaded machine
        assert f"process {holder.pid} on " in ended.err
        assert ", stopped)" in ended.err
        assert f"kill -CONT {holder.pid}" in ended.err
        assert "disk" not in ended.err
        (check,) = [each for each in client.system.doctor() if each.name == "store"]
        assert (check.state, f"process {holder.pid}" in check.finding) == ("broken", True)
        assert cli("estop", "show", cwd=client.workspace.root).last_line == "off"  # reading goes on
    assert cli("estop", "on", cwd=client.workspace.root).code == 0


def test_running_holder_is_waited_for_and_named_meanwhile(sqlite_store: Path) -> None:
    told: list[str] = []
    database = open_store(f"sqlite:///{sqlite_store}", patience=Patience(60.0, 0.2, told.append))
    with _held(sqlite_store, 1.5) as holder, database.write() as tx:
        a_task(tx)
    database.close()
    assert len(told) == 1
    assert f"process {holder.pid} on " in told[0]


def test_lock_of_another_thread_is_told_once_patience_ends(sqlite_store: Path) -> None:
    patience = Patience(0.3, 0.3)
    first, second = (open_store(f"sqlite:///{sqlite_store}", patience=patience) for _ in range(2))
    with first.write():
        holder = find_holder(str(sqlite_store))
        assert holder is not None
        assert holder.pid == os.getpid()
        with pytest.raises(StoreBusy, match="another thread of this process"), second.write():
            pass
    assert find_holder(str(sqlite_store)) is None
    first.close()
    second.close()


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN])
def test_terminal_stop_waits_for_the_end_of_the_transaction(sqlite_store: Path, number: signal.Signals) -> None:
    with _held(sqlite_store, 0.7) as holder:
        os.kill(holder.pid, number)
        wait_for(lambda: _state(holder.pid) == "T" or None)
        database = open_store(f"sqlite:///{sqlite_store}", patience=Patience(1.0, 1.0))
        with database.write() as tx:  # it is stopped, and it does not hold the lock
            a_task(tx)
        database.close()
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "let go\n"


def test_service_waits_for_a_stopped_holder(sqlite_store: Path) -> None:
    database = open_store(f"sqlite:///{sqlite_store}")
    with _held(sqlite_store, 600) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        timer = threading.Timer(4.0, holder.kill)  # longer than one look at who holds the lock
        timer.start()
        with database.write() as tx:
            a_task(tx)
        timer.join()
    database.close()


def test_dropped_transaction_stops_no_thread_while_the_next_waits_on_its_connection(sqlite_store: Path) -> None:
    """Its cursor used to be reset under the interpreter's lock: 8 threads needed 15 s for 400 small transactions."""
    database, other = (open_store(f"sqlite:///{sqlite_store}") for _ in range(2))
    with database.write() as ended:
        a_task(ended)

    def next_one() -> None:
        with database.write() as tx:
            a_task(tx)

    thread = threading.Thread(target=next_one)
    with other.write():
        thread.start()
        wait_for(lambda: cast(QueuePool, database.engine.pool).checkedout() == 1 or None)
        time.sleep(0.1)  # it has the connection, and asks for the lock now
        begun = time.monotonic()
        del ended
        assert time.monotonic() - begun < 1.0
    thread.join(10)
    assert not thread.is_alive()
    database.close()
    other.close()
