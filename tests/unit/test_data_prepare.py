"""From JSONL to a published dataset: splits, copies, report, and a fingerprint of the content alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data import HALF, a_chat, a_file, a_pair, chats, encoded, num_examples, prepared
from tunesmith.core.errors import Conflict, DataError, UsageError
from tunesmith.datasets.example import Kind, Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import fingerprint_of, read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset, PrepareOptions


def all_examples(dataset: PreparedDataset) -> list[Any]:
    return sorted((e for split in Split for e in read_split(dataset.path, split)), key=lambda e: (e.source, e.line))


def test_prepared_dataset_holds_every_row_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(40)))
    assert dataset.report.kind is Kind.SUPERVISED
    assert num_examples(dataset) == 40
    assert all(dataset.counts[split] for split in Split)
    examples = all_examples(dataset)
    assert [example.line for example in examples] == list(range(1, 41))
    assert [m["content"] for m in examples[7].messages] == ["What is 7 plus one?", "It is 8."]
    assert examples[7].prompt == ({"role": "user", "content": "What is 7 plus one?", "weight": 0},)
    assert examples[7].chosen == ({"role": "assistant", "content": "It is 8.", "weight": 1},)
    assert examples[7].rejected is None
    for split in Split:
        lines = [example.line for example in read_split(dataset.path, split)]
        assert lines == sorted(lines)


def test_preference_rows_keep_the_rejected_answer(tmp_path: Path) -> None:
    rows = [a_pair(number) for number in range(20)]
    rows[3] = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Hello!"}],
        "rejected": [
            {"role": "assistant", "content": "Hm?"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "What?"},
        ],
    }
    dataset = prepared(tmp_path, encoded(*rows))
    assert dataset.report.kind is Kind.PREFERENCE
    long = all_examples(dataset)[3]
    assert long.kind is Kind.PREFERENCE
    assert [m["content"] for m in long.prompt] == ["Be brief.", "Hi"]
    assert [m["content"] for m in long.chosen] == ["Hello!"]
    assert [m["content"] for m in long.rejected] == ["Hm?", "Hi", "What?"]
    verify(dataset.path, dataset.fingerprint)


def test_weight_0_is_context_and_belongs_to_the_prompt(tmp_path: Path) -> None:
    row = a_chat(1)
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!", "weight": 0}]
    dataset = prepared(tmp_path, encoded({"messages": first + row["messages"]}, *chats(30)))
    example = all_examples(dataset)[0]
    assert [(m["role"], m["weight"]) for m in example.prompt] == [("user", 0), ("assistant", 0), ("user", 0)]
    assert [(m["role"], m["weight"]) for m in example.chosen] == [("assistant", 1)]


def test_copies_are_dropped_and_the_first_one_stays(tmp_path: Path) -> None:
    same_in_other_form = {"prompt": "What is 3 plus one?", "completion": "It is 4."}
    dataset = prepared(tmp_path, encoded(*chats(20), *chats(20), same_in_other_form))
    assert num_examples(dataset) == 20
    assert dataset.report.num_duplicates == 21
    assert [example.line for example in all_examples(dataset)] == list(range(1, 21))


def test_copies_in_another_source_are_dropped(tmp_path: Path) -> None:
    sources = [a_file(tmp_path, encoded(*chats(20)), name) for name in ("a.jsonl", "b.jsonl")]
    dataset = prepare(sources, tmp_path / "ds", HALF)
    assert (num_examples(dataset), dataset.report.num_duplicates) == (20, 20)
    assert [(file.name, file.num_lines) for file in dataset.report.sources] == [("a.jsonl", 20), ("b.jsonl", 20)]


def test_conversation_and_its_own_beginning_share_a_split(tmp_path: Path) -> None:
    follow_up = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    rows = [row for chat in chats(60) for row in (chat, {"messages": chat["messages"] + follow_up})]
    dataset = prepared(tmp_path, encoded(*rows))
    for split in Split:
        examples = read_split(dataset.path, split)
        assert len(examples) == 2 * len({example.group for example in examples})


def test_held_out_prompt_stays_held_out_in_every_dataset(tmp_path: Path) -> None:
    first = prepared(tmp_path, encoded(*chats(60)), name="ds-1")
    rows = [{"prompt": m["content"].upper(), "completion": "Other."} for c in chats(90) for m in c["messages"][:1]]
    random.Random(3).shuffle(rows)
    second = prepared(tmp_path, encoded(*rows), name="ds-2")
    held_out = {example.group for example in read_split(first.path, Split.HELDOUT)}
    later = {split: {example.group for example in read_split(second.path, split)} for split in Split}
    assert held_out
    assert held_out <= later[Split.HELDOUT]
    assert not held_out & (later[Split.TRAIN] | later[Split.VALIDATION])


def test_report_is_the_one_in_the_manifest(tmp_path: Path) -> None:
    rows = [*chats(30), {"messages": []}, b"", {**a_chat(77), "source": "x"}]
    dataset = prepared(tmp_path, encoded(*rows))
    report = dataset.report
    assert summary(dataset.path) == dataset
    assert (report.num_lines, report.num_blank) == (33, 1)
    assert [(drop.reason.value, drop.num, drop.first[0].line) for drop in report.drops] == [("empty_list", 1, 31)]
    assert report.ignored_fields == {"source": 1}
    assert sum(bucket.num for bucket in report.lengths) == num_examples(dataset) == 31
    assert [bucket.below for bucket in report.lengths] == [32]
    assert report.mean_score == 1.0
    assert str(tmp_path) not in json.dumps(report.model_dump(mode="json"))
    assert any("only" in warning and "held out" in warning for warning in report.warnings)


def test_columns_are_readable_by_any_parquet_tool(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(30)))
    row = pq.read_table(dataset.path / "train.parquet").to_pylist()[0]
    assert set(row) == {"id", "group", "messages", "num_prompt", "rejected", "num_chars", "score", "source", "line"}
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["num_chars"] == sum(len(message["content"]) for message in row["messages"])


@settings(max_examples=25, deadline=None)
@given(
    ends=st.lists(st.sampled_from([b"\n", b"\r\n", b" \n", b"\n\n", b"\r\n\r\n"]), min_size=24, max_size=24),
    mark=st.booleans(),
    is_spaced=st.booleans(),
    cut=st.integers(0, 24),
)
def test_line_ends_marks_blank_lines_and_files_never_change_the_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, ends: list[bytes], mark: bool, is_spaced: bool, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("ends")
    plain = prepared(folder, encoded(*chats(24)))
    separators = (", ", ": ") if is_spaced else (",", ":")
    lines = [json.dumps(row, separators=separators).encode() + end for row, end in zip(chats(24), ends, strict=True)]
    parts = [part for part in (lines[:cut], lines[cut:]) if part]
    sources = [
        a_file(folder, (b"\xef\xbb\xbf" if mark else b"") + b"".join(part), f"part-{index}.jsonl")
        for index, part in enumerate(parts)
    ]
    other = prepare(sources, folder / "other", HALF)
    assert other.fingerprint == plain.fingerprint == fingerprint_of(other.path)


@settings(max_examples=40, deadline=None)
@given(number=st.integers(0, 23), place=st.integers(0, 1), data=st.data())
def test_one_changed_character_of_a_text_changes_the_fingerprint(
    tmp_path_factory: pytest.TempPathFactory, number: int, place: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("change")
    rows = chats(24)
    before = prepared(folder, encoded(*rows)).fingerprint
    message = rows[number]["messages"][place]
    at = data.draw(st.integers(0, len(message["content"]) - 1))
    letter = data.draw(st.sampled_from("xyz#\u00e9\u4e16"))
    message["content"] = message["content"][:at] + letter + message["content"][at + 1 :]
    assert prepared(folder, encoded(*rows), name="ds-2").fingerprint != before


def test_order_of_examples_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    first = prepared(tmp_path, encoded(*chats(40)), name="ds-1")
    second = prepared(tmp_path, encoded(*reversed(chats(40))), name="ds-2")
    assert first.fingerprint != second.fingerprint


def test_shares_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    first = prepared(tmp_path, encoded(*chats(40)), HALF, name="ds-1")
    second = prepared(tmp_path, encoded(*chats(40)), PrepareOptions(heldout_share=0.2), name="ds-2")
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_number_of_processes_never_changes_a_byte(tmp_path: Path, num_processes: int) -> None:
    rows: list[Any] = []
    for number in range(6000):
        rows += [a_chat(number % 5500), b"broken" if number % 50 == 0 else {**a_chat(number), f"extra{number % 3}": 1}]
        rows += [a_pair(number), b"x" * 300_000] if number % 2000 == 0 else [b"\xff"] if number % 999 == 0 else []
    options = PrepareOptions(max_line_bytes=200_000)
    source = a_file(tmp_path, encoded(*rows)[:-9])
    dataset = prepare([source], tmp_path / "ds", options, num_processes=num_processes)
    plain = prepare([source], tmp_path / "plain", options, num_processes=1)
    assert dataset.report == plain.report
    assert {drop.reason.value for drop in dataset.report.drops} >= {
        "not_json",
        "mixed_kind",
        "too_long",
        "invalid_utf8",
    }
    for name in ("train.parquet", "validation.parquet", "heldout.parquet", "manifest.json"):
        assert (dataset.path / name).read_bytes() == (plain.path / name).read_bytes()


def test_progress_goes_from_nothing_to_everything(tmp_path: Path) -> None:
    sources = [a_file(tmp_path, encoded(*chats(3000)[half::2]), f"{half}.jsonl") for half in range(2)]
    seen: list[tuple[int, int, int]] = []
    prepare(sources, tmp_path / "ds", HALF, on_progress=lambda done, total, rows: seen.append((done, total, rows)))
    total = sum(source.stat().st_size for source in sources)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total, 3000)


def test_preparing_again_is_the_same_dataset(tmp_path: Path) -> None:
    first = prepared(tmp_path, encoded(*chats(30)))
    manifest = (first.path / "manifest.json").read_bytes()
    again = prepared(tmp_path, encoded(*chats(30)))
    assert again.fingerprint == first.fingerprint
    assert (first.path / "manifest.json").read_bytes() == manifest
    assert [path.name for path in first.path.parent.iterdir()] == ["ds-1"]


def test_folder_that_holds_something_else_is_never_replaced(tmp_path: Path) -> None:
    first = prepared(tmp_path, encoded(*chats(30)))
    with pytest.raises(Conflict, match="ds-1 already holds something else"):
        prepared(tmp_path, encoded(*chats(31)))
    verify(first.path, first.fingerprint)
    assert [path.name for path in first.path.parent.iterdir()] == ["ds-1"]


def test_more_examples_than_allowed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 20 examples, which is max_examples"):
        prepared(tmp_path, encoded(*chats(30)), PrepareOptions(max_examples=20))


def test_no_source_at_all_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name at least one file"):
        prepare([], tmp_path / "ds", HALF)


def test_shares_that_leave_nothing_to_train_on_are_refused() -> None:
    with pytest.raises(ValueError, match="leave something to train on"):
        PrepareOptions(heldout_share=0.6, validation_share=0.4)
