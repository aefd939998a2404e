"""Labelled answers: good and bad ones of a prompt, and nothing that learns from, or is judged by, a bad one."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.data import a_chat, a_label, a_pair, encoded, num_examples, prepared
from tunesmith.core.errors import DataError
from tunesmith.datasets.example import Example, Kind, Split
from tunesmith.datasets.prepare import heldout_cases
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset, PrepareOptions


def all_examples(dataset: PreparedDataset) -> list[Example]:
    return sorted((e for split in Split for e in read_split(dataset.path, split)), key=lambda example: example.line)


def test_labelled_rows_become_desirable_and_undesirable_examples(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_label, range(40))))
    assert dataset.report.kind is Kind.LABELLED
    verify(dataset.path, dataset.fingerprint)
    good, bad = all_examples(dataset)[:2]
    assert (good.kind, good.is_desirable, bad.kind, bad.is_desirable) == (Kind.LABELLED, True, Kind.LABELLED, False)
    assert good.messages == good.prompt + good.chosen
    assert good.rejected == ()
    assert bad.chosen == ()
    assert bad.prompt == ({"role": "user", "content": "What is 1 plus one?", "weight": 0},)
    assert bad.rejected == ({"role": "assistant", "content": "I do not know.", "weight": 1},)
    with pytest.raises(ValueError, match="nothing to learn"):
        _ = bad.messages


def test_counts_tell_the_answers_to_avoid(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_label, range(60))))
    found = {split: sum(not e.is_desirable for e in read_split(dataset.path, split)) for split in Split}
    assert summary(dataset.path).report.num_undesirable == found
    assert sum(found.values()) == 30


def test_good_and_bad_answer_of_a_prompt_are_two_examples_of_one_group(tmp_path: Path) -> None:
    rows = [a_label(number, good=good) for number in range(30) for good in (True, False)]
    dataset = prepared(tmp_path, encoded(*rows))
    assert num_examples(dataset) == 60
    for split in Split:
        groups = [example.group for example in read_split(dataset.path, split)]
        assert all(groups.count(group) == 2 for group in groups)


def test_same_answer_with_another_label_is_another_example(tmp_path: Path) -> None:
    rows = [a_label(number) for number in range(30)]
    dataset = prepared(tmp_path, encoded(*rows, rows[4], {**rows[4], "label": False}))
    assert dataset.report.num_duplicates == 1
    assert num_examples(dataset) == 31


def test_earlier_answers_of_a_labelled_prompt_are_context(tmp_path: Path) -> None:
    long = {
        "prompt": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Why?"},
        ],
        "completion": "Because.",
        "label": True,
    }
    first = all_examples(prepared(tmp_path, encoded(long, *map(a_label, range(30)))))[0]
    assert [message["weight"] for message in first.messages] == [0, 0, 0, 1]


@pytest.mark.parametrize(("other", "fix"), [(a_chat(99), "give every line a label"), (a_pair(99), "two datasets")])
def test_line_without_label_among_labelled_ones_is_bad(tmp_path: Path, other: object, fix: str) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_label, range(40)), other))
    (drop,) = dataset.report.drops
    assert (drop.reason.value, drop.first[0].line) == ("mixed_kind", 41)
    assert fix in drop.first[0].fix
    assert "in a dataset of labelled rows" in drop.first[0].problem


@pytest.mark.parametrize("kind", ["supervised", "preference"])
def test_labelled_line_among_others_is_bad(tmp_path: Path, kind: str) -> None:
    a_row = a_chat if kind == "supervised" else a_pair
    report = prepared(tmp_path, encoded(*map(a_row, range(40)), a_label(41), a_label(42))).report
    assert (report.kind.value, report.drops[0].num) == (kind, 2)
    assert report.drops[0].first[0].problem == f"is a labelled row in a dataset of {kind} rows"
    assert report.num_undesirable == {}


@pytest.mark.parametrize(("good", "what"), [(True, "label is true in all"), (False, "label is false in all")])
def test_only_one_label_is_refused(tmp_path: Path, good: bool, what: str) -> None:
    with pytest.raises(DataError, match=what):
        prepared(tmp_path, encoded(*(a_label(number, good=good) for number in range(40))))


def test_heldout_part_without_a_desirable_answer_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_label, range(40))))
    held = {example.line for example in read_split(dataset.path, Split.HELDOUT)}
    rows = [a_label(number, good=False if number + 1 in held else None) for number in range(40)]
    with pytest.raises(DataError, match=r"none of the .* held-out answers is desirable"):
        prepared(tmp_path, encoded(*rows), name="ds-2")


def test_only_desirable_answers_become_cases(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*map(a_label, range(80))))
    desirable = [example for example in read_split(dataset.path, Split.HELDOUT) if example.is_desirable]
    assert 2 < len(desirable) < dataset.counts[Split.HELDOUT]
    cases = heldout_cases(dataset.path, 1000)
    assert [case.id for case in cases] == [example.group for example in desirable]
    assert all(case.messages[-1]["content"] != "I do not know." for case in cases)
    assert len(heldout_cases(dataset.path, 2)) == 2


@pytest.mark.slow
def test_children_that_parse_make_the_same_labelled_dataset(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(encoded(*map(a_label, range(3000))))
    one = prepare([source], tmp_path / "one", PrepareOptions(), num_processes=1)
    two = prepare([source], tmp_path / "two", PrepareOptions(), num_processes=2)
    assert one.report == two.report
    assert pq.read_table(one.path / "train.parquet").equals(pq.read_table(two.path / "train.parquet"))
