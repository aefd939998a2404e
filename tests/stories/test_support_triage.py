"""The example application, shortened: people use the desk, rounds open by themselves, and it routes better than before.

Twelve days of it, with kills of everything, are the drill in tests/faults/test_left_alone.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from support.left_alone import EXAMPLE, TINY, LeftAlone, desk, merged, the_fixed_set
from support.left_alone_checks import acknowledged_is_there, burnt, fixed_requests_were_never_learnt
from support.left_alone_table import rounds_table
from support.native import quick_base
from support.real_base import PackageUnavailable, cached_smollm2, default_cache

SHORT = merged(
    TINY,
    {
        "recipe": {"lr": 3e-3, "epochs": 8},
        "campaign": {"triggers": {"new_data": {"count": 30}}},
        "experience": {"mix": {"gold": 0.25, "corrected": 0.25, "replay": 0.5, "min_new": 15, "min_eval_examples": 5}},
        "gate": {"min_cases": 5},
    },
)


def test_example_is_under_150_lines_of_python() -> None:
    assert sum(len(path.read_text().splitlines()) for path in EXAMPLE.glob("*.py")) < 150


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LeftAlone]:
    made = LeftAlone(tmp_path / "ws", quick_base(), settings=SHORT, fixed=the_fixed_set(4)[:8])
    yield made
    made.kill_all()


@pytest.mark.slow
def test_desk_left_alone_for_two_days_opens_two_rounds_and_routes_better(app: LeftAlone) -> None:
    """Real training of a tiny base; the fixed requests are about the two queues that come up."""
    for day in range(2):
        _, num_failed = app.a_day(day, 48)
        assert num_failed == 0
        app.wait_for_rounds(day + 1, 120.0)
    version, quality = app.quality()
    assert app.start == ("triage@base", 0.0)
    assert version != "triage@base"
    assert quality >= 0.25, app.answers
    assert app.measure("triage@v1") > 0.0, "a version that was replaced can still be asked"
    assert burnt(app) == {}
    acknowledged_is_there(app)
    fixed_requests_were_never_learnt(app)
    a_person_asks_and_corrects_on_the_page(app)
    assert app.close() == [], "nothing is left running"


def a_person_asks_and_corrects_on_the_page(app: LeftAlone) -> None:
    page = type("Page", (desk.Page,), {"desk": app.desk, "tickets": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.server_port}", follow_redirects=True) as browser:
        shown = browser.post("/", data={"message": "<b>the lamp</b> hums, please refund it."}).text
        assert "&lt;b&gt;the lamp&lt;/b&gt; hums" in shown
        assert "by triage@v" in shown
        [ticket_id] = re.findall(r'name=id value="([^"]+)"', shown)
        left = browser.post("/", data={"id": ticket_id, "label": "repair/normal"}).text
        assert "hums" not in left, "it is settled"
    server.shutdown()
    server.server_close()
    assert app.desk.corrections[ticket_id] == "repair/normal"
    acknowledged_is_there(app)


@pytest.mark.extra
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_days", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_days_on_a_real_base_as_the_readme_says(tmp_path: Path, num_days: int) -> None:
    """The example's own settings, its own script for the people, real processes."""
    try:
        base = cached_smollm2(default_cache())
    except PackageUnavailable as error:
        pytest.skip(error.message)
    app = LeftAlone(tmp_path / "ws", base, settings={}, fixed=the_fixed_set(4), real=True)
    try:
        words = [sys.executable, str(EXAMPLE / "users.py"), str(num_days), app.url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=2700, check=False)
        assert done.returncode == 0, done.stderr
        days = [
            (int(right), int(failed)) for right, failed in re.findall(r"(\d+) of 60 right, (\d+) failed", done.stdout)
        ]
        rounds = app.wait_for_rounds(num_days, 600.0)
        version, quality = app.quality()
        for each in rounds:
            if each.state == "deployed" and each.version is not None:
                app.measure(each.version)
        told = f"{done.stdout}\n{rounds_table(app, rounds, [])}\n"
        print(told)
        if "LEFT_ALONE_OUT" in os.environ:
            (Path(os.environ["LEFT_ALONE_OUT"]) / "left_alone_real.md").write_text(told)
        assert quality > app.start[1], f"{version}: {quality}, and the start was {app.start}"
        assert [failed for _, failed in days] == [0] * num_days
        assert num_days == 1 or days[-1][0] > days[0][0]
        assert burnt(app) == {}
        assert app.close() == []
    finally:
        app.kill_all()
