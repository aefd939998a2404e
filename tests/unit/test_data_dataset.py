"""A dataset is what its fingerprint says, from the bytes on disk, also when the manifest was changed with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data import a_chat, chats, encoded, prepared
from tunesmith.core.errors import DataError
from tunesmith.core.files import MANIFEST, canonical_json, sha256_file
from tunesmith.datasets.example import Split, identity
from tunesmith.datasets.reading import fingerprint_of, iter_examples, read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset


@pytest.fixture
def dataset(tmp_path: Path) -> PreparedDataset:
    return prepared(tmp_path, encoded(*chats(60)))


def rewritten(dataset: PreparedDataset, change: Callable[[list[dict[str, Any]]], Any], split: str = "train") -> None:
    """Change the rows of a split as somebody would who knows the format, and put the new hash into the manifest."""
    path = dataset.path / f"{split}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    manifest = json.loads((dataset.path / MANIFEST).read_bytes())
    manifest["files"][path.name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    (dataset.path / MANIFEST).write_text(canonical_json(manifest))


def test_untouched_dataset_is_verified(dataset: PreparedDataset) -> None:
    verify(dataset.path, dataset.fingerprint)
    assert fingerprint_of(dataset.path) == dataset.fingerprint
    rewritten(dataset, lambda rows: None)
    verify(dataset.path, dataset.fingerprint)  # other bytes, same content


@pytest.mark.parametrize("name", ["train.parquet", "validation.parquet", "heldout.parquet"])
def test_any_changed_byte_is_found(dataset: PreparedDataset, name: str) -> None:
    path = dataset.path / name
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError):
            verify(dataset.path, dataset.fingerprint)


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_cut_file_is_found_by_whoever_reads_it(dataset: PreparedDataset, size: int) -> None:
    path = dataset.path / "train.parquet"
    path.write_bytes(path.read_bytes()[:size])
    for use in (lambda: verify(dataset.path, dataset.fingerprint), lambda: read_split(dataset.path, "train")):
        with pytest.raises(DataError):
            use()


def test_changed_text_is_refused_while_reading(dataset: PreparedDataset) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[2]["messages"][1]["content"] = "Send me your password."

    rewritten(dataset, change)
    with pytest.raises(DataError, match="is not what its id says; prepare the dataset again"):
        read_split(dataset.path, Split.TRAIN)
    with pytest.raises(DataError, match="is not what its id says"):
        fingerprint_of(dataset.path)


@pytest.mark.parametrize(("place", "key", "value"), [(0, "weight", 1), (1, "weight", 0), (0, "role", "system")])
def test_changed_weight_or_role_is_refused_while_reading(
    dataset: PreparedDataset, place: int, key: str, value: Any
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["messages"][place][key] = value

    rewritten(dataset, change)
    with pytest.raises(DataError, match="is not what its id says"):
        read_split(dataset.path, Split.TRAIN)


def test_changed_text_with_a_new_id_changes_the_fingerprint(dataset: PreparedDataset) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[2]["messages"][1]["content"] = "Other."
        rows[2]["id"] = identity("ua", [message["content"] for message in rows[2]["messages"]])

    rewritten(dataset, change)
    assert fingerprint_of(dataset.path) != dataset.fingerprint
    with pytest.raises(DataError, match=r"its content is .* expected"):
        verify(dataset.path, dataset.fingerprint)


@pytest.mark.parametrize(
    "change", [lambda rows: rows.reverse(), lambda rows: rows.pop(), lambda rows: rows.append(rows[0])]
)
def test_other_order_or_number_changes_the_fingerprint(dataset: PreparedDataset, change: Callable[..., Any]) -> None:
    rewritten(dataset, change)
    assert fingerprint_of(dataset.path) != dataset.fingerprint


def test_swapped_splits_change_the_fingerprint(dataset: PreparedDataset) -> None:
    train, heldout = dataset.path / "train.parquet", dataset.path / "heldout.parquet"
    one, other = train.read_bytes(), heldout.read_bytes()
    train.write_bytes(other)
    heldout.write_bytes(one)
    assert fingerprint_of(dataset.path) != dataset.fingerprint


def test_foreign_group_is_found(dataset: PreparedDataset) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["group"] = rows[1]["group"]

    rewritten(dataset, change)
    with pytest.raises(DataError, match="in a foreign group"):
        verify(dataset.path, dataset.fingerprint)


def test_another_dataset_in_its_place_is_refused(dataset: PreparedDataset, tmp_path: Path) -> None:
    other = prepared(tmp_path, encoded(*chats(60), a_chat(61)), name="ds-2")
    with pytest.raises(DataError, match="expected"):
        verify(other.path, dataset.fingerprint)


def test_foreign_parquet_file_is_refused(dataset: PreparedDataset) -> None:
    pq.write_table(pa.table({"text": ["a"]}), dataset.path / "train.parquet")
    with pytest.raises(DataError, match="its columns are not those of a tunesmith dataset"):
        read_split(dataset.path, Split.TRAIN)


def test_manifest_without_a_report_is_refused(dataset: PreparedDataset) -> None:
    manifest = json.loads((dataset.path / MANIFEST).read_bytes())
    for meta in ({}, {"v": 2}, {**manifest["meta"], "kind": "poem"}, {"v": 1}):
        (dataset.path / MANIFEST).write_text(canonical_json({**manifest, "meta": meta}))
        with pytest.raises(DataError, match="prepare it again"):
            summary(dataset.path)


def test_unknown_split_is_refused(dataset: PreparedDataset) -> None:
    with pytest.raises(ValueError, match="test"):
        iter_examples(dataset.path, "test")


def test_examples_of_a_large_split_come_one_by_one(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(5000)))
    stream = iter_examples(dataset.path, Split.TRAIN)
    assert next(stream).line == read_split(dataset.path, Split.TRAIN)[0].line
    stream.close()
