"""A dropped request: what is read, what is done next, and that no kill between two steps loses or doubles anything."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunesmith.core.errors import UsageError
from tunesmith.orchestration.file_drop.request import DropRequest, Unreadable, parse_request
from tunesmith.orchestration.file_drop.rules import (
    Answer,
    RunProgress,
    Seen,
    Step,
    acknowledged,
    next_step,
    refused,
    report,
    why_never,
)
from tunesmith.orchestration.file_drop.units import units_for
from tunesmith.runs.rules.run import RUN, RunState

AT = datetime(2026, 1, 31, 12, 0, 0, 7_000, tzinfo=UTC)
ASKED: dict[str, Any] = {"v": 1, "id": "nightly-1", "campaign": "helpdesk"}


def encoded(**changed: Any) -> bytes:
    return json.dumps({**ASKED, **changed}).encode()


def why_not(data: bytes) -> Unreadable:
    with pytest.raises(Unreadable) as caught:
        parse_request(data)
    return caught.value


def test_request_of_every_key_is_read() -> None:
    metadata = {"ticket": "T-17"}
    found = parse_request(encoded(data="out/new.jsonl", data_sha256="0" * 64, asked_by="the CRM", metadata=metadata))
    assert (found.id, found.campaign, found.data, found.asked_by) == (
        "nightly-1",
        "helpdesk",
        "out/new.jsonl",
        "the CRM",
    )
    assert found.digest != parse_request(encoded(data="out/new.jsonl")).digest
    assert parse_request(encoded()).digest == parse_request(encoded(data=None)).digest
    here, there = Path("/a"), Path("/b")
    assert found.idempotency_key(here) == parse_request(encoded()).idempotency_key(here)
    assert found.idempotency_key(here) != found.idempotency_key(there)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encoded(campain="x"), "unknown key 'campain'; did you mean 'campaign'?"),
        (encoded(overrides={"recipe.lr": 1.0}), "a request changes no settings"),
        (encoded(v=2), "v: input should be 1"),
        (encoded(v=True), "v: must be the number 1"),
        (encoded(v=1.0), "v: must be the number 1"),
        (encoded(profile="support"), "names both a campaign and a profile"),
        (encoded(campaign=""), "campaign: string should have at least 1 character"),
        (encoded(campaign="  "), "campaign: must be printable"),
        (encoded(campaign=7), "campaign: input should be a valid string"),
        (encoded(asked_by="a\nb"), "asked_by: must be printable"),
        (encoded(asked_by="\ud800"), "asked_by: "),
        (encoded(metadata={"a": "x\0"}), "metadata: must be printable"),
        (encoded(metadata={f"k{i}": "x" for i in range(17)}), "metadata: must have at most 16"),
        (encoded(metadata={"opened.by": "x"}), "metadata.opened.by"),
        (encoded(data="../secret.jsonl"), "data: must be a relative path inside the folder, without '..'"),
        (encoded(data="a/../../secret.jsonl"), "data: must be a relative path"),
        (encoded(data="/etc/secret.jsonl"), "data: must be a relative path"),
        (encoded(data="a//b.jsonl"), "data: must be a relative path"),
        (encoded(data="./b.jsonl"), "data: must be a relative path"),
        (encoded(data="b.parquet"), "data: must be a .jsonl file"),
        (encoded(data="b\0.jsonl"), "data: must be printable"),
        (encoded(data_sha256="0" * 64), "data_sha256 without data"),
        (encoded(data="b.jsonl", data_sha256="ABC"), "data_sha256: string should match"),
        (b'{"v": 1, "v": 1, "id": "a"}', "the key 'v' stands there twice"),
        (b'{"v": NaN, "id": "a"}', "NaN is not JSON"),
        (b"[1]", "it is not a JSON object"),
        (b"[" * 60_000, "it is nested too deeply"),
        (b'{"id": "a"}', "the key 'v' is missing"),
        (b'{"v": 1}', "the key 'id' is missing"),
    ],
)  # fmt: skip
def test_request_that_can_never_be_one_is_refused_with_its_reason(data: bytes, message: str) -> None:
    error = why_not(data)
    assert message in error.message
    assert not error.may_be_incomplete


@pytest.mark.parametrize("data", [b"", b"{", encoded()[:-1], encoded() + b"}", b'{"v": "\xff"}', "{}".encode("utf-16")])
def test_file_that_is_not_json_yet_may_be_half_written(data: bytes) -> None:
    assert why_not(data).may_be_incomplete


@pytest.mark.parametrize("request_id", ["", ".", "..", "a/b", "-a", "a b", "a\n", "a" * 65, "é", 7, None])
def test_id_must_be_usable_as_a_folder_name(request_id: Any) -> None:
    error = why_not(encoded(id=request_id))
    assert error.message.startswith("id: ")
    assert error.request_id is None, "nothing is named after it"
    assert why_not(encoded(id="good", v=2)).request_id == "good"


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([*DropRequest.model_fields, "x"]), inner, max_size=5), max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_a_request_or_a_reason(data: bytes) -> None:
    try:
        found = parse_request(data)
    except Unreadable as error:
        reason = error.message
    else:
        reason = "none"
        assert parse_request(found.model_dump_json().encode()) == found
    assert reason
    assert "\n" not in reason


def progress(request: DropRequest, state: RunState = RunState.QUEUED, digest: str | None = None) -> RunProgress:
    ended = AT if state in RUN.finished else None
    said = request.digest if digest is None else digest
    return RunProgress("run-1", said, state, "why", "helpdesk", "ds-1", None, None, AT, AT, ended)


def test_archive_is_named_after_time_and_id_and_sorts_by_time() -> None:
    request = parse_request(encoded())
    first = refused(request, "refused", "no", taken_at=AT, now=AT)
    later = report(request, progress(request, RunState.FAILED), taken_at=AT, now=AT + timedelta(milliseconds=1))
    assert (first.archive_name, first.is_final) == ("20260131T120000.007Z-nightly-1", True)
    assert first.archive_name < later.archive_name
    assert refused(Unreadable("no"), "data", "no", taken_at=AT, now=AT).archive_name.endswith("Z-unreadable")


@pytest.mark.parametrize("state", list(RunState))
def test_answer_is_final_if_the_run_has_ended(state: RunState) -> None:
    request = parse_request(encoded())
    answer = report(request, progress(request, state), taken_at=AT, now=AT)
    assert answer.is_final == (state in RUN.finished) == (answer.answered_at is not None)
    step = next_step(Seen(is_pending=True, taken=request, answer=answer, run=progress(request, state)))
    assert step is (Step.ARCHIVE if answer.is_final else Step.REPORT)


def test_id_of_an_earlier_request_with_another_content_is_refused() -> None:
    request = parse_request(encoded())
    seen = Seen(taken=request, run=progress(request, digest="another"))
    assert next_step(seen) is Step.REFUSE
    assert why_never(seen)[1].startswith("the id nightly-1 belongs to another request (run-1)")


class Killed(Exception):
    """The process ended here."""


@dataclass
class World:
    """The folder and the store, as a process that may be killed before any of its actions moves them."""

    pending: DropRequest | None = None
    working: DropRequest | None = None
    result: Answer | None = None
    archive: list[tuple[DropRequest, Answer]] = field(default_factory=list)
    runs: dict[str, RunProgress] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    asked: list[DropRequest] = field(default_factory=list)
    now: datetime = AT
    lives: int = 0
    """Actions until the kill."""
    blocked: bool = False
    """Whether a guard refuses rounds."""

    def act(self) -> None:
        self.now += timedelta(seconds=1)
        if self.lives == 0:
            raise Killed
        self.lives -= 1

    def ask(self, request: DropRequest) -> None:
        if self.pending is None:  # a program waits until its earlier file was taken
            self.pending = request
            self.asked.append(request)

    def write(self, answer: Answer) -> None:
        self.act()
        self.result = answer

    def step(self) -> Step:
        taken = self.working
        run = None if taken is None else self.runs.get(taken.id)
        seen = Seen(self.pending is not None, taken, self.result if taken is not None else None, run)
        step, since = next_step(seen), self.now
        if step is Step.TAKE:
            self.act()
            self.result = None
            self.act()
            self.working, self.pending = self.pending, None
        elif step is Step.ARCHIVE:
            self.act()  # the copy of the answer; the move of the request is what counts
            self.act()
            assert taken is not None
            assert self.result is not None
            self.archive.append((taken, self.result))
            self.working = None
        elif step is Step.REFUSE:
            assert taken is not None
            self.write(refused(taken, *why_never(seen), taken_at=since, now=self.now))
        elif step is Step.OPEN:
            assert taken is not None
            if seen.answer is None:
                self.write(acknowledged(taken, since))
            self.act()
            if self.blocked or any(each.ended_at is None for each in self.runs.values()):
                self.write(refused(taken, "refused", "blocked", taken_at=since, now=self.now))
            else:
                self.runs[taken.id] = progress(taken)
                self.opened.append(taken.id)
        elif step is Step.REPORT:
            assert taken is not None
            assert run is not None
            self.write(report(taken, run, taken_at=since, now=self.now))
        return step

    def work(self, lives: int) -> None:
        self.lives = lives
        try:
            while (step := self.step()) is not Step.IDLE:
                if step is Step.REPORT and self.result is not None and not self.result.is_final:
                    break  # the run has to be waited for
        except Killed:
            pass

    def move(self, state: RunState) -> None:
        for key, run in self.runs.items():
            if run.ended_at is None and RUN.allows(run.state, state):
                self.runs[key] = replace(run, state=state, ended_at=self.now if state in RUN.finished else None)

    def end(self) -> None:
        """Every run ends, from whatever state it is in."""
        for key, run in self.runs.items():
            if run.ended_at is None:
                self.runs[key] = replace(run, state=RunState.CANCELLED, ended_at=self.now)


REQUESTS = [DropRequest(v=1, id=each, campaign=name) for each in "abc" for name in ("x", "y")]
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(REQUESTS)),
    st.tuples(st.just("work"), st.integers(0, 12)),
    st.tuples(st.just("move"), st.sampled_from(list(RunState))),
    st.tuples(st.just("blocked"), st.booleans()),
)


@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_requests_kills_and_moves_answers_each_request_once(happened: list[tuple[str, Any]]) -> None:
    world = World()
    for name, value in happened:
        if name == "blocked":
            world.blocked = value
        else:
            getattr(world, name)(value)
        assert sum(run.ended_at is None for run in world.runs.values()) <= 1, "stacked"
        assert len(set(world.opened)) == len(world.opened), "opened twice"
    for _ in range(4):  # nobody is killed any more, and runs end
        world.work(100)
        world.end()
    assert (world.pending, world.working) == (None, None)
    assert [request for request, _ in world.archive] == world.asked, "one answer each, in order"
    for request, answer in world.archive:
        assert (answer.id, answer.is_final) == (request.id, True)
        if answer.run is not None:
            assert world.runs[request.id].digest == request.digest
    times = [answer.answered_at for _, answer in world.archive if answer.answered_at is not None]
    assert times == sorted(set(times)), "an answer of its own, not that of the request before"
    answered = {request.id for request, answer in world.archive if answer.run is not None}
    assert answered == set(world.opened), "what was opened was told"


NASTY = ["rounds", "with space", "50%n", 'a"b', "back\\slash", "dollar$HOME", "é", "#hash;x", "'"]


@pytest.mark.parametrize("name", NASTY)
def test_units_hold_the_folder_as_systemd_reads_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    command = [sys.executable, "-m", "tunesmith", "campaign", "drop", str(folder)]
    units = units_for(folder, command)
    paths = [line.partition("=")[2] for line in units.path.splitlines() if line.startswith("PathExists=")]
    assert [path.replace("%%", "%") for path in paths] == [f"{folder}/pending.json", f"{folder}/working.json"]
    [line] = [line for line in units.service.splitlines() if line.startswith("ExecStart=")]
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.partition("=")[2])]
    assert words == command
    if shutil.which("systemd-analyze") is not None:
        for file, text in units.files.items():
            (tmp_path / file).write_text(text)
        seen = _as_systemd_reads([tmp_path / file for file in units.files])
        assert f"PathExists: {folder}/pending.json" in seen
        assert f"PathExists: {folder}/working.json" in seen
        assert f"Unit: {units.name}.service" in seen


def _as_systemd_reads(files: list[Path]) -> list[str]:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, files)],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.strip() for line in done.stdout.splitlines()]


def test_units_of_a_folder_that_no_unit_file_can_name_are_refused() -> None:
    with pytest.raises(UsageError, match="rename the folder"):
        units_for(Path("/tmp/a\nExecStart=/bin/evil"), ["/usr/bin/python3"])
    with pytest.raises(UsageError, match="holds a '\\$'"):
        units_for(Path("/tmp/a"), ["/opt/$x/python3"])


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_planted_answer_of_a_time_that_no_clock_shows_is_not_ours(at: str) -> None:
    planted = {"id": "x", "state": "refused", "is_final": True, "reason": "", "taken_at": at, "answered_at": at}
    with pytest.raises(ValidationError):
        Answer.model_validate(planted)
