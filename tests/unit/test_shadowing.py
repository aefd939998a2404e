"""What mirrored answers say about a candidate: nothing observed never suffices, and doubt waits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.deployment.rules.shadow import Shadowed, is_mirrored, judge
from tunesmith.experience.rules.shadow import Observed, ShadowOutcome
from tunesmith.profiles.sections.shadow import ShadowSettings

POLICY = ShadowSettings(enabled=True, min_count=20, min_s=60.0, max_s=600.0, max_failures=0.1, max_drop=0.1)


def seen(
    *, good: int = 0, bad: int = 0, both_bad: int = 0, failed: int = 0, timed_out: int = 0, mirroring_s: float = 60.0,
    waiting_s: float = 60.0,
) -> Shadowed:  # fmt: skip
    observed = (
        [Observed(ShadowOutcome.ANSWERED, False, False)] * good
        + [Observed(ShadowOutcome.ANSWERED, True, False)] * bad
        + [Observed(ShadowOutcome.ANSWERED, True, True)] * both_bad
        + [Observed(ShadowOutcome.FAILED, False, False)] * failed
        + [Observed(ShadowOutcome.TIMED_OUT, False, False)] * timed_out
    )
    return Shadowed(observed, mirroring_s, waiting_s)


@pytest.mark.parametrize(
    ("shadow", "decision"),
    [
        (seen(), "again"),
        (seen(mirroring_s=1e9, waiting_s=1e9), "failed"),  # nothing came within max_s
        (seen(good=19), "again"),
        (seen(good=19, waiting_s=600.0), "failed"),
        (seen(good=1000, mirroring_s=59.0), "again"),  # many answers in no time
        (seen(good=20), "passed"),
        (seen(good=20, waiting_s=1e9), "passed"),  # late, but enough
        (seen(good=18, failed=2), "passed"),
        (seen(good=17, failed=3), "failed"),
        (seen(good=17, failed=1, timed_out=2), "failed"),
        (seen(failed=20), "failed"),
        (seen(good=10, bad=10), "failed"),
        (seen(good=0, both_bad=20), "passed"),  # no worse than what is live
        (seen(good=18, bad=2), "again"),  # a drop of 10 % ± …
        (seen(good=18, bad=2, waiting_s=600.0), "failed"),
        (seen(good=990, bad=10), "passed"),
    ],
)
def test_candidate_is_judged_by_count_time_failures_and_flags(shadow: Shadowed, decision: str) -> None:
    verdict = judge(shadow, POLICY, seed=1)
    assert verdict.decision == decision
    assert verdict.reason


def test_no_observation_suffices_though_every_limit_is_open() -> None:
    open_wide = ShadowSettings(enabled=True, min_count=1, min_s=0.0, max_s=1.0, max_failures=1.0, max_drop=1.0)
    assert judge(seen(mirroring_s=0.0, waiting_s=0.5), open_wide, 1).decision == "again"
    assert judge(seen(mirroring_s=0.0, waiting_s=1.0), open_wide, 1).decision == "failed"
    assert judge(seen(failed=5), open_wide, 1).decision == "failed"
    assert judge(seen(good=1), open_wide, 1).decision == "passed"


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0, 1000),
    st.floats(0, 1000),
    st.integers(0, 9),
)
def test_only_enough_and_long_enough_ever_passes(
    good: int, bad: int, failed: int, mirroring_s: float, waiting_s: float, seed: int
) -> None:
    shadow = seen(good=good, bad=bad, failed=failed, mirroring_s=mirroring_s, waiting_s=waiting_s)
    verdict = judge(shadow, POLICY, seed)
    num = good + bad + failed
    if verdict.decision == "passed":
        assert num >= POLICY.min_count
        assert mirroring_s >= POLICY.min_s
        assert failed <= POLICY.max_failures * num
        assert bad <= POLICY.max_drop * (good + bad)
    if verdict.decision == "again":
        assert waiting_s < POLICY.max_s


def test_request_is_mirrored_by_its_id_alone() -> None:
    ids = [f"chatcmpl-{number}" for number in range(2000)]
    chosen = [each for each in ids if is_mirrored(each, 0.25)]
    assert 400 < len(chosen) < 600
    assert chosen == [each for each in ids if is_mirrored(each, 0.25)]
    assert set(chosen) <= {each for each in ids if is_mirrored(each, 0.5)}
    assert all(is_mirrored(each, 1.0) for each in ids)
    assert not any(is_mirrored(each, 0.0) for each in ids)
