"""Replay: the verdict under another policy with the checks that made it another one, or why nobody can know."""

from __future__ import annotations

import pytest

from tunesmith.evaluation.rules.comparison import Comparison, Report
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.evaluation.rules.replay import replay, why_not_replayable
from tunesmith.profiles.sections.evaluation import GateSettings

LOSS, MATCH = "heldout_loss", "exact_match_greedy"
OLD = GateSettings(min_cases=50)


def measured(metric: str = LOSS, gain: float = 0.03) -> Comparison:
    return Comparison(
        metric=metric, better="higher", n=100, baseline=0.5, candidate=0.5 + gain, difference=gain,
        low=gain - 0.01, high=gain + 0.01,
    )  # fmt: skip


def a_report(*comparisons: Comparison, established: Comparison | None = None) -> Report:
    return Report(num_cases=100, confidence=0.95, comparisons=comparisons or (measured(),), established=established)


@pytest.mark.parametrize(
    ("changes", "decision", "changed"),
    [
        ({}, Decision.PROMOTE, ()),
        ({"min_gain": 0.05}, Decision.REJECT, ("heldout_loss gain is 0.03, needs ≥ 0.05 (then ≥ 0.01)",)),
        (
            {"min_cases": 200},
            Decision.HOLD,
            (
                "held-out cases is 100, needs ≥ 200 (then ≥ 50)",
                "heldout_loss scored cases is 100, needs ≥ 200 (then ≥ 50)",
            ),
        ),
        (
            {"floors": {LOSS: 0.9}},
            Decision.REJECT,
            ("heldout_loss floor is 0.53, needs ≥ 0.9 (not asked then)",),
        ),
    ],
)
def test_policy_decides_and_says_which_check_did_it(
    changes: dict[str, object], decision: Decision, changed: tuple[str, ...]
) -> None:
    new = GateSettings.model_validate({"min_cases": 50, **changes})
    made = replay(a_report(), OLD, new, (LOSS,))
    assert (made.decision, made.changed) == (decision, changed)


def test_policy_that_holds_ties_says_so() -> None:
    tie = a_report(measured(gain=0.0))
    made = replay(tie, OLD, GateSettings(min_cases=50, on_tie="hold"), (LOSS,))
    assert (made.decision, made.changed) == (Decision.HOLD, ("gate.on_tie is hold (then reject)",))


@pytest.mark.parametrize(
    ("report", "policy", "why"),
    [
        (a_report(), {"primary": MATCH}, "exact_match_greedy was not measured"),
        (a_report(), {"floors": {MATCH: 0.5}}, "exact_match_greedy was not measured"),
        (a_report(), {"confidence": 0.9}, "95% confidence; gate.confidence 0.9"),
        (a_report(), {"confidence": 0.99}, "must be measured again"),
        (a_report(measured(), measured(MATCH), established=measured()), {"primary": MATCH}, "only heldout_loss was"),
    ],
)
def test_numbers_that_cannot_answer_are_told(report: Report, policy: dict[str, object], why: str) -> None:
    told = why_not_replayable(report, GateSettings.model_validate(policy))
    assert told is not None
    assert why in told
    assert why_not_replayable(report, OLD) is None
