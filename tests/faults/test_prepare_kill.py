"""Preparation that is killed, interrupted or runs out of room leaves no dataset and, in the end, no trace."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data import HALF, a_file, chats, encoded, num_examples
from support.quick_processes import run_code
from tunesmith.core.errors import TunesmithError
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import summary, verify

PREPARE = """
import sys, os, signal, resource
from pathlib import Path
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PrepareOptions

def on_progress(done, total, rows):
    {on_progress}

if __name__ == "__main__":
    {before}
    source, out = map(Path, sys.argv[1:])
    prepare([source], out, PrepareOptions(), on_progress=on_progress, num_processes={processes})
    # VmHWM, because ru_maxrss survives exec: it would tell of the test process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024)
"""


SOAK = pytest.mark.soak


def a_program(on_progress: str = "pass", before: str = "pass", processes: int = 1) -> list[str]:
    return [sys.executable, "-c", PREPARE.format(on_progress=on_progress, before=before, processes=processes)]


def run(program: list[str], source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, str(source), str(out)], capture_output=True, text=True, timeout=120, check=False)


def run_forked(program: list[str], source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Without the second of imports; a new one where its memory or its group of processes is the point."""
    return run_code(program[-1], source, out)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def a_large_file(folder: Path, num: int) -> Path:
    padding = " and so on" * 20
    rows = (
        {"prompt": f"Question {number}{padding}", "completion": f"Answer {number}{padding}"} for number in range(num)
    )
    path = folder / f"{num}.jsonl"
    with path.open("wb") as sink:
        for row in rows:
            sink.write(encoded(row))
    return path


