"""What was live when: no gap, no overlap, and the bare base wherever no version was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tunesmith.models.rules import AdapterState, LiveMove, live_at, live_spans

START = datetime(2026, 11, 17, 12, tzinfo=UTC)
LIVE, SUPERSEDED, ROLLED_BACK = AdapterState.LIVE, AdapterState.SUPERSEDED, AdapterState.ROLLED_BACK


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def move(hours: float, version: int, state: AdapterState, reason: str = "") -> LiveMove:
    return LiveMove(at(hours), f"ad-{version}", version, state, "wk", reason)


def test_versions_follow_each_other_and_the_base_is_before_and_between() -> None:
    spans = live_spans(
        "support",
        [
            move(0, 1, LIVE, "better"),
            move(2, 1, SUPERSEDED), move(2, 2, LIVE),
            move(3, 2, ROLLED_BACK, "worse"), move(3, 1, LIVE),
            move(4, 1, ROLLED_BACK),
            move(9, 3, LIVE),
        ],
    )  # fmt: skip
    assert [(span.version, span.since, span.until, span.ended_as) for span in spans] == [
        ("support@base", None, at(0), None),
        ("support@v1", at(0), at(2), SUPERSEDED),
        ("support@v2", at(2), at(3), ROLLED_BACK),
        ("support@v1", at(3), at(4), ROLLED_BACK),
        ("support@base", at(4), at(9), None),
        ("support@v3", at(9), None, None),
    ]
    assert (spans[1].by, spans[1].reason, spans[2].ended_reason) == ("wk", "better", "worse")
    for hours, version in (
        (-1, "base"),
        (0, "v1"),
        (1.99, "v1"),
        (2, "v2"),
        (3, "v1"),
        (5, "base"),
        (9, "v3"),
        (99, "v3"),
    ):
        assert live_at(spans, at(hours)).version == f"support@{version}", hours


def test_nothing_was_ever_live_but_the_base() -> None:
    (only,) = live_spans("support", [])
    assert (only.version, only.adapter_id, only.since, only.until) == ("support@base", None, None, None)
    assert live_at([only], at(0)) is only


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_spans_leave_no_gap_and_never_overlap(steps: list[tuple[int, bool]]) -> None:
    """Flips and roll-backs in any order, some of them in the same instant."""
    moves, live, hours = list[LiveMove](), None, 0
    for number, (pause, goes_back) in enumerate(steps, start=1):
        hours += pause
        if live is not None:
            moves.append(move(hours, live, ROLLED_BACK if goes_back else SUPERSEDED))
        live = None if goes_back else number
        if live is not None:
            moves.append(move(hours, live, LIVE))
    spans = live_spans("support", moves)
    assert spans[0].since is None or spans[0].since == at(0)
    assert spans[-1].until is None
    assert spans[-1].version == ("support@base" if live is None else f"support@v{live}")
    for one, other in pairwise(spans):
        assert one.until == other.since
    for instant in range(-1, hours + 2):
        assert live_at(spans, at(instant)) in spans
