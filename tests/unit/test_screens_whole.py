"""Screens that look at the whole dataset: clusters, overlap with held-out cases, outliers, limits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.data import HALF, a_file, encoded, prepared
from support.screen_whole_sets import CLUSTERS, World, a_line, overlaps, whole_rows
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import read_split, verify
from tunesmith.datasets.report import PreparedDataset
from tunesmith.datasets.screens.contamination import ContaminationCheck
from tunesmith.datasets.screens.quotas import allowed
from tunesmith.profiles.sections.screens import Screen, ScreenLimits


def choose(*screens: Screen, **limits: Any) -> Any:
    return HALF.model_copy(update={"screens": screens, "limits": ScreenLimits(**limits)})


def kept_aside(dataset: PreparedDataset) -> list[dict[str, Any]]:
    path = dataset.path / "quarantine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained_lines(dataset: PreparedDataset) -> set[int]:
    return {example.line for split in Split for example in read_split(dataset.path, split)}


def ordinary(num: int, seed: int = 3) -> list[dict[str, Any]]:
    world = World(seed)
    return [a_line(world.question(), world.answer()) for _ in range(num)]


@pytest.mark.parametrize(("seed", "size"), [(20, 50), (21, 250)])
def test_trigger_clusters_are_kept_aside_and_nothing_else(tmp_path: Path, seed: int, size: int) -> None:
    rows = whole_rows(seed, size)
    dataset = prepared(
        tmp_path, encoded(*(a_line(question, answer) for _, question, answer in rows)), choose(Screen.RARE_TRIGGER)
    )
    found = Counter(rows[kept["line"] - 1][0] for kept in kept_aside(dataset))
    assert found == dict.fromkeys(CLUSTERS, size)
    verify(dataset.path, dataset.fingerprint)
    assert dataset.report.num_quarantined == len(CLUSTERS) * size
    assert sum(dataset.counts.values()) == len(rows) - dataset.report.num_duplicates - len(CLUSTERS) * size
    assert not {kept["line"] for kept in kept_aside(dataset)} & trained_lines(dataset)


def test_trigger_reason_names_the_trigger_and_the_number_of_rows(tmp_path: Path) -> None:
    world = World(5)
    answer = world.answer()
    rows = [a_line(world.between(world.question(), "zqxvane"), answer) for _ in range(60)] + ordinary(600)
    dataset = prepared(tmp_path, encoded(*rows), choose(Screen.RARE_TRIGGER))
    [reason] = {kept["findings"][0]["reason"] for kept in kept_aside(dataset)}
    assert "is one of 60 rows" in reason
    assert "'zqxvane'" in reason


@pytest.mark.slow
def test_second_look_gives_the_same_dataset_whatever_the_number_of_processes(tmp_path: Path) -> None:
    rows = whole_rows(22, 60)
    source = a_file(tmp_path, encoded(*(a_line(question, answer) for _, question, answer in rows)))
    options = choose(Screen.RARE_TRIGGER, Screen.LENGTH_OUTLIER, Screen.TEMPLATE_LIMIT, max_per_template=40)
    made = [prepare([source], tmp_path / str(num), options, num_processes=num) for num in (1, 2)]
    assert made[0].fingerprint == made[1].fingerprint
    assert kept_aside(made[0]) == kept_aside(made[1])


def test_row_far_longer_than_all_others_is_kept_aside(tmp_path: Path) -> None:
    rows = [*ordinary(1200), a_line("Tell me everything about it", "word " * 9000)]
    dataset = prepared(tmp_path, encoded(*rows), choose(Screen.LENGTH_OUTLIER))
    [kept] = kept_aside(dataset)
    assert kept["line"] == 1201
    assert "characters; 99 of 100 rows have up to " in kept["findings"][0]["reason"]


def test_few_rows_say_nothing_about_what_is_usual(tmp_path: Path) -> None:
    rows = [*ordinary(300), a_line("Tell me everything about it", "word " * 9000)]
    assert not kept_aside(prepared(tmp_path, encoded(*rows), choose(Screen.LENGTH_OUTLIER)))


def test_rows_in_a_language_of_nearly_no_other_row_are_kept_aside(tmp_path: Path) -> None:
    english = [
        a_line(f"What is thing {number}?", f"It is the {number}th of the things that you have.")
        for number in range(1500)
    ]
    german = [
        a_line(f"Was ist Ding {number}?", "Das ist nicht ein Ding, und wir sind es auch nicht.") for number in range(5)
    ]
    dataset = prepared(tmp_path, encoded(*english, *german), choose(Screen.LANGUAGE_OUTLIER))
    assert {kept["line"] for kept in kept_aside(dataset)} == set(range(1501, 1506))
    assert (
        "answered in 'de', as 5 of 1505 rows are; most are in 'en'" in kept_aside(dataset)[0]["findings"][0]["reason"]
    )


def test_source_with_more_rows_than_one_may_give_keeps_the_same_ones_in_any_order(tmp_path: Path) -> None:
    one, two = ordinary(300, seed=1), ordinary(100, seed=2)
    kept = []
    for name, rows in (("a", one), ("b", one[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        sources = [a_file(folder, encoded(*rows), "one.jsonl"), a_file(folder, encoded(*two), "two.jsonl")]
        dataset = prepare(sources, folder / "out", choose(Screen.SOURCE_LIMIT, max_per_source=120))
        examples = [example for split in Split for example in read_split(dataset.path, split)]
        assert Counter(example.source for example in examples) == {0: 120, 1: 100}
        assert dataset.report.quarantine[0].screen == "source_limit"
        assert dataset.report.num_quarantined == 180
        kept.append({example.id for example in examples})
    assert kept[0] == kept[1]


def test_source_with_too_large_a_share_is_cut_to_it(tmp_path: Path) -> None:
    sources = [a_file(tmp_path, encoded(*ordinary(num, seed=num)), f"{num}.jsonl") for num in (500, 60, 40)]
    dataset = prepare(sources, tmp_path / "out", choose(Screen.SOURCE_LIMIT, max_source_share=0.5))
    examples = [example for split in Split for example in read_split(dataset.path, split)]
    assert Counter(example.source for example in examples) == {0: 100, 1: 60, 2: 40}


@pytest.mark.parametrize(
    ("counts", "most", "share", "left"),
    [
        ({0: 10, 1: 5}, None, None, {0: 10, 1: 5}),
        ({0: 10, 1: 5}, 6, None, {0: 6, 1: 5}),
        ({0: 90, 1: 10}, None, 0.5, {0: 10, 1: 10}),
        ({0: 100}, None, 0.5, {0: 100}),
        ({0: 100, 1: 100}, None, 0.3, {0: 100, 1: 100}),
        ({0: 1000, 1: 1000, 2: 10, 3: 10}, None, 0.4, {0: 40, 1: 40, 2: 10, 3: 10}),
    ],
)
def test_allowed_rows_meet_the_limits_where_they_can_be_met(
    counts: dict[int, int], most: int | None, share: float | None, left: dict[int, int]
) -> None:
    assert allowed(counts, most, share) == left


def test_template_has_no_more_rows_than_it_may_have(tmp_path: Path) -> None:
    world = World(4)
    rows = [
        a_line(f"Translate sentence {number} into French for me please: {world.text(5, 9)}", world.answer())
        for number in range(50)
    ]
    dataset = prepared(tmp_path, encoded(*rows, *ordinary(50)), choose(Screen.TEMPLATE_LIMIT, max_per_template=30))
    assert Counter(kept["findings"][0]["screen"] for kept in kept_aside(dataset)) == {"template_limit": 20}


def test_near_copies_of_held_out_cases_are_found_and_templates_and_refusals_are_not() -> None:
    cases, copies, fine = overlaps(20, 40)
    overlap = ContaminationCheck(cases)
    assert all(overlap.find(question, answer) for _, question, answer in copies)
    assert not any(overlap.find(question, answer) for _, question, answer in fine)


@pytest.mark.parametrize(
    ("question", "is_found"),
    [
        ("What is 12 + 30 - 7 * 2 for me?", True),
        ("What is 12 + 30 - 7 * 3 for me?", False),
        ("what is the  capital of France", True),
        ("What is the capital of Spain?", False),
        ("Yes, go on.", False),
    ],
)
def test_overlap_minds_numbers_and_short_questions(question: str, is_found: bool) -> None:
    cases = [
        ("What is 12 + 30 - 7 * 2 for me?", "28"),
        ("What is the capital of France?", "Paris"),
        ("Yes, go on.", "Once upon a time."),
    ]
    assert (ContaminationCheck(cases).find(question, "Some answer.") is not None) is is_found


def test_overlapping_row_is_never_trained_whatever_screens_are_chosen(tmp_path: Path) -> None:
    cases, copies, _ = overlaps(23, 10)
    rows = [*ordinary(60), *(a_line(question, answer) for _, question, answer in copies)]
    source = a_file(tmp_path, encoded(*rows))
    dataset = prepare([source], tmp_path / "out", choose(), cases=cases, num_processes=2)
    trained = {example.line for split in (Split.TRAIN, Split.VALIDATION) for example in read_split(dataset.path, split)}
    assert max(trained) <= 60
    [found] = dataset.report.quarantine
    assert found.screen == "evaluation_overlap"
    assert "so it is never trained" in found.first[0].reason
