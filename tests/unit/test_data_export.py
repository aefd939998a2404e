"""Export and diff: what comes out goes in again as the same dataset, and differences are told by example and prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from support.data import HALF, a_chat, a_label, a_pair, a_tool_chat, chats, encoded, num_examples, prepared
from tunesmith.core.errors import Conflict, DataError
from tunesmith.datasets.diff import diff
from tunesmith.datasets.example import Split
from tunesmith.datasets.export import export
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PreparedDataset

NUM = 60


def a_long_chat(number: int) -> dict[str, Any]:
    """A conversation whose first answer is context."""
    first, second = a_chat(number)["messages"], a_chat(number + 1)["messages"]
    first[1]["weight"] = 0
    return {"messages": [{"role": "system", "content": "Be brief."}, *first, *second]}


ROWS: dict[str, Callable[..., dict[str, Any]]] = {
    "supervised": a_chat,
    "preference": a_pair,
    "labelled": a_label,
    "tools": a_tool_chat,
    "context": a_long_chat,
}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ROWS)
def test_exported_dataset_goes_in_again_as_the_same_one(tmp_path: Path, kind: str, form: str) -> None:
    dataset = prepared(tmp_path, encoded(*map(ROWS[kind], range(NUM))))
    target = tmp_path / f"out.{form}"
    assert export(dataset.path, target, form, tuple(Split)) == num_examples(dataset) == NUM
    again = prepare([target], tmp_path / "again", HALF)
    assert again.fingerprint == dataset.fingerprint
    assert again.report.drops == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "datasets", f"out.{form}", "rows.jsonl"]


def test_exported_pair_is_in_the_form_of_openai(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_pair, range(NUM))))
    export(dataset.path, tmp_path / "out.jsonl", "jsonl", (Split.TRAIN,))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(lines) == dataset.counts[Split.TRAIN]
    row = json.loads(lines[0])
    assert sorted(row) == ["input", "non_preferred_output", "preferred_output"]
    assert row["non_preferred_output"] == [{"role": "assistant", "content": "I do not know."}]


def test_exported_calls_are_in_the_form_of_openai(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_tool_chat, range(NUM))))
    export(dataset.path, tmp_path / "out.jsonl", "jsonl", tuple(Split))
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    called = row["messages"][1]
    assert called["content"] is None
    assert json.loads(called["tool_calls"][0]["function"]["arguments"])["city"].startswith("town ")
    assert row["messages"][2]["tool_call_id"] == "call_0001"
    assert row["tools"][0]["function"]["name"] == "weather"


def test_exported_parquet_has_ids_and_splits(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(NUM)))
    export(dataset.path, tmp_path / "out.parquet", "parquet", tuple(Split))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["id", "split", "messages", "tools"]
    assert table.column("split").to_pylist().count("heldout") == dataset.counts[Split.HELDOUT]


def test_file_that_is_there_is_only_replaced_when_asked(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(NUM)))
    target = tmp_path / "out.jsonl"
    target.write_text("mine")
    with pytest.raises(Conflict, match="is there already; choose another name, or replace it with --force"):
        export(dataset.path, target, "jsonl", tuple(Split))
    assert target.read_text() == "mine"
    assert export(dataset.path, target, "jsonl", tuple(Split), replace=True) == NUM


def test_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(NUM)))
    with pytest.raises(DataError, match="No such file or directory; choose another place"):
        export(dataset.path, tmp_path / "missing" / "out.jsonl", "jsonl", tuple(Split))
    with pytest.raises(DataError, match="is a directory; name a file in it"):
        export(dataset.path, tmp_path, "jsonl", tuple(Split), replace=True)


def test_damaged_dataset_is_never_exported(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(NUM)))
    part = dataset.path / "heldout.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        export(dataset.path, tmp_path / "out.jsonl", "jsonl", tuple(Split))
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".out*"))


def two(tmp_path: Path, before: list[Any], after: list[Any]) -> tuple[PreparedDataset, PreparedDataset]:
    return prepared(tmp_path, encoded(*before)), prepared(tmp_path, encoded(*after), name="ds-2")


def test_diff_tells_added_removed_and_changed(tmp_path: Path) -> None:
    rows = chats(NUM)
    other = [*rows[2:], *(a_chat(number) for number in range(100, 110))]
    other[0] = {"prompt": "What is 2 plus one?", "completion": "Three."}
    before, after = two(tmp_path, rows, other)
    found = diff(before.path, after.path)
    assert (found.num_same, found.num_added, found.num_removed) == (NUM - 3, 10, 2)
    assert (found.num_changed, found.num_moved) == (1, 0)
    assert {shown.question for shown in found.removed} == {"What is 0 plus one?", "What is 1 plus one?"}
    assert len(found.added) == 5
    (changed,) = found.changed
    assert (changed.question, changed.before, changed.after) == ("What is 2 plus one?", "It is 3.", "Three.")


def test_diff_of_a_dataset_with_itself_is_nothing(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(NUM)))
    found = diff(dataset.path, dataset.path)
    assert (found.num_same, found.num_added, found.num_removed, found.num_changed, found.num_moved) == (NUM, 0, 0, 0, 0)
    assert found.added == found.removed == found.changed == ()


def test_diff_of_other_shares_tells_what_moved(tmp_path: Path) -> None:
    before = prepared(tmp_path, encoded(*chats(NUM)))
    after = prepared(tmp_path, encoded(*chats(NUM)), HALF.model_copy(update={"heldout_share": 0.6}), name="ds-2")
    found = diff(before.path, after.path)
    assert found.num_same == NUM
    assert found.num_moved == after.counts[Split.HELDOUT] - before.counts[Split.HELDOUT] > 0


def test_diff_of_labels_tells_answers_of_either_kind(tmp_path: Path) -> None:
    rows = [a_label(number) for number in range(NUM)]
    other = [{**row, "completion": "Another answer."} if number < 3 else row for number, row in enumerate(rows)]
    found = diff(*(dataset.path for dataset in two(tmp_path, rows, other)))
    assert found.num_changed == 3
    assert {changed.after for changed in found.changed} == {"Another answer."}


def test_diff_of_a_damaged_dataset_is_refused(tmp_path: Path) -> None:
    before, after = two(tmp_path, chats(NUM), chats(NUM + 1))
    (after.path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="run `tunesmith dataset verify`"):
        diff(before.path, after.path)
