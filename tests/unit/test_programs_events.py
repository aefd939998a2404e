"""The event log: what is whole is read, what breaks the rules is a ProgramError, and nothing else ever comes out."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tunesmith.core.errors import ProgramError
from tunesmith.profiles.settings import Phase
from tunesmith.programs.event_log import EventReader, EventWriter
from tunesmith.programs.protocol import Metrics


def line(**fields: object) -> bytes:
    return json.dumps({"v": 1, "seq": 1, "at": 1.5, **fields}).encode() + b"\n"


GOOD = line(type="log", message="hello")


def read_all(path: Path, content: bytes) -> list[object]:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    reader = EventReader(path)
    events: list[object] = []
    while batch := reader.read():
        events += batch
    return events


def test_reader_written_events_come_back_in_order(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    writer.write("phase", phase=Phase.LOAD.value, detail='é\u2028\ud800 quoted " and\nbroken')
    writer.write("metrics", step=1, values={"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    events = EventReader(tmp_path / "events.jsonl").read()
    assert [event.seq for event in events] == [1, 2]
    metrics = events[1]
    assert isinstance(metrics, Metrics)
    assert math.isnan(metrics.values["loss"])
    assert metrics.values["grad_norm"] == math.inf
    assert metrics.values["lr"] == -math.inf


def test_reader_half_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    path.write_bytes(GOOD[:20])
    assert reader.read() == []
    assert reader.has_half_line
    with path.open("ab") as sink:
        sink.write(GOOD[20:])
    assert len(reader.read()) == 1
    assert not reader.has_half_line
    assert reader.read() == []


BREACHES = {
    "not json": b"hello\n",
    "empty line": b"\n",
    "array": b"[1]\n",
    "null": b"null\n",
    "invalid utf-8": b'{"v":1,"seq":1,"at":1,"type":"log","message":"\xff"}\n',
    "nul": b"\0\0\0\n",
    "nested 100k deep": b"[" * 100_000 + b"\n",
    "unknown type": line(type="surprise"),
    "no type": line(message="x"),
    "unknown field": line(type="log", message="x", extra=1),
    "other version": line(type="log", message="x").replace(b'"v": 1', b'"v": 2'),
    "loss as text": line(type="metrics", step=1, values={"loss": "abc"}),
    "loss as true": line(type="metrics", step=1, values={"loss": True}),
    "loss null": line(type="metrics", step=1, values={"loss": None}),
    "step as text": line(type="metrics", step="1", values={}),
    "negative step": line(type="metrics", step=-1, values={}),
    "huge step": line(type="metrics", step=10**30, values={}),
    "huge seq": line(type="log", message="x", seq=10**30),
    "seq zero": line(type="log", message="x", seq=0),
    "seq repeated": GOOD + GOOD,
    "seq backwards": line(type="log", message="x", seq=5) + line(type="log", message="x", seq=4),
    "step backwards": line(type="metrics", step=5, values={}, seq=1) + line(type="metrics", step=4, values={}, seq=2),
    "at infinite": b'{"v":1,"seq":1,"at":1e999,"type":"log","message":"x"}\n',
    "unknown phase": line(type="phase", phase="lunch"),
    "unknown level": line(type="log", level="shout", message="x"),
    "checkpoint up": line(type="checkpoint", step=1, path="../up", digest="d", kinds=["last"]),
    "checkpoint dots": line(type="checkpoint", step=1, path="..", digest="d", kinds=["last"]),
    "checkpoint absolute": line(type="checkpoint", step=1, path="/etc", digest="d", kinds=["last"]),
    "checkpoint nested": line(type="checkpoint", step=1, path="a/b", digest="d", kinds=["last"]),
    "checkpoint empty": line(type="checkpoint", step=1, path="", digest="d", kinds=["last"]),
    "checkpoint nul": line(type="checkpoint", step=1, path="a\0b", digest="d", kinds=["last"]),
    "checkpoint unknown kind": line(type="checkpoint", step=1, path="a", digest="d", kinds=["worst"]),
}


@pytest.mark.parametrize("name", BREACHES)
def test_reader_breach_is_a_program_error_of_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read_all(tmp_path / "events.jsonl", BREACHES[name])
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


def test_reader_good_lines_before_and_after_each_other_are_accepted(tmp_path: Path) -> None:
    content = GOOD + line(type="metrics", step=3, values={"loss": 1}, seq=2) + line(type="log", message="x", seq=9)
    assert len(read_all(tmp_path / "events.jsonl", content)) == 3


def test_reader_line_of_200_mib_is_refused_without_holding_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as sink:
        sink.truncate(200 << 20)  # sparse: 200 MiB of NUL without a newline
    tracemalloc.start()
    try:
        with pytest.raises(ProgramError, match="longer than 1 MiB"):
            EventReader(path).read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_reader_log_of_two_gib_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as sink:
        sink.write(GOOD)
        sink.truncate(2 << 30)
    with pytest.raises(ProgramError, match="1 GiB"):
        EventReader(path).read()


def test_reader_flood_comes_in_bounded_batches_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = "x" * 1000
    with path.open("wb") as sink:
        for seq in range(1, 20_001):
            sink.write(b'{"v":1,"seq":%d,"at":1.0,"type":"log","message":"%s"}\n' % (seq, text.encode()))
    reader, sizes = EventReader(path), []
    while batch := reader.read():
        sizes.append(len(batch))
    assert sum(sizes) == 20_000
    assert max(sizes) < 10_000


def test_reader_cut_replaced_or_linked_log_is_a_breach(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(GOOD)
    reader = EventReader(path)
    assert len(reader.read()) == 1
    path.write_bytes(b"")
    with pytest.raises(ProgramError, match="cut"):
        reader.read()
    path.unlink()
    with pytest.raises(ProgramError, match="removed"):
        reader.read()
    path.symlink_to("/dev/zero")
    with pytest.raises(ProgramError):
        EventReader(path).read()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ProgramError, match="plain file"):
        EventReader(path).read()


def test_writer_line_that_does_not_fit_on_disk_is_taken_back(tmp_path: Path) -> None:
    """With a file size limit in place of a full disk: the kernel writes a part, then refuses."""
    path = tmp_path / "events.jsonl"
    pid = os.fork()
    if pid == 0:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        writer = EventWriter(path)
        try:
            for _ in range(100):
                writer.write("log", level="info", message="x" * 60)
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    reader = EventReader(path)
    assert len(reader.read()) > 3
    assert not reader.has_half_line


def test_writer_oversized_event_is_refused_before_it_is_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="more than"):
        writer.write("log", message="x" * (1 << 20))
    writer.write("log", message="small")
    assert [event.seq for event in EventReader(tmp_path / "events.jsonl").read()] == [1]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_TYPES = st.sampled_from(
    ["started", "phase", "progress", "metrics", "validation", "checkpoint", "ack", "log", "finished", "odd"]
)
_FIELDS = st.sampled_from(
    ["pid", "phase", "done", "total", "step", "values", "is_best", "path", "digest", "kinds", "request_id", "message"]
)
_ALMOST = st.builds(
    lambda kind, seq, fields: json.dumps({"v": 1, "seq": seq, "at": 1.0, "type": kind, **fields}).encode(),
    _TYPES,
    st.integers(-1, 5),
    st.dictionaries(_FIELDS, _VALUES, max_size=5),
)
_MUTATED = st.builds(
    lambda good, place, byte: good[: place % len(good)] + bytes([byte]) + good[place % len(good) + 1 :],
    _ALMOST,
    st.integers(0, 1000),
    st.integers(0, 255),
)
_LINES = st.lists(st.binary(max_size=60) | _ALMOST | _MUTATED | st.just(GOOD.strip()), max_size=5)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=_LINES, ending=st.sampled_from([b"\n", b""]))
def test_reader_any_bytes_give_events_or_a_program_error(tmp_path: Path, lines: list[bytes], ending: bytes) -> None:
    try:
        events = read_all(tmp_path / "events.jsonl", b"\n".join(lines) + ending)
    except ProgramError:
        return
    sequence = [event.seq for event in events if isinstance(event, BaseModel)]  # type: ignore[attr-defined]
    assert sequence == sorted(set(sequence))
    assert len(sequence) == len(events)


def test_reader_10_000_damaged_lines_give_an_event_or_a_program_error(tmp_path: Path) -> None:
    """The drill of the protocol: every line is a good one with a few bytes changed, cut or doubled."""
    draw = random.Random(15)
    path = tmp_path / "events.jsonl"
    good = [
        BREACHES["checkpoint nested"].replace(b"a/b", b"ab"),
        GOOD,
        line(type="metrics", step=1, values={"loss": 1.5}),
    ]
    num_read = num_refused = 0
    for _ in range(10_000):
        damaged = bytearray(draw.choice(good)[:-1])
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(damaged))
            match draw.randrange(3):
                case 0:
                    damaged[place] = draw.randrange(256)
                case 1:
                    del damaged[place]
                case 2:
                    damaged[place:place] = damaged[place : place + draw.randint(1, 9)]
        path.unlink(missing_ok=True)  # some file systems flush a file that is written over
        path.write_bytes(damaged.replace(b"\n", b" ") + b"\n")
        try:
            num_read += len(EventReader(path).read())
        except ProgramError as error:
            num_refused += error.message.isprintable()
    assert num_read + num_refused == 10_000
    assert num_read > 100
    assert num_refused > 5000
