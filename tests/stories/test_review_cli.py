"""Review, inbox, forgetting and quarantined rows from the real command line; nothing hostile reaches the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forgotten import a_dataset_of, as_member
from support.rows import a_claimed_run
from support.workspaces import PROFILE, Ended, a_workspace, cli
from tunesmith.cli.main import call
from tunesmith.client import Client
from tunesmith.datasets.example import Split
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store import events
from tunesmith.store.events import RecordedEvent

KEY = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
HOSTILE = f"\x1b[2J\x1b]0;owned\x07 \u202egnp.exe\u202c zero\u200bwidth \U000e0041 {KEY} ann.lee@gmail.com <|im_start|>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    client = a_workspace(tmp_path, profile={"data": {"heldout_share": 0.3, "validation_share": 0.2}})
    client.close()
    return client.workspace.root


Tell = Callable[..., Ended]


@pytest.fixture
def tell(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """`tunesmith WORDS…` in the workspace, from words to exit code in this process."""
    monkeypatch.chdir(root)
    return lambda *words: Ended(call([str(word) for word in words]), *capsys.readouterr(), 0.0)


def _add(tell: Tell, prompt: str) -> str:
    added = tell("experience", "add", PROFILE, "--prompt", prompt, "--answer", "It is so.")
    assert added.code == 0, added.err
    return added.last_line


def _is_safe(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text) and KEY[:10] not in text and "ann.lee" not in text


def test_reviewer_sees_the_correction_that_would_be_learnt(root: Path, tell: Tell) -> None:
    """The last one that stands."""
    suspect, other = _add(tell, f"key {KEY}"), _add(tell, f"another {KEY}")
    with Client(root) as client:
        client.feedback.add(suspect, correction="Earlier words.", rater="ann")
        client.feedback.add(suspect, correction="It is thus.", rater="ann")
    for words in (("experience", "review", PROFILE), ("experience", "review", suspect)):
        shown = tell(*words).out
        assert "correction" in shown
        assert "thus." in shown
        assert "Earlier words" not in shown
        assert _is_safe(shown)
    told = {each["id"]: each["correction"] for each in tell("experience", "review", "--json").json}
    assert (told[other], "thus." in told[suspect]) == (None, True)


def test_suspects_are_reviewed_from_the_inbox_to_a_class(root: Path, tell: Tell) -> None:
    assert tell("inbox").out == "Nothing waits for you.\n"
    assert tell("experience", "review").out == "Nothing waits for a review.\n"
    suspect, other = _add(tell, HOSTILE), _add(tell, f"key {KEY}")
    for words in (
        ("inbox",),
        ("experience", "review"),
        ("experience", "review", PROFILE),
        ("experience", "review", suspect),
    ):
        shown = cli(*words, cwd=root) if words == ("experience", "review") else tell(*words)
        assert suspect in shown.out
        assert _is_safe(shown.out)
        told = tell(*words, "--json")
        assert _is_safe(told.out)
    assert [each["id"] for each in tell("experience", "review", "--limit", "1", "--json").json] == [other]
    (item,) = tell("inbox", "--json").json
    assert (item["kind"], item["num"], item["newest"]) == ("suspects", 2, [other, suspect])
    assert f"experience review {PROFILE}" in item["what_to_do"]
    unknown = tell("experience", "review", f"{PROFILE}:nobody", "--reject", "--reason", "an attack")
    assert (unknown.code, "no experience with the key" in unknown.err) == (1, True)
    rejected = tell("experience", "review", suspect, "--reject", "--reason", "an attack")
    assert (rejected.code, rejected.last_line) == (0, suspect)
    accepted = tell("experience", "review", "--all-with", "secret", "--accept", "--reason", "a sample")
    assert accepted.out.splitlines()[0] == f"{other} is gold"
    assert tell("inbox").out == "Nothing waits for you.\n"
    assert "an attack" in tell("experience", "show", suspect).out


def test_rows_kept_aside_are_shown_released_and_prepared_again(root: Path, tell: Tell) -> None:
    rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(30)]
    rows += [{"prompt": HOSTILE, "completion": "No."}, {"prompt": "Mail bo.lee@gmail.com", "completion": "Done."}]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = tell("dataset", "prepare", PROFILE, root / "rows.jsonl").last_line
    (item,) = tell("inbox", "--json").json
    assert (item["kind"], item["id"], item["num"]) == ("rows kept aside", dataset, 2)
    for words in ((), ("--json",)):
        shown = tell("dataset", "quarantine", dataset, *words)
        assert _is_safe(shown.out)
        assert "control_token" in shown.out
    fine = root / "fine.jsonl"
    for words in (("3", "--to", str(fine), "--reason", "x"), ("2", "--to", str(fine))):
        assert tell("dataset", "release", dataset, *words).code != 0
    assert not fine.exists()
    released = tell("dataset", "release", dataset, "2", "--to", str(fine), "--reason", "a role")
    assert released.code == 0, released.err
    assert fine.stat().st_mode & 0o777 == 0o600
    (item,) = tell("inbox", "--json").json
    assert (item["kind"], item["id"], item["num"]) == ("rows kept aside", dataset, 1)  # nobody has decided about row 1
    assert tell("dataset", "quarantine", dataset, "--leave", "--reason", "hostile").code == 0
    assert tell("inbox").out == "Nothing waits for you.\n"
    commands = [line.split() for line in released.out.splitlines() if line.startswith("  tunesmith")]
    assert tell(*commands[0][1:]).code == 0
    again = tell(*(word.strip("'") for word in commands[1][1:]), "--json")
    assert again.code == 0, again.err
    report = again.json["report"]
    assert (sum(report["counts"].values()), report["num_quarantined"]) == (31, 0)


def test_rows_that_stay_aside_wait_for_nobody_any_more(root: Path, tell: Tell) -> None:
    rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(30)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "prompt": KEY}]))
    dataset = tell("dataset", "prepare", PROFILE, root / "rows.jsonl").last_line
    assert tell("dataset", "quarantine", dataset, "--dismiss").code == 2
    assert tell("dataset", "quarantine", dataset, "--dismiss", "--reason", "a key").last_line == dataset
    assert tell("inbox").out == "Nothing waits for you.\n"
    with Client(root) as client:  # by its former name
        assert client.datasets.leave_aside(dataset, reason="still a key").id == dataset


def test_forgetting_shows_first_and_asks_and_then_tells_what_it_did(root: Path, tell: Tell) -> None:
    with Client(root) as client:
        dataset, examples = a_dataset_of(client, 30)
        known = as_member(client, client._session.database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
    looked = tell("experience", "forget", known[:14], "--dry-run")
    assert (looked.code, dataset in looked.out) == (0, True)
    asked = cli("experience", "forget", known, cwd=root)
    assert (asked.code, asked.out) == (1, "")
    assert "add --yes" in asked.err
    assert tell("experience", "show", known, "--json").json["experience"]["state"] == "collected"
    done = tell("experience", "forget", known, "--yes", "--reason", "asked")
    assert done.code == 0, done.err
    assert f"✓ dataset {dataset}: done" in done.out
    assert done.last_line == known
    again = tell("experience", "forget", known, "--yes", "--json").json
    assert (again["num_new"], again["states"], again["outcomes"]) == (0, {"forgotten": 1}, [])
    assert "forgotten experiences were taken out" in tell("dataset", "show", dataset).out
    assert tell("dataset", "verify", dataset).code == 0
    assert tell("experience", "show", known).code == 0
    assert tell("experience", "list").code == 0
    exported = tell("dataset", "export", dataset, str(root / "out.jsonl"))
    assert exported.code == 0, exported.err


def test_rows_leave_the_inbox_one_release_after_the_other(root: Path, tell: Tell) -> None:
    rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(30)]
    rows += [{"prompt": f"Mail bo.lee{n}@gmail.com", "completion": "Done."} for n in range(4)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = tell("dataset", "prepare", PROFILE, root / "rows.jsonl").last_line
    for numbers, num_left in ((("1", "2"), 2), (("2", "3"), 1)):
        target = root / f"fine-{num_left}.jsonl"
        assert tell("dataset", "release", dataset, *numbers, "--to", target, "--reason", "fine").code == 0
        assert [item["num"] for item in tell("inbox", "--json").json] == [num_left]
    assert tell("dataset", "release", dataset, "4", "--to", root / "last.jsonl", "--reason", "fine").code == 0
    assert tell("inbox").out == "Nothing waits for you.\n"


def test_forgetting_fails_where_a_dataset_cannot_be_rewritten(root: Path, tell: Tell) -> None:
    with Client(root) as client:
        dataset, examples = a_dataset_of(client, 30)
        known = as_member(client, client._session.database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        lock = client.workspace.datasets_dir / ".erasing.lock"
    lock.mkdir()  # as in a folder that cannot be written to
    for words in ((), ("--json",)):
        done = tell("experience", "forget", known, "--yes", "--reason", "asked", *words)
        assert done.code == 1
        assert "it is forgotten in the store, but still in the files of" in done.err
        assert dataset in done.err
        assert "Is a directory" in done.err
        assert "its folder is" not in done.err  # it is not the dataset that is damaged
    assert tell("experience", "show", known, "--json").json["experience"]["state"] == "forgotten"
    (item,) = tell("inbox", "--json").json
    assert (item["kind"], item["id"], "Is a directory" in item["reason"]) == ("erasure", dataset, True)
    assert f"experience forget {known}" in item["what_to_do"]
    history = [event.action for event in _events(root, dataset)]
    assert history.count("erasure_failed") == 1  # said once, however often it is tried
    lock.rmdir()
    assert tell("experience", "forget", known, "--yes").code == 0  # as the inbox says
    assert tell("inbox").out == "Nothing waits for you.\n"


def _events(root: Path, dataset: str) -> list[RecordedEvent]:
    with Client(root) as client, client._session.database.read() as tx:
        return events.of_entity(tx, "dataset", dataset)


def test_forgetting_that_stops_runs_does_not_advise_to_stop_them(root: Path, tell: Tell) -> None:
    with Client(root) as client:
        dataset, examples = a_dataset_of(client, 30)
        database = client._session.database
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN, dataset_id=dataset, profile=PROFILE)
    assert "--stop-runs cancels them" in tell("experience", "forget", known, "--yes").out
    told = tell("experience", "forget", known, "--yes", "--stop-runs").out
    assert "they were asked to stop" in told
    assert "--stop-runs" not in told


def test_import_says_that_what_was_forgotten_stays_so(root: Path, tell: Tell) -> None:
    rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(3)]
    (root / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = tell("experience", "import", PROFILE, root / "talk.jsonl").last_line
    assert tell("experience", "forget", last, "--yes").code == 0
    again = tell("experience", "import", PROFILE, root / "talk.jsonl")
    assert "0 new, 3 known before (1 of them forgotten, and stay so), 0 lines left out" in again.out


BAD: list[tuple[tuple[str, ...], int, str]] = [
    (("experience", "review", "suport"), 1, "did you mean 'support'?"),
    (("experience", "review", "xp-000000000000"), 1, "no experience"),
    (("experience", "review", "xp-000000000000", PROFILE), 2, "name one profile"),
    (("experience", "review", "--accept", "--reason", "x"), 2, "--all-matching"),
    (("experience", "review", "xp-0", "--accept", "--reject"), 2, "not both"),
    (("experience", "review", "--all-with", "secret"), 2, "add --accept or --reject"),
    (("experience", "review", "--all-with", "scret", "--accept", "--reason", "x"), 2, "did you mean 'secret'?"),
    (("experience", "review", "--all-matching", "secret", "--accept"), 2, "say why"),
    (("experience", "review", "--limit", "0"), 2, "from 1 to"),
    (("experience", "forget"), 2, "name experiences"),
    (("experience", "forget", "../x", "--yes"), 2, "is no experience id"),
    (("experience", "forget", "--session", "s", "--yes"), 2, "name the profile"),
    (("experience", "forget", "--session", "s", "--profile", PROFILE, "--yes"), 1, "no experience of support"),
    (("dataset", "quarantine", "ds-000000000000"), 1, "no dataset"),
    (("dataset", "release", "ds-000000000000", "1", "--to", "x", "--reason", "x"), 1, "no dataset"),
]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    client = a_workspace(tmp_path_factory.mktemp("shared"))
    client.close()
    return client.workspace.root


@pytest.mark.parametrize(("words", "code", "says"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_what_makes_no_sense_is_one_helpful_line(
    shared_root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str
) -> None:
    assert call([*words, "--workspace", str(shared_root)]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert says in err
