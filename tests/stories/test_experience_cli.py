"""Experiences and feedback from the real command line: import, add, rate, list, show, stats; errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.workspaces import PROFILE, a_workspace, cli
from tunesmith.cli.main import call
from tunesmith.core.errors import TunesmithError

POLICY = {"experience": {"verifiers": {"entity_preservation": {}}}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    client = a_workspace(tmp_path, profile=POLICY)
    client.close()
    return client.workspace.root


def _lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def _turns(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def test_one_experience_from_capture_to_a_new_class(root: Path) -> None:
    words = ["--prompt", "Send order 17 to Rome", "--answer", "Order 17 goes to Rome.", "--about", "session=s1"]
    added = cli("experience", "add", PROFILE, *words, cwd=root)
    assert added.code == 0, added.err
    assert added.out.splitlines()[0] == "gold"
    experience_id = added.last_line
    now = [word.replace("--about", "--context") for word in words]
    assert cli("experience", "add", PROFILE, *now, cwd=root).last_line == experience_id
    rated = cli("feedback", "add", experience_id, "down", "--comment", "too short", "--rater", "ann", cwd=root)
    assert rated.code == 0, rated.err
    assert rated.out.splitlines()[0] == f"{experience_id} is ambiguous, 0.00 by 1 rater"
    assert rated.last_line.startswith("fb-")
    listed = cli("experience", "list", "--class", "ambiguous", "--where", "session=s1", "--json", cwd=root)
    assert [each["id"] for each in listed.json] == [experience_id]
    shown = cli("experience", "show", experience_id[:12], cwd=root)
    for text in ("too short", "entity_preservation", "gold is now ambiguous", "Order 17 goes to Rome."):
        assert text in shown.out
    detail = cli("experience", "show", experience_id, "--json", cwd=root).json
    assert detail["findings"]["length"] == {"score": 1.0, "flagged": False, "reason": ""}
    assert detail["feedback"][0]["rater"] == "ann"
    stats = cli("experience", "stats", "--json", cwd=root).json
    assert (stats[0]["num"], stats[0]["classes"], stats[0]["num_rated"]) == (1, {"ambiguous": 1}, 1)


def test_corrections_are_seen_in_the_list_and_counted(root: Path) -> None:
    for number in range(3):
        words = ("--prompt", f"Send order {number} to Rome", "--answer", "Why?", "--key", f"k{number}")
        assert cli("experience", "add", PROFILE, *words, cwd=root).code == 0
    for rater in ("ann", "bob"):
        words = (f"{PROFILE}:k1", "--correction", f"It goes to Rome, says {rater}.", "--rater", rater)
        assert cli("feedback", "add", *words, cwd=root).code == 0
    listed = cli("experience", "list", cwd=root).out.splitlines()
    assert "FIXED" in listed[0]
    [row] = [line for line in listed if "order 1" in line]
    assert row[: listed[0].index("FIXED") + len("FIXED")].endswith(" 2")
    assert listed[0].index("QUESTION") <= 66, "on 80 columns the question still shows"
    told = cli("experience", "stats", cwd=root).out.splitlines()
    place = told[0].index("FIXED") + len("FIXED")
    assert told[1][:place].endswith(" 1"), "one experience, however many have corrected it"
    assert all(len(line) <= 80 for line in told), told


def test_filter_that_nothing_matches_is_named(root: Path) -> None:
    empty = cli("experience", "list", cwd=root).out
    assert "No experience here yet" in empty
    assert cli("experience", "add", PROFILE, "--prompt", "Order 17?", "--answer", "Rome.", cwd=root).code == 0
    words = ("--profile", PROFILE, "--class", "quarantined", "--where", "state=consumed")
    told = cli("experience", "list", *words, cwd=root).out
    assert f"No experience matches state=consumed, --profile={PROFILE}, --class=quarantined" in " ".join(told.split())


def test_import_reads_every_form_once_and_hears_complaints(root: Path) -> None:
    file = _lines(
        root / "data.jsonl",
        _turns(
            "Send order 17 to Rome", "Order 17 goes to Rome.", "No, that's wrong, to Oslo", "Order 17 goes to Oslo."
        ),
        {"prompt": "Why is it so?", "completion": "Because.", "label": False},
        {"prompt": "Who is it?", "completion": "It is me.", "label": True},
        {"prompt": "How is it?", "chosen": "It is well.", "rejected": "Bad."},
    )
    first = cli("experience", "import", PROFILE, file, cwd=root)
    assert first.code == 0, first.err
    assert first.out.splitlines()[0] == "5 new, 0 known before, 0 lines left out"
    again = cli("experience", "import", PROFILE, file, "--json", cwd=root).json
    assert list(again) == [
        "num_rows", "num_new", "num_known", "num_refused", "classes", "problems", "last_id", "num_forgotten",
    ]  # fmt: skip
    assert (again["num_new"], again["num_known"]) == (0, 5)
    found = {each["question"]: each for each in cli("experience", "list", "--json", cwd=root).json}
    assert found["Send order 17 to Rome"]["feedback"]["num_complaints"] == 1
    assert found["Send order 17 to Rome"]["class_name"] == "ambiguous"
    assert found["No, that's wrong, to Oslo"]["answer"] == "Order 17 goes to Oslo."
    assert found["Why is it so?"]["feedback"]["mean"] == 0.0
    assert found["Who is it?"]["class_name"] == "gold"
    pair = cli("experience", "show", found["How is it?"]["id"], "--json", cwd=root).json
    assert (pair["experience"]["answer"], pair["feedback"][0]["correction"]) == ("Bad.", "It is well.")
    assert {each["source"] for each in found.values()} == {"data.jsonl"}


def test_import_leaves_bad_lines_out_by_line_and_refuses_too_many(root: Path) -> None:
    good = [_turns(f"question {n}", f"answer {n}") for n in range(30)]
    some = cli(
        "experience", "import", PROFILE, _lines(root / "some.jsonl", *good, '{"prompt": 5}', "nonsense"), cwd=root
    )
    assert some.code == 0, some.err
    assert some.out.splitlines()[0] == "30 new, 0 known before, 2 lines left out"
    assert "some.jsonl line 32" in some.out
    before = cli("experience", "stats", "--json", cwd=root).json[0]["num"]
    bad = _lines(root / "bad.jsonl", _turns("new question", "new answer"), "nonsense")
    refused = cli("experience", "import", PROFILE, bad, cwd=root)
    assert refused.code == 1
    assert "max_bad_share" in refused.err
    assert refused.out == ""
    assert cli("experience", "stats", "--json", cwd=root).json[0]["num"] == before == 30


BAD: list[tuple[tuple[str, ...], int, str]] = [
    (("experience", "add", PROFILE, "--prompt", "a"), 2, "--answer"),
    (("experience", "add", "suport", "--prompt", "a", "--answer", "b"), 1, "did you mean 'support'?"),
    (("experience", "add", PROFILE, "--prompt", "a", "--answer", " "), 1, "empty"),
    (("experience", "add", PROFILE, "--prompt", "a", "--answer", "b", "--about", "x"), 2, "KEY=VALUE"),
    (("experience", "add", PROFILE, "--prompt", "a", "--answer", "b", "--context", "sesion=x"), 2, "'session'"),
    (("experience", "list", "--class", "golden"), 1, "did you mean 'gold'?"),
    (("experience", "list", "--where", "colour=red"), 2, "known: "),
    (("experience", "list", "--limit", "0"), 2, "from 1 to"),
    (("experience", "show", "../../etc"), 2, "is no experience id"),
    (("experience", "show", "xp-000000000000"), 1, "no experience"),
    (("experience", "import", PROFILE, "missing.jsonl"), 1, "no file"),
    (("experience", "import", PROFILE, "."), 1, "is a directory"),
    (("experience", "lst"), 2, "did you mean 'list'?"),
    (("feedback", "add", "xp-000000000000"), 2, "nothing is said"),
    (("feedback", "add", "xp-000000000000", "great"), 2, "helpful, partial, irrelevant"),
    (("feedback", "add", "xp-000000000000", "up", "--correction", "No, that's wrong."), 1, "reads like a complaint"),
]


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    client = a_workspace(tmp_path_factory.mktemp("shared"), profile=POLICY)
    client.close()
    return client.workspace.root


@pytest.mark.parametrize(("words", "code", "says"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_what_makes_no_sense_is_one_helpful_line(
    shared_root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str
) -> None:
    files = [str(shared_root / word) if word in ("missing.jsonl", ".") else word for word in words]
    assert call([*files, "--workspace", str(shared_root)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": b"x"}, {"role": "assistant", "content": "y"}], "messages[0].content"),
        ([{"role": b"user", "content": "x"}, {"role": "assistant", "content": "y"}], "messages[0].role"),
        ([{b"role": "user"}], "messages[0].role is missing"),
        ([b"x"], "messages[0] is a Python bytes"),
        ([{"role": "user", "content": {1, 2}}], "a Python set, not a string"),
        (b"abc", "messages is no list"),
    ],
)
def test_python_values_that_are_no_messages_are_refused_by_their_place(
    tmp_path: Path, messages: Any, said: str
) -> None:
    with a_workspace(tmp_path) as client, pytest.raises(TunesmithError) as refused:
        client.experiences.add(PROFILE, messages)
    assert said in refused.value.message
