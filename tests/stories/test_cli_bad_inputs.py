"""The CLI's bad inputs: each gives one clear line, a non-zero exit, nothing half-made, in less than a second."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.workspaces import Ended, a_jsonl, a_workspace, cli, cli_environ, submit
from tunesmith.cli.main import call

LONG = "x" * 10_000
RUN = "run-4t9kq2m7x1bz"


@dataclass(frozen=True)
class Place:
    """A workspace with one queued run, and what of it must not change."""

    root: Path
    run_id: str

    def state(self) -> tuple[Any, ...]:
        """Every file but caches and SQLite's scratch files, and how many rows each table has."""
        files = sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if not path.name.endswith(("-wal", "-shm", "-journal", "-mark"))
            and "cache" not in path.relative_to(self.root).parts
        )
        return files, row_counts(self.root / ".tunesmith" / "store.db")


def row_counts(store: Path) -> dict[str, int]:
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        counts = {table: db.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0] for table in tables}
    db.close()
    return counts


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with a_workspace(tmp_path_factory.mktemp("bad")) as client:
        root = client.workspace.root
        os.mkfifo(root / "fifo")
        (root / "empty.jsonl").touch()
        return Place(root, submit(client))


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(place.root)
    before = place.state()
    yield place
    assert place.state() == before, "something half-made was left"


Caller = Callable[..., Ended]


@pytest.fixture
def run(here: Place, capsys: pytest.CaptureFixture[str]) -> Caller:
    """The whole command line from words to exit code, in this process: starting Python each time takes minutes."""

    def run(*words: str) -> Ended:
        begun = time.process_time()  # of this process alone: the machine may be busy
        code = call(words)
        took_s = time.process_time() - begun
        out, err = capsys.readouterr()
        return Ended(code, out, err, took_s)

    return run


def assert_refused(end: Ended, code: int, *hints: str, lines: int = 1) -> None:
    assert end.code == code, end
    assert end.out == "", "an error leaves stdout empty"
    assert len(end.err.splitlines()) == lines, end.err
    assert all(line.startswith("error: ") for line in end.err.splitlines()), end.err
    assert len(end.err) < 1000, "clear means short"
    for hint in hints:
        assert hint in end.err, end.err
    assert end.took_s < 1.0


USAGE: list[tuple[Sequence[str], Sequence[str]]] = [
    (["rum", "list"], ["'tunesmith rum'", "did you mean 'run'?"]),
    (["run", "lst"], ["did you mean 'list'?"]),
    (["estop", "onn"], ["did you mean 'on'?"]),
    (["profil"], ["did you mean 'profile'?"]),
    ([""], ["known: adapter"]),
    (["\x1b[31mrun"], ["\\x1b[31mrun"]),
    ([LONG], ["…'"]),
    (["run", "list", "--stat", "queued"], ["'--stat'", "did you mean '--state'?"]),
    (["run", "submit", "support", "data.jsonl", "--prioriti", "high"], ["did you mean '--priority'?"]),
    (["--workspce", ".", "run", "list"], ["did you mean '--workspace'?"]),
    (["run", "list", "-x"], ["'-x'", "known: --help"]),
    (["run", "list", "--workspace"], ["--workspace names no folder"]),
    (["--workspace", "", "run", "list"], ["--workspace names no folder"]),
    (["--workspace", LONG, "run", "list"], ["cannot be a path"]),
    (["run", "show"], ["missing argument 'RUN'"]),
    (["run", "show", RUN, "more"], ["unexpected extra argument"]),
    (["adapter", "revoke", "support@v1"], ["missing option '--reason'"]),
    (["run", "list", "--limit"], ["'--limit' requires an argument"]),
    *[(["run", "list", "--limit", bad], ["'--limit'"]) for bad in ("-1", "0", "1e999", "NaN", "", "10001", "9" * 5000)],
    *[(["run", "logs", RUN, "--lines", bad], ["'--lines'"]) for bad in ("-1", "0", "NaN")],
    (["run", "metrics", RUN, "--rows", "1e999"], ["'--rows'"]),
    (["run", "list", "--state", "running"], ["did you mean 'training'?"]),
    (["run", "submit", "support", "data.jsonl", "--priority", "urgent"], ["'high', 'normal', 'low'"]),
    (["run", "submit", "support", "data.jsonl", "--start", "middle"], ["'live', 'base'"]),
    (["run", "submit", "support", "data.jsonl", "--set", "lr"], ["key=value"]),
    (["run", "submit", "support", ""], ["empty"]),
    (["worker", "--kinds", "trian"], ["did you mean 'train'?"]),
    (["worker", "--kinds", ""], ["known: curriculum, deploy, evaluate"]),
    (["worker", "--kinds", "export"], ["'export'"]),
]


