"""Examples taken out of datasets of every kind; what is left is a dataset like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.data import HALF, a_file, encoded
from tunesmith.core.errors import DataError
from tunesmith.core.files import publish_folder, read_manifest
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset
from tunesmith.experience.forgetting.dataset_files import erase
from tunesmith.experience.forgetting.rules import hashes_of, talk_hash, tombstone_key
from tunesmith.profiles.sections.screens import Screen

TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def _rows(kind: str, num: int = 40) -> list[dict[str, Any]]:
    if kind == "preference":
        return [{"prompt": f"Why {n}?", "chosen": f"Because {n}.", "rejected": f"No {n}."} for n in range(num)]
    if kind == "labelled":
        return [{"prompt": f"Why {n}?", "completion": f"So {n}.", "label": n % 2 == 0} for n in range(num)]
    return [{"prompt": f"Why {n}?", "completion": f"Because {n}."} for n in range(num)]


def _prepared(folder: Path, rows: list[dict[str, Any]], *screens: Screen) -> PreparedDataset:
    options = HALF.model_copy(update={"screens": screens})
    return prepare([a_file(folder, encoded(*rows))], folder / "datasets" / "ds-1", options)


@pytest.mark.parametrize("kind", ["supervised", "preference", "labelled"])
def test_examples_go_and_the_rest_is_a_sound_dataset(tmp_path: Path, kind: str) -> None:
    dataset = _prepared(tmp_path, _rows(kind))
    gone = {read_split(dataset.path, split)[0].id for split in (Split.TRAIN, Split.HELDOUT)}
    final = tmp_path / "datasets" / "ds-1.new"
    erased = erase(dataset.path, final, gone, ())
    assert erased is not None
    assert erased.num_examples == 2
    verify(final, erased.fingerprint)
    report = summary(final).report
    for split in Split:
        left = read_split(final, split)
        assert [each.id for each in left] == [
            each.id for each in read_split(dataset.path, split) if each.id not in gone
        ]
        assert report.counts[split] == len(left)
        if kind == "labelled":
            assert report.num_undesirable[split] == sum(not each.is_desirable for each in left)
    assert report.earlier_fingerprints == (dataset.fingerprint,)
    assert sum(bucket.num for bucket in report.lengths) == 38


def test_history_grows_with_each_erasure(tmp_path: Path) -> None:
    dataset = _prepared(tmp_path, _rows("supervised"))
    names, folder = [dataset.fingerprint], dataset.path
    for number in range(3):
        final = tmp_path / "datasets" / f"ds-1.{number}"
        erased = erase(folder, final, {read_split(folder, Split.TRAIN)[0].id}, ())
        assert erased is not None
        names, folder = [*names, erased.fingerprint], final
    assert list(summary(folder).report.earlier_fingerprints) == names[:-1]


def test_dataset_without_them_is_left_alone(tmp_path: Path) -> None:
    dataset = _prepared(tmp_path, _rows("supervised"))
    assert erase(dataset.path, tmp_path / "datasets" / "ds-1.new", {"0" * 64}, {"xp-0"}) is None
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["ds-1"]


def test_rows_kept_aside_are_found_by_what_was_said_with_any_answer(tmp_path: Path) -> None:
    mail = "Write to ann.lee@gmail.com"
    pairs = [*_rows("preference"), {"prompt": mail, "chosen": "Written.", "rejected": "No."}]
    dataset = _prepared(tmp_path, pairs, Screen.EMAIL)
    talk = [{"role": "user", "content": mail}, {"role": "assistant", "content": "No."}]
    for number, hashes in enumerate(
        (hashes_of(talk, ()), hashes_of([*talk[:1], {**talk[1], "content": "x"}], ["Written."]))
    ):
        final = tmp_path / "datasets" / f"ds-1.{number}"
        erased = erase(dataset.path, final, hashes, ())
        assert erased is not None
        assert erased.fingerprint == dataset.fingerprint  # no example went
        assert (final / "quarantine.jsonl").read_bytes() == b""
        assert (final / "quarantine.jsonl").stat().st_mode & 0o777 == 0o600
        assert summary(final).report.quarantine == ()
        assert summary(final).report.earlier_fingerprints == ()


def test_conversation_with_calls_is_found_too(tmp_path: Path) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Mail ann.lee@gmail.com how warm it is"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
        {"role": "assistant", "content": "It has 20 degrees."},
    ]
    dataset = _prepared(tmp_path, [*_rows("supervised"), {"tools": [TOOL], "messages": talk}], Screen.EMAIL)
    assert dataset.report.num_quarantined == 1
    erased = erase(dataset.path, tmp_path / "datasets" / "ds-1.new", hashes_of(talk, ()), ())
    assert erased is not None
    assert summary(tmp_path / "datasets" / "ds-1.new").report.num_quarantined == 0


def test_lines_that_name_an_experience_go(tmp_path: Path) -> None:
    dataset = _prepared(tmp_path, _rows("supervised"))
    lines = [{"experience": f"xp-{name}", "reason": "kept"} for name in ("aa", "aab", "b")]
    staged = tmp_path / "staged"
    dataset.path.rename(staged)
    (staged / "members.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    publish_folder(staged, dataset.path, read_manifest(staged).meta)
    final = tmp_path / "datasets" / "ds-1.new"
    assert erase(dataset.path, final, (), {"xp-aa"}) is not None
    left = [json.loads(line)["experience"] for line in (final / "members.jsonl").read_text().splitlines()]
    assert left == ["xp-aab", "xp-b"]


def test_damaged_or_unknown_files_are_refused(tmp_path: Path) -> None:
    dataset = _prepared(tmp_path, _rows("supervised"))
    gone = {read_split(dataset.path, Split.TRAIN)[0].id}
    (dataset.path / "heldout.parquet").write_bytes(b"broken")
    with pytest.raises(DataError, match="not what the manifest says"):
        erase(dataset.path, tmp_path / "datasets" / "ds-1.new", gone, ())
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == ["ds-1"]


def test_hashes_hold_no_text_and_tell_conversations_apart() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert talk_hash(talk) != talk_hash([{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}])
    assert tombstone_key("call 17") == tombstone_key("call 17") != tombstone_key("call 18")
    assert "17" not in tombstone_key("ann called at 17")[:20]
    assert tombstone_key("a" * 64) == "a" * 64
