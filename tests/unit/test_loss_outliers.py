"""Loss outliers: the decision holds for any losses; quarantining makes the dataset that the other rows would make."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.core.errors import DataError, UsageError
from tunesmith.datasets.example import Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.quarantine.outliers import quarantine_examples
from tunesmith.datasets.reading import read_split, summary, verify
from tunesmith.datasets.report import PreparedDataset, PrepareOptions
from tunesmith.evaluation.rules.outliers import LARGEST_SHARE, MIN_EXAMPLES, Fit, find_loss_outliers, why
from tunesmith.profiles.sections.screens import Screen

USUAL = st.floats(0.0, 20.0)
ANY = st.one_of(USUAL, st.floats(0.0, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))
THRESHOLDS = st.floats(1.0, 50.0)


@given(st.lists(ANY, max_size=200), THRESHOLDS)
def test_any_losses_only_the_high_side_within_the_cap_is_called(losses: list[float], threshold: float) -> None:
    verdict = find_loss_outliers(losses, threshold)
    called = [losses[place] for place in verdict.indices]
    assert len(called) <= LARGEST_SHARE * len(losses)
    assert len(set(verdict.indices)) == len(called)
    finite = [loss for loss in called if math.isfinite(loss)]
    assert finite == sorted(finite, reverse=True)
    assert all(math.isfinite(loss) for loss in called[len(called) - len(finite) :])  # behind what is no number
    assert (verdict.fit is Fit.TOO_FEW) == (len(losses) < MIN_EXAMPLES)
    if verdict.fit is not Fit.JUDGED:
        assert not called
        return
    assert verdict.median is not None
    assert verdict.limit is not None
    assert verdict.limit >= verdict.median
    assert all(loss > verdict.limit for loss in finite)
    left = [loss for place, loss in enumerate(losses) if place not in verdict.indices]
    assert all(loss <= verdict.limit for loss in left)  # and so none of them is NaN or infinite


@given(st.integers(95, 150), st.lists(st.floats(20.0, 1e6), max_size=5), st.integers(0, 1 << 30))
def test_planted_losses_all_found_and_nothing_else(num: int, bad: list[float], seed: int) -> None:
    rng = random.Random(seed)
    losses = [*(rng.uniform(1.0, 2.0) for _ in range(num)), *bad]
    rng.shuffle(losses)
    verdict = find_loss_outliers(losses)
    assert verdict.fit is Fit.JUDGED
    assert sorted(losses[place] for place in verdict.indices) == sorted(bad)


@given(st.lists(USUAL, min_size=MIN_EXAMPLES, max_size=120), st.integers(0, 1000), st.floats(1.0, 20.0), THRESHOLDS)
def test_order_does_not_matter_and_a_higher_threshold_calls_fewer(
    losses: list[float], seed: int, more: float, threshold: float
) -> None:
    verdict, mixed = find_loss_outliers(losses, threshold), list(losses)
    random.Random(seed).shuffle(mixed)
    again = find_loss_outliers(mixed, threshold)
    assert (again.fit, again.limit, again.reason) == (verdict.fit, verdict.limit, verdict.reason)
    assert [mixed[place] for place in again.indices] == [losses[place] for place in verdict.indices]
    stricter = find_loss_outliers(losses, threshold + more)
    if verdict.fit is Fit.JUDGED:
        assert stricter.fit is Fit.JUDGED
        assert set(stricter.indices) <= set(verdict.indices)


@given(USUAL, st.integers(MIN_EXAMPLES, 200), st.floats(0.0, 0.59))
def test_losses_that_are_nearly_equal_have_no_outlier(loss: float, num: int, little: float) -> None:
    assert find_loss_outliers([loss] * num).indices == ()
    assert find_loss_outliers([*[loss] * num, loss + little]).indices == ()  # the MAD is 0
    assert find_loss_outliers([*[loss] * num, loss + 0.7]).indices == (num,)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_outlier_by_itself(strange: float) -> None:
    verdict = find_loss_outliers([*[1.0 + n / 100 for n in range(99)], strange])
    assert verdict.indices == (99,)
    assert "no finite number" in why(strange, verdict, 6.0)
    broken = find_loss_outliers([strange] * 100)
    assert (broken.fit, broken.indices, broken.median) == (Fit.DOES_NOT_FIT, (), None)


def test_too_many_say_that_the_dataset_does_not_fit() -> None:
    losses = [*[1.0] * 94, *[9.0] * 6]
    verdict = find_loss_outliers(losses)
    assert (verdict.fit, verdict.indices) == (Fit.DOES_NOT_FIT, ())
    assert "6 of 100" in verdict.reason
    assert find_loss_outliers([1.0] * 95 + [9.0] * 5).indices == tuple(range(95, 100))


@pytest.mark.parametrize("threshold", [0.0, 0.99, -6.0, math.nan, math.inf, 1e9])
def test_a_threshold_without_sense_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="from 1 to 1000"):
        find_loss_outliers([1.0] * 100, threshold)


OPTIONS = PrepareOptions(heldout_share=0.3, validation_share=0.2, few_heldout=25, screens=(Screen.EMAIL,))


def _prepared(folder: Path, rows: list[dict[str, Any]]) -> PreparedDataset:
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare([source], folder, OPTIONS)


def _rows(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question number {n}", "completion": f"Answer to number {n}"} for n in range(num)]


def test_keeping_aside_makes_the_dataset_of_the_other_rows(tmp_path: Path) -> None:
    suspect = {"prompt": "Who knows?", "completion": "Ask maria.garcia@gmail.com for it."}
    whole = _prepared(tmp_path / "whole", [*_rows(80), suspect])
    wanted = {(Split.TRAIN, 0): "first", (Split.TRAIN, 17): "second", (Split.HELDOUT, 3): "third"}
    before = {path.name: path.read_bytes() for path in whole.path.iterdir()}
    made = quarantine_examples(whole.path, tmp_path / "made", wanted, "ds-1")
    assert {path.name: path.read_bytes() for path in whole.path.iterdir()} == before
    lines = {read_split(whole.path, split)[number].line for split, number in wanted}
    rest = _prepared(tmp_path / "rest", [row for line, row in enumerate(_rows(80), start=1) if line not in lines])
    assert made.fingerprint == rest.fingerprint
    verify(made.path, made.fingerprint)
    assert summary(made.path).report == made.report
    for name in ("counts", "lengths", "mean_score"):
        assert getattr(made.report, name) == getattr(rest.report, name)
    kept = [json.loads(line) for line in (made.path / "quarantine.jsonl").read_text().splitlines()]
    assert [row["findings"][0]["screen"] for row in kept] == ["email", *["loss_outlier"] * 3]
    assert [row["findings"][0]["reason"] for row in kept[1:]] == list(wanted.values())
    assert {row["line"] for row in kept[1:]} == lines
    assert (made.path / "quarantine.jsonl").stat().st_mode & 0o077 == 0
    assert [(each.screen, each.num) for each in made.report.quarantine] == [("loss_outlier", 3), ("email", 1)]
    assert made.report.num_quarantined == 4
    assert sum("are held out" in warning for warning in made.report.warnings) == 1
    assert any(f"only {made.counts[Split.HELDOUT]} examples" in warning for warning in made.report.warnings)
    twice = quarantine_examples(made.path, tmp_path / "twice", {(Split.VALIDATION, 0): "fourth"}, "ds-2")
    assert [(each.screen, each.num) for each in twice.report.quarantine] == [("loss_outlier", 4), ("email", 1)]


def test_a_dataset_that_would_have_nothing_left_is_not_made(tmp_path: Path) -> None:
    whole = _prepared(tmp_path / "whole", _rows(20))
    with pytest.raises(DataError, match="no answer to learn would be left in heldout"):
        quarantine_examples(
            whole.path,
            tmp_path / "made",
            {(Split.HELDOUT, number): "all" for number in range(whole.counts[Split.HELDOUT])},
            "ds-1",
        )
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["whole"]
    with pytest.raises(DataError, match="holds 0 of them"):
        quarantine_examples(whole.path, tmp_path / "made", {(Split.TRAIN, 99): "not there"}, "ds-1")