@pytest.mark.parametrize(
    ("at", "processes"),
    [(0, 1), (5000, 2), (12_000, 1), *(pytest.param(*case, marks=SOAK) for case in ((0, 2), (5000, 1), (12_000, 2)))],
)
def test_kill_leaves_nothing_published_and_the_next_call_cleans_up(tmp_path: Path, at: int, processes: int) -> None:
    source, out = a_large_file(tmp_path, 15_000), tmp_path / "datasets" / "ds-1"
    killed = run_forked(
        a_program(f"rows > {at} and os.kill(os.getpid(), signal.SIGKILL)", processes=processes), source, out
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    (staging,) = left_in(out.parent)
    assert staging.startswith(".ds-1.staging-")
    dataset = prepare([source], out, HALF)
    assert left_in(out.parent) == ["ds-1"]
    assert num_examples(dataset) == 15_000
    verify(out, dataset.fingerprint)


def test_kill_just_before_the_folder_is_renamed_leaves_nothing_published(tmp_path: Path) -> None:
    source, out = a_large_file(tmp_path, 2000), tmp_path / "datasets" / "ds-1"
    before = "os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)"
    killed = run_forked(a_program(before=before), source, out)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    prepare([source], out, HALF)
    assert left_in(out.parent) == ["ds-1"]


def test_children_end_with_the_parent(tmp_path: Path) -> None:
    source, out = a_large_file(tmp_path, 15_000), tmp_path / "datasets" / "ds-1"
    children = "open('/proc/self/task/%d/children' % os.getpid()).read()"
    stop = f"print({children}, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    killed = run_forked(a_program(stop, processes=3), source, out)
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 20
    while any(is_parser(pid) for pid in pids):
        assert time.monotonic() < deadline, "a parsing process outlived its parent"
        time.sleep(0.05)


def is_parser(pid: int) -> bool:
    try:
        return b"parse_pool" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupt_cleans_up_and_goes_on_upwards(tmp_path: Path, processes: int) -> None:
    source, out = a_large_file(tmp_path, 15_000), tmp_path / "datasets" / "ds-1"
    program = a_program("rows > 5000 and os.kill(0, signal.SIGINT)", processes=processes)
    interrupted = subprocess.run(
        [*program, str(source), str(out)], capture_output=True, text=True, timeout=120, check=False, process_group=0
    )
    assert interrupted.returncode == -signal.SIGINT
    assert interrupted.stderr.count("KeyboardInterrupt") == 1  # the children say nothing
    assert left_in(out.parent) == []


@pytest.mark.parametrize("num_processes", [1, 2])
def test_error_of_the_observer_ends_the_preparation_and_cleans_up(tmp_path: Path, num_processes: int) -> None:
    def stop(done: int, total: int, rows: int) -> None:
        raise TunesmithError("the lease is lost")

    source, out = a_file(tmp_path, encoded(*chats(3000))), tmp_path / "datasets" / "ds-1"
    with pytest.raises(TunesmithError, match="the lease is lost"):
        prepare([source], out, HALF, on_progress=stop, num_processes=num_processes)
    assert left_in(out.parent) == []


def test_killed_child_is_an_error_that_cleans_up(tmp_path: Path) -> None:
    def kill_children(done: int, total: int, rows: int) -> None:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if is_parser(int(pid)):
                os.kill(int(pid), signal.SIGKILL)

    source, out = a_large_file(tmp_path, 60_000), tmp_path / "datasets" / "ds-1"
    with pytest.raises(TunesmithError, match="a process that parses the data has ended"):
        prepare([source], out, HALF, on_progress=kill_children, num_processes=2)
    assert left_in(out.parent) == []


@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_no_room_to_write_is_an_error_that_cleans_up(tmp_path: Path, limit: int) -> None:
    source, out = a_large_file(tmp_path, 15_000), tmp_path / "datasets" / "ds-1"
    before = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    failed = run(a_program(before=before), source, out)  # a forked one tells its error into a file
    assert failed.returncode == 1
    assert "OSError: [Errno 27]" in failed.stderr
    assert left_in(out.parent) == []


def test_staging_of_a_preparation_under_way_is_left_alone(tmp_path: Path) -> None:
    source, folder = a_file(tmp_path, encoded(*chats(3000))), tmp_path / "datasets"
    inner: list[str] = []

    def prepare_another(done: int, total: int, rows: int) -> None:
        if not inner:
            inner.append(prepare([source], folder / "ds-2", HALF).fingerprint)

    outer = prepare([source], folder / "ds-1", HALF, on_progress=prepare_another)
    assert inner == [outer.fingerprint]
    assert left_in(folder) == ["ds-1", "ds-2"]


def test_two_at_once_for_one_folder_publish_one_dataset(tmp_path: Path) -> None:
    source, out = a_large_file(tmp_path, 15_000), tmp_path / "datasets" / "ds-1"
    argv = [*a_program(), str(source), str(out)]
    both = [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert left_in(out.parent) == ["ds-1"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=SOAK)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, processes: int) -> None:
    memory = {}
    for num in (25_000, 125_000):
        done = run(a_program(processes=processes), a_large_file(tmp_path, num), tmp_path / "datasets" / f"ds-{num}")
        assert done.returncode == 0, done.stderr
        memory[num] = int(done.stdout)
    assert memory[125_000] < memory[25_000] + 40  # MB; the files are 12 and 62 MB


def _as_array(source: Path) -> None:
    source.write_bytes(b"[" + source.read_bytes().rstrip().replace(b"\n", b",\n") + b"]")


def _as_parquet(source: Path) -> None:
    rows = pa.Table.from_pylist([json.loads(line) for line in source.read_bytes().splitlines()])
    pq.write_table(rows, source)  # one row group


def _as_gzip(source: Path) -> None:
    source.write_bytes(gzip.compress(source.read_bytes(), 1))


@pytest.mark.parametrize(
    "convert", [_as_array, pytest.param(_as_parquet, marks=SOAK), pytest.param(_as_gzip, marks=SOAK)]
)
def test_memory_does_not_grow_with_what_is_in_a_container(tmp_path: Path, convert: Callable[[Path], None]) -> None:
    memory = {}
    for num in (30_000, 120_000):
        source = a_large_file(tmp_path, num)
        convert(source)
        done = run(a_program(), source, tmp_path / "datasets" / f"ds-{num}")
        assert done.returncode == 0, done.stderr
        memory[num] = int(done.stdout)
    assert memory[120_000] < memory[30_000] + 60  # MB; the texts are 15 and 60 MB


@pytest.mark.parametrize("num_bytes", [400 << 20, pytest.param(5 << 30, marks=pytest.mark.soak)])
def test_giant_line_is_skipped_without_being_held(tmp_path: Path, num_bytes: int) -> None:
    source = a_large_file(tmp_path, 2000)
    with source.open("ab") as sink:
        sink.truncate(source.stat().st_size + num_bytes)  # a hole: one line of NULs that takes no room on disk
        sink.seek(0, os.SEEK_END)
        sink.write(b"\n" + encoded({"prompt": "And after it?", "completion": "Still here."}))
    out = tmp_path / "datasets" / "ds-1"
    done = run(a_program(), source, out)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300  # MB
    (drop,) = summary(out).report.drops
    assert (drop.reason.value, drop.first[0].line, drop.num) == ("too_long", 2001, 1)