@pytest.mark.parametrize(("words", "hints"), USAGE, ids=lambda value: " ".join(value)[:40] if value else None)
def test_usage_wrong_exits_2_with_one_line(run: Caller, words: Sequence[str], hints: Sequence[str]) -> None:
    assert_refused(run(*words), 2, *hints)


IDS = ("../../etc/passwd", "", LONG, "run-4t9/../x", "run-%", "RUN-4t9kq2m7x1bz", "x\x00y", "\x1b[2J", "💥")
TAKES_AN_ID = (
    ["run", "show"], ["run", "watch"], ["run", "logs"], ["run", "metrics"], ["run", "stop"], ["run", "pause"],
    ["run", "resume"], ["run", "skip"], ["run", "cancel"], ["run", "retry"], ["dataset", "show"], ["dataset", "verify"],
    ["campaign", "show"], ["campaign", "pause"], ["adapter", "show"], ["adapter", "approve"],
    ["adapter", "revoke", "--reason", "x"],
)  # fmt: skip


@pytest.mark.parametrize("words", TAKES_AN_ID, ids=" ".join)
def test_id_that_cannot_be_one_is_refused(run: Caller, words: Sequence[str]) -> None:
    for bad in IDS:
        assert_refused(run(*words, "--", bad), 2, "they look like")


@pytest.mark.parametrize("words", TAKES_AN_ID, ids=" ".join)
def test_id_of_nothing_is_not_found(run: Caller, words: Sequence[str]) -> None:
    prefix = {"run": "run", "dataset": "ds", "campaign": "camp", "adapter": "ad"}[words[0]]
    assert_refused(run(*words, f"{prefix}-000000000000"), 1, f"no {words[0]} '{prefix}-000000000000'")


TAKES_A_PROFILE = (
    ["profile", "show"], ["profile", "check"], ["profile", "lock"], ["config", "explain"], ["campaign", "create"],
    ["adapter", "live"], ["adapter", "rollback"], ["run", "list", "--profile"], ["adapter", "list", "--profile"],
    ["dataset", "list", "--profile"], ["campaign", "list", "--profile"],
)  # fmt: skip


@pytest.mark.parametrize("words", TAKES_A_PROFILE, ids=" ".join)
def test_profile_that_is_not_there_is_refused(run: Caller, words: Sequence[str]) -> None:
    for bad in ("suport", "../support", "", LONG, "a b", "x\x00y"):
        assert_refused(run(*words, bad), 1)


