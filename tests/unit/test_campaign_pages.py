"""`campaign rounds` on narrow and wide terminals: nothing is cut, and every reason is there."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from tunesmith.cli import output
from tunesmith.cli.campaign import show_rounds
from tunesmith.orchestration.rounds.history import Round
from tunesmith.runs.rules.run import RunState

ROUNDS = [
    Round(
        run_id="run-4t9kq2m7x1bz",
        opened_at=datetime.now(UTC) - timedelta(hours=2),
        opened_by="new_data: 128 new experiences (≥ 100)",
        is_automatic=True,
        start="base",
        start_reason="4 rounds since the last one from base, and one in 5 starts there (campaign.refresh_every)",
        half=None,
        method="sft",
        method_reason="",
        learnt_from={"gold": 120, "corrected": 34, "replay": 1846},
        metric="heldout_loss",
        before=1.2345,
        after=0.9876,
        gain=0.2469,
        gpu_hours=1.25,
        money=3.125,
        state=RunState.ROLLED_BACK,
        reason="the watch found 3 looks in a row that failed",
        version="support@v12",
    ),
    Round(
        run_id="run-9xq2m7k41bz3",
        opened_at=datetime.now(UTC) - timedelta(days=3),
        opened_by="user:ada",
        is_automatic=False,
        start="support@v11",
        start_reason="",
        half=None,
        method="orpo",
        method_reason="",
        learnt_from={"train": 61},
        metric="heldout_loss",
        before=None,
        after=None,
        gain=None,
        gpu_hours=0.0123,
        money=0.03075,
        state=RunState.FAILED,
        reason="out of memory",
        version=None,
    ),
]


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_rounds_fit_the_terminal_and_lose_no_word(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.StringIO()
    console = Console(file=sink, width=columns, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(output, "stdout", lambda: console)
    show_rounds(ROUNDS)
    shown = sink.getvalue()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    assert "…" not in shown
    for each in ROUNDS:
        assert shown.count(each.run_id) == 2
        assert each.state in shown
    words = set(shown.split())
    told = " ".join(f"{each.opened_by} {each.start_reason} {each.reason}" for each in ROUNDS)
    wanted = {
        "120",
        "gold,",
        "34",
        "corrected,",
        "1846",
        "replay",
        "(sft)",
        "1.234",
        "0.9876",
        "1.25",
        "3.12",
        "v11",
        "base",
    }
    missing = {word for word in {*told.split(), *wanted} - words if len(word) < 16}  # longer ones are folded at 80
    assert missing == set()
