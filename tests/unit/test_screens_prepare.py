"""Screens inside preparation: suspects are quarantined whole, counted, explained, and never trained."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from support.data import HALF, a_chat, a_file, chats, encoded, num_examples, prepared
from tunesmith.core.errors import DataError
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset
from tunesmith.datasets.screens.near_duplicates import NearDuplicates, minhash_signature
from tunesmith.profiles.sections.screens import DEFAULT_SCREENS, Screen

SCREENED = HALF.model_copy(update={"screens": DEFAULT_SCREENS})
WORDS = [
    f"{first}{second}" for first in ("ba", "ke", "lo", "mi", "su", "ta") for second in ("dor", "len", "rik", "sam")
]
WORDS += [word[::-1] + end for word in WORDS for end in ("a", "o", "um")]


def a_long_answer(seed: int, *, changed: int = 0) -> str:
    words = random.Random(seed).sample(WORDS, 60)
    return " ".join(words[: 60 - changed] + [f"other{place}" for place in range(changed)])


def a_long_chat(number: int, *, changed: int = 0, prompt: str | None = None) -> dict[str, Any]:
    asked = prompt or f"Please explain topic {number} to a beginner in a few sentences."
    return {"prompt": asked, "completion": a_long_answer(number, changed=changed)}


def quarantined(dataset: PreparedDataset) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dataset.path / "quarantine.jsonl").read_text().splitlines()]


def lines_in(dataset: PreparedDataset) -> set[int]:
    return {example.line for split in Split for example in read_split(dataset.path, split)}


def a_suspect(number: int = 900) -> dict[str, Any]:
    row = a_chat(number)
    row["messages"][1]["content"] += " Mail maria.garcia@gmail.com<|im_end|>"
    return row


def test_suspect_is_kept_whole_with_its_reason_and_never_trained(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(30), a_suspect(), *map(a_chat, range(30, 40))), SCREENED)
    assert num_examples(dataset) == 40
    assert 31 not in lines_in(dataset)
    [kept] = quarantined(dataset)
    assert (kept["source"], kept["line"]) == ("rows.jsonl", 31)
    assert [message["content"] for message in kept["messages"]] == [m["content"] for m in a_suspect()["messages"]]
    found = {finding["screen"]: finding for finding in kept["findings"]}
    assert set(found) == {"email", "control_token"}
    text = kept["messages"][1]["content"]
    assert found["control_token"]["field"] == "messages[1]"
    assert text[found["control_token"]["start"] : found["control_token"]["end"]] == "<|im_end|>"
    assert found["email"]["reason"] == "an e-mail address"
    assert "maria" not in json.dumps(kept["findings"])


def test_report_and_manifest_count_suspects_by_screen(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(30), a_suspect(), a_suspect(901)), SCREENED)
    report = summary(dataset.path).report
    assert report == dataset.report
    assert report.num_quarantined == 2
    assert [(found.screen, found.num) for found in report.quarantine] == [("email", 2), ("control_token", 2)]
    first = report.quarantine[0].first[0]
    assert str(first) == "rows.jsonl line 31: an e-mail address: …@gmail.com"
    assert any("2 suspect rows were quarantined" in warning for warning in report.warnings)
    assert report.drops == ()
    verify(dataset.path, dataset.fingerprint)


def test_quarantine_file_is_for_its_owner_only(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(30), a_suspect()), SCREENED)
    assert stat.S_IMODE((dataset.path / "quarantine.jsonl").stat().st_mode) == 0o600


def test_damaged_quarantine_is_noticed(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*chats(30), a_suspect()), SCREENED)
    (dataset.path / "quarantine.jsonl").write_text("{}\n")
    with pytest.raises(DataError):
        verify(dataset.path, dataset.fingerprint)


def test_without_suspects_nothing_changes(tmp_path: Path) -> None:
    plain = prepared(tmp_path, encoded(*chats(60)), HALF, name="ds-1")
    screened = prepared(tmp_path, encoded(*chats(60)), SCREENED, name="ds-2")
    assert plain.fingerprint == screened.fingerprint
    assert not (screened.path / "quarantine.jsonl").exists()
    assert screened.report.num_quarantined == 0


def test_screens_change_the_fingerprint_only_by_what_they_quarantine(tmp_path: Path) -> None:
    rows = [*chats(30), a_suspect()]
    without = prepared(tmp_path, encoded(*chats(30)), HALF, name="ds-1")
    screened = prepared(tmp_path, encoded(*rows), SCREENED, name="ds-2")
    unscreened = prepared(tmp_path, encoded(*rows), HALF, name="ds-3")
    assert without.fingerprint == screened.fingerprint != unscreened.fingerprint


def test_chosen_screens_only_are_used(tmp_path: Path) -> None:
    options = HALF.model_copy(update={"screens": (Screen.LINK,)})
    assert prepared(tmp_path, encoded(*chats(30), a_suspect()), options).report.num_quarantined == 0


def test_every_row_suspect_is_refused_with_the_first(tmp_path: Path) -> None:
    rows = [a_suspect(number) for number in range(5)]
    with pytest.raises(DataError, match=r"every row is suspect: 5 × email, first rows.jsonl line 1: an e-mail"):
        prepared(tmp_path, encoded(*rows), SCREENED)
    assert list((tmp_path / "datasets").iterdir()) == []


@pytest.mark.slow
def test_suspects_are_the_same_however_many_processes_parse(tmp_path: Path) -> None:
    rows = [row for number in range(60) for row in (a_suspect(number + 1000), a_long_chat(number))]
    rows += [a_long_chat(number, changed=1) for number in range(60)]
    source = a_file(tmp_path, encoded(*chats(60), *rows))
    one = prepare([source], tmp_path / "one", SCREENED, num_processes=1)
    two = prepare([source], tmp_path / "two", SCREENED, num_processes=2)
    assert one.report == two.report
    assert (one.path / "quarantine.jsonl").read_bytes() == (two.path / "quarantine.jsonl").read_bytes()


def test_near_copy_of_a_long_answer_is_kept_aside_and_names_the_earlier_line(tmp_path: Path) -> None:
    rows = [*chats(20), *(a_long_chat(number) for number in range(20)), a_long_chat(7, changed=1)]
    dataset = prepared(tmp_path, encoded(*rows), SCREENED)
    [kept] = quarantined(dataset)
    assert kept["line"] == 41
    assert kept["findings"][0]["screen"] == "near_copy"
    assert "line 28," in kept["findings"][0]["reason"]


def test_answers_that_share_half_their_words_are_no_near_copies(tmp_path: Path) -> None:
    rows = [*chats(20), *(a_long_chat(number) for number in range(200)), a_long_chat(7, changed=20)]
    assert prepared(tmp_path, encoded(*rows), SCREENED).report.num_quarantined == 0


def test_one_answer_to_different_questions_is_no_near_copy(tmp_path: Path) -> None:
    rows = [
        a_long_chat(7, prompt="What do you say about trees in winter?"),
        a_long_chat(7, prompt="Tell me, how are fish?"),
    ]
    assert prepared(tmp_path, encoded(*chats(20), *rows), SCREENED).report.num_quarantined == 0


def test_short_answers_and_labelled_pairs_are_no_near_copies(tmp_path: Path) -> None:
    template = "Decide whether the review is positive or negative. " * 5
    rows = [{"prompt": f"{template} Review {number}", "completion": "positive"} for number in range(60)]
    assert prepared(tmp_path, encoded(*rows), SCREENED).report.num_quarantined == 0
    labelled = [{**a_long_chat(n, changed=c), "label": c == 0} for n in range(40) for c in (0, 1)]
    assert prepared(tmp_path, encoded(*labelled), SCREENED, name="ds-2").report.num_quarantined == 0


def test_near_copies_recall_and_false_alarms_on_many_pairs() -> None:
    near, found = NearDuplicates(), 0
    for number in range(2000):
        made = minhash_signature(number, f"topic {number}", a_long_answer(number))
        assert made is not None
        assert near.earlier(0, number + 1, made) is None
    for number in range(300):
        made = minhash_signature(number, f"topic {number}", a_long_answer(number, changed=1))
        assert made is not None
        found += near.earlier(0, 9999, made) == (0, number + 1)
    assert found >= 280


@pytest.mark.slow
def test_contradicting_short_answer_is_kept_aside_only_where_asked_for(tmp_path: Path) -> None:
    rows = [*chats(30), {"prompt": "what is  7 plus ONE?", "completion": "It is 9."}]
    rows += [{"prompt": "What is 8 plus one?", "completion": "it is 9"}]  # the same in other clothes
    rows += [a_long_chat(5), {**a_long_chat(5), "completion": a_long_answer(6)}]  # long answers may differ
    assert prepared(tmp_path, encoded(*rows), SCREENED).report.num_quarantined == 0
    options = HALF.model_copy(update={"screens": (*DEFAULT_SCREENS, Screen.CONTRADICTION)})
    dataset = prepared(tmp_path, encoded(*rows), options, name="ds-2")
    [kept] = quarantined(dataset)
    assert (kept["line"], kept["findings"][0]["screen"]) == (31, "contradiction")
    assert "line 8;" in kept["findings"][0]["reason"]
    source = a_file(tmp_path, encoded(*rows))
    assert prepare([source], tmp_path / "two", options, num_processes=2).report == dataset.report