REFUSED: list[tuple[Sequence[str], Sequence[str]]] = [
    (["run", "submit", "support", "missing.jsonl"], ["no file 'missing.jsonl'"]),
    (["run", "submit", "support", "."], ["is a directory"]),
    (["run", "submit", "support", "fifo"], ["is a pipe"]),
    (["run", "submit", "support", "/dev/zero"], ["is a device"]),
    (["run", "submit", "support", "/dev/stdin"], ["'/dev/stdin' is"]),
    (["run", "submit", "support", "empty.jsonl"], ["empty.jsonl is empty"]),
    (["run", "submit", "support", LONG], ["File name too long"]),
    (["run", "submit", "support", "data.jsonl", "missing.jsonl"], ["no file 'missing.jsonl'"]),
    (["run", "submit", "support", "ds-000000000000"], ["no dataset"]),
    (["dataset", "prepare", "support", "missing.jsonl"], ["no file"]),
    (["dataset", "prepare", "support", "fifo"], ["is a pipe"]),
    (["dataset", "prepare", "support", "/dev/zero"], ["is a device"]),
    (["dataset", "prepare", "support", "models"], ["is a directory"]),
    (["dataset", "prepare", "support", "tunesmith.yaml"], ["not_json"]),
    (["--workspace", "/nowhere", "run", "list"], ["no such folder"]),
    (["run", "list", "--workspace", "profiles"], ["tunesmith init"]),
    (["init", "."], ["is a workspace already"]),
    (["init", "tunesmith.yaml/inside"], ["choose another folder"]),
    (["config", "explain", "support", "recipe.lrr"], ["did you mean 'lr'?"]),
    (["adapter", "show", "../@v1"], ["no adapter"]),
    (["adapter", "show", "support@v99"], ["adapter list"]),
    (["adapter", "rollback", "support"], ["nothing"]),
    (["run", "resume", "RUN_ID"], ["not paused"]),
    (["run", "stop", "RUN_ID"], ["run skip"]),
    (["run", "pause", "RUN_ID"], ["run skip"]),
    *[
        (["config", "explain", "support", "--set", f"{key}={bad}"], [key])
        for key in ("recipe.lr", "recipe.epochs", "recipe.lora_rank", "budgets.tokens", "gate.min_cases")
        for bad in ("-1", "0", "1e999", "NaN", "one")
    ],
]


@pytest.mark.parametrize(("words", "hints"), REFUSED, ids=lambda value: " ".join(value)[:50] if value else None)
def test_wish_that_cannot_be_met_exits_1_with_one_line(
    run: Caller, here: Place, words: Sequence[str], hints: Sequence[str]
) -> None:
    assert_refused(run(*(here.run_id if word == "RUN_ID" else word for word in words)), 1, *hints)


def test_retry_unfinished_run_is_refused(run: Caller, here: Place) -> None:
    assert_refused(run("run", "retry", here.run_id), 2, "has not ended")


def test_config_with_several_problems_says_one_line_each(run: Caller) -> None:
    end = run("run", "submit", "support", "data.jsonl", "--set", "recipe.lr=-1", "--set", "recipe.epoch=3")
    assert_refused(end, 1, "recipe.lr", "did you mean 'epochs'?", lines=2)


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["run", "show", "nope", "--json"], 2, "usage"),
        (["run", "show", "run-000000000000", "--json"], 1, "not_found"),
        (["run", "list", "--json", "--bogus"], 2, "usage"),
        (["config", "explain", "support", "--set", "recipe.lr=0", "--set", "a.b=1", "--json"], 1, "config"),
    ],
)
def test_error_with_json_is_one_object_on_stderr(run: Caller, words: Sequence[str], exit_code: int, code: str) -> None:
    end = run(*words)
    assert (end.code, end.out) == (exit_code, "")
    error = json.loads(end.err)["error"]
    assert error["code"] == code
    assert error["message"]


@pytest.mark.parametrize("words", [[], ["run"], ["estop"]], ids=["nothing", "run", "estop"])
def test_nothing_asked_shows_help_and_exits_2(run: Caller, words: Sequence[str]) -> None:
    end = run(*words)
    assert (end.code, end.err) == (2, "")
    assert end.out.startswith("Usage: tunesmith")


# From here on each case is a process of its own: what is tested is the store's file, or the process itself.


