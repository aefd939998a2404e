"""Datasets by commands alone: every format in, the card, diff and export, and errors that say what to do."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data import a_chat, a_label, chats, encoded
from support.workspaces import Ended, a_workspace
from tunesmith.cli.main import call
from tunesmith.client import Client
from tunesmith.core.errors import UsageError

Tell = Callable[..., Ended]
NUM = 60


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with a_workspace(tmp_path_factory.mktemp("datasets")) as client:
        yield client


@pytest.fixture
def tell(client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Call the command line in this process, inside the workspace."""
    monkeypatch.chdir(client.workspace.root)

    def tell(*words: str | Path, code: int = 0) -> Ended:
        begun = time.monotonic()
        ended = Ended(call([str(word) for word in words]), *capsys.readouterr(), time.monotonic() - begun)
        assert ended.code == code, ended
        return ended

    return tell


def a_source(client: Client, name: str, content: bytes) -> str:
    (client.workspace.root / name).write_bytes(content)
    return name


def a_sharegpt(number: int) -> dict[str, Any]:
    question, answer = (message["content"] for message in a_chat(number)["messages"])
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_files_of_several_formats_and_patterns_become_one_dataset(client: Client, tell: Tell) -> None:
    a_source(client, "part-1.jsonl", encoded(*chats(NUM)[:20]))
    a_source(client, "part-2.jsonl", encoded(*chats(NUM)[20:40]))
    rest = a_source(client, "rest.json.gz", gzip.compress(json.dumps([*map(a_sharegpt, range(40, NUM))]).encode()))
    many = tell("dataset", "prepare", "support", "part-*.jsonl", rest).last_line
    one = tell("dataset", "prepare", "support", a_source(client, "all.jsonl", encoded(*chats(NUM)))).last_line
    assert many == one
    assert tell("dataset", "verify", many).last_line == many


def test_foreign_file_is_trained_on_as_it_is(client: Client, tell: Tell) -> None:
    source = a_source(client, "shared.json", json.dumps([*map(a_sharegpt, range(200, 260))]).encode())
    run_id = tell("run", "submit", "support", source).last_line
    assert client.runs.get(run_id).dataset_id.startswith("ds-")
    client.runs.skip(run_id)


def test_prepare_filters_counts_and_stops(client: Client, tell: Tell) -> None:
    rows = [a_chat(number, lang="en" if number % 2 else "de") for number in range(300, 420)]
    source = a_source(client, "langs.jsonl", encoded(*rows, b"junk"))
    made = tell("dataset", "prepare", "support", source, "--where", "lang=en", "--max-examples", "40", "--json").json
    assert sum(made["dataset"]["counts"].values()) == 40
    assert made["report"]["passed_over"] == {"not lang=en": 60}
    card = tell("dataset", "show", made["dataset"]["id"]).out
    for word in (
        "read as",
        "where lang=en, at most 40 examples",
        "passed over",
        "60 not lang=en",
        "not_json",
        "line 121",
    ):
        assert word in card


def test_card_shows_shares_lengths_and_sources(client: Client, tell: Tell) -> None:
    rows = [a_label(number) for number in range(500, 600)]
    rows[0]["completion"] = "long " * 400
    card = tell("dataset", "prepare", "support", a_source(client, "labels.jsonl", encoded(*rows))).out
    assert "50% of all answers" in card
    assert "Length of examples, in characters" in card
    bars = [line.split() for line in card.splitlines() if "█" in line]
    assert sum(int(num) for _, num, _ in bars) == 100
    assert [span for span, num, _ in bars if num == "1" and span.startswith("1024")] == ["1024–2047"]
    assert "labels.jsonl" in card
    assert "lines" in card


def test_diff_and_export_by_commands(client: Client, tell: Tell, tmp_path: Path) -> None:
    rows = chats(NUM)
    before = tell("dataset", "prepare", "support", a_source(client, "b.jsonl", encoded(*rows))).last_line
    rows[5] = {"prompt": "What is 5 plus one?", "completion": "Six."}
    after = tell("dataset", "prepare", "support", a_source(client, "a.jsonl", encoded(*rows, a_chat(700)))).last_line
    page = tell("dataset", "diff", before, after).out
    for word in ("59", "Added", "What is 700 plus one?", "Changed", "It is 6.", "Six."):
        assert word in page
    assert tell("dataset", "diff", before, after, "--json").json["num_changed"] == 1
    target = tmp_path / "out.jsonl"
    assert tell("dataset", "export", after, target).last_line == str(target)
    assert tell("dataset", "prepare", "support", target).last_line == after
    written = tell("dataset", "export", after, tmp_path / "o.parquet", "--split", "train", "--json").json
    assert written["form"] == "parquet"
    assert "--force" in tell("dataset", "export", after, target, code=1).err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--format", "sharegp"), 2, "no format 'sharegp'; did you mean 'sharegpt'?"),
        (("--windows", "none"), 2, "no windows 'none'; known: all, last, whole"),
        (("--where", "lang"), 2, "write FIELD=VALUE or FIELD!=VALUE"),
        (("--where", "lang=xx"), 1, "no example is left: 60 × no field lang; check --where"),
        (("--max-examples", "0"), 2, "should be greater than or equal to 1"),
        (("--format", "alpaca"), 1, "all 60 lines are bad: 60 × missing_field, first ok.jsonl line 1: instruction"),
        (("nothing-*.jsonl",), 1, "no file matches 'nothing-*.jsonl'"),
    ],
)
def test_prepare_that_cannot_be_says_what_to_do(
    client: Client, tell: Tell, words: tuple[str, ...], code: int, said: str
) -> None:
    source = a_source(client, "ok.jsonl", encoded(*chats(NUM)))
    ended = tell("dataset", "prepare", "support", source, *words, code=code)
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_export_in_an_unknown_form_or_split_names_the_known(client: Client, tmp_path: Path) -> None:
    (client.workspace.root / "x.jsonl").write_bytes(encoded(*chats(NUM)))
    dataset, _ = client.datasets.prepare("support", [client.workspace.root / "x.jsonl"], windows="last")
    with pytest.raises(UsageError, match="no form 'csv'; known: jsonl, parquet"):
        client.datasets.export(dataset.id, tmp_path / "x.csv", form="csv")
    with pytest.raises(UsageError, match="no split 'trian'; did you mean 'train'"):
        client.datasets.export(dataset.id, tmp_path / "x.jsonl", split="trian")
    with pytest.raises(UsageError, match="max_examples is 0"):
        client.datasets.prepare("support", ["x"], max_examples=0)