def a_copy(place: Place, tmp_path: Path) -> Path:
    """The workspace moved elsewhere, its store closed."""
    root = tmp_path / "moved"
    shutil.copytree(place.root, root, ignore=shutil.ignore_patterns("fifo"))
    with sqlite3.connect(root / ".tunesmith" / "store.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return root


def damage(store: Path, how: str) -> None:
    content = store.read_bytes()
    match how:
        case "garbage":
            store.write_bytes(b"this is not a database\n" * 500)
        case "empty":
            store.write_bytes(b"")
        case "truncated":
            store.write_bytes(content[: len(content) // 3])
        case "zeroed":
            store.write_bytes(content[:4096] + bytes(len(content) - 4096))
        case "newer":
            with sqlite3.connect(store) as db:
                db.execute("UPDATE alembic_version SET version_num = '9999'")
            db.close()
        case "foreign":
            store.unlink()
            with sqlite3.connect(store) as db:
                db.execute("CREATE TABLE theirs (x)")
            db.close()
        case "gone":
            store.unlink()


DAMAGES = {
    "garbage": "is damaged",
    "empty": "is empty, but this workspace had one",
    "truncated": "is damaged",
    "zeroed": "is damaged",
    "newer": "upgrade tunesmith",
    "foreign": "another program's tables",
    "gone": "is missing, but this workspace had one",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_store_that_cannot_be_used_is_refused_and_left_as_it_is(place: Place, tmp_path: Path, how: str) -> None:
    root = a_copy(place, tmp_path)
    store = root / ".tunesmith" / "store.db"
    damage(store, how)
    before = store.read_bytes() if store.exists() else None
    for words in (["run", "list"], ["run", "submit", "support", "data.jsonl"], ["worker", "--until-idle"]):
        end = cli(*words, cwd=root)
        assert (end.code, end.out) == (1, ""), end
        assert DAMAGES[how] in end.err
        assert len(end.err.splitlines()) == 1, end.err
    assert (store.read_bytes() if store.exists() else None) == before, "nothing may be reset"


def test_doctor_on_damaged_store_says_what_is_broken(place: Place, tmp_path: Path) -> None:
    root = a_copy(place, tmp_path)
    damage(root / ".tunesmith" / "store.db", "garbage")
    end = cli("doctor", cwd=root)
    assert end.code == 1
    assert end.err == ""
    assert "✗  store" in end.out


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && cd "$1" && shift && exec "$@"'


def test_read_only_workspace_is_refused(place: Place, tmp_path: Path) -> None:
    root = a_copy(place, tmp_path)
    enter = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(root)]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    before = sorted(path.name for path in root.rglob("*"))
    for words in (["run", "list"], ["run", "submit", "support", "data.jsonl"], ["estop", "on"], ["init", "sub"]):
        end = subprocess.run(
            [*enter, sys.executable, "-m", "tunesmith.cli.main", *words],
            env=cli_environ(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (end.returncode, end.stdout) == (1, ""), end
        assert len(end.stderr.splitlines()) == 1, end.stderr
        assert "read-only" in end.stderr.lower()
    assert sorted(path.name for path in root.rglob("*")) == before


def test_outside_any_workspace_says_how_to_make_one(tmp_path: Path) -> None:
    end = cli("run", "list", cwd=tmp_path)
    assert (end.code, end.out) == (1, "")
    assert "tunesmith init" in end.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["config", "explain", "support"], ["run", "list", "--json"], ["--help"]])
def test_closed_stdout_ends_quietly(place: Place, words: Sequence[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    end = subprocess.run(
        [sys.executable, "-m", "tunesmith.cli.main", *words],
        cwd=place.root, env=cli_environ(), stdout=writer, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writer)
    assert end.stderr == b""
    assert end.returncode == 1


def test_no_stdout_at_all_is_no_traceback(place: Place) -> None:
    line = f'"{sys.executable}" -m tunesmith.cli.main run list >&-'
    end = subprocess.run(["sh", "-c", line], cwd=place.root, env=cli_environ(), stderr=subprocess.PIPE, check=False)
    assert (end.returncode, end.stderr) == (0, b"")


def test_full_disk_behind_stdout_is_one_line(place: Place) -> None:
    with open("/dev/full", "w") as full:
        end = subprocess.run(
            [sys.executable, "-m", "tunesmith.cli.main", "run", "list"],
            cwd=place.root, env=cli_environ(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert end.returncode == 1
    assert end.stderr == "error: stdout cannot be written (No space left on device)\n"


def _submitted(place: Place, tmp_path: Path, line: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """How a submit ended whose stdout cannot be written, and the run it made."""
    root = a_copy(place, tmp_path)
    words = f'"{sys.executable}" -m tunesmith.cli.main run submit support data.jsonl {line}'
    end = subprocess.run(
        ["bash", "-c", words], cwd=root, env=cli_environ(), stderr=subprocess.PIPE, text=True, check=False
    )
    made = [run["id"] for run in cli("run", "list", "--json", cwd=root).json if run["id"] != place.run_id]
    assert len(made) == 1
    return end, made[0]


@pytest.mark.parametrize(
    ("line", "code"),
    [("> /dev/full", 1), ("| head -c 0; exit ${PIPESTATUS[0]}", 1), (">&-", 0)],
    ids=["full", "pipe", "closed"],
)
def test_write_whose_stdout_is_lost_tells_the_id_on_stderr(place: Place, tmp_path: Path, line: str, code: int) -> None:
    end, made = _submitted(place, tmp_path, line)
    assert end.returncode == code
    assert made in end.stderr
    assert "Traceback" not in end.stderr


@pytest.mark.parametrize("key", ["", "  ", "a\nb", "x" * 201])
def test_idempotency_key_that_is_none_is_refused(run: Caller, key: str) -> None:
    end = run("run", "submit", "support", "data.jsonl", "--key", key)
    assert (end.code, end.out) == (2, "")
    assert "the idempotency key" in end.err


def test_file_whose_name_is_no_utf8_is_refused_by_its_name(place: Place, tmp_path: Path) -> None:
    root = a_copy(place, tmp_path)
    name = os.fsdecode(b"odd\xff.jsonl")
    a_jsonl(root / name)
    for words in (["run", "submit", "support"], ["experience", "import", "support"], ["dataset", "prepare", "support"]):
        end = cli(*words, name, cwd=root)
        assert end.code == 1
        assert end.err == "error: the name of the file 'odd\\udcff.jsonl' is not valid UTF-8; rename the file\n"
    assert cli("estop", "on", "--reason", name, cwd=root).code == 2
    a_jsonl(root / "new\nline.jsonl")
    assert cli("dataset", "prepare", "support", "new\nline.jsonl", cwd=root).code == 0


def test_bug_shows_one_line_and_the_way_to_the_traceback(place: Place, tmp_path: Path) -> None:
    root = a_copy(place, tmp_path)
    with sqlite3.connect(root / ".tunesmith" / "store.db") as db:
        db.execute("UPDATE runs SET spec = '{}'")
    db.close()
    words = ("run", "show", place.run_id)
    quiet, loud = cli(*words, cwd=root), cli(*words, cwd=root, env={"TUNESMITH_DEBUG": "1"})
    assert (quiet.code, quiet.out) == (1, "")
    assert quiet.err.startswith("error: unexpected ValidationError")
    assert "TUNESMITH_DEBUG=1" in quiet.err
    assert len(quiet.err.splitlines()) == 1
    assert "Traceback (most recent call last)" in loud.err


def test_profile_broken_is_listed_not_fatal(place: Place, tmp_path: Path) -> None:
    root = a_copy(place, tmp_path)
    (root / "profiles" / "bad.yaml").write_text("name: bad\nrecipe: {learning_rte: 1}\n")
    listed, checked = cli("profile", "list", cwd=root), cli("profile", "check", "bad", cwd=root)
    assert listed.code == 0
    assert "broken" in listed.out
    assert checked.code == 1
    assert "learning_rte" in checked.err
    a_jsonl(root / "x.jsonl", 5)
    assert cli("run", "submit", "bad", "x.jsonl", cwd=root).code == 1
