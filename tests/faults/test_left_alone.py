"""The unattended drill: the example is left alone with simulated people, and something is killed every few seconds.

    pytest -m soak tests/faults/test_left_alone.py            # the whole drill, on both databases
    LEFT_ALONE_DAYS=3 LEFT_ALONE_SEED=7 pytest -m soak …      # shorter, or in another order

The table of the rounds is printed, and written to the folder that LEFT_ALONE_OUT names.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from support.databases import Postgres
from support.left_alone import LeftAlone, the_fixed_set
from support.left_alone_checks import (
    check_all,
    failures_are_within_what_is_stated,
    fixed_requests_were_never_learnt,
)
from support.left_alone_faults import Faults
from support.left_alone_table import rounds_table, summary
from support.native import quick_base
from support.places import roomy_folder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
NUM_DAYS = int(os.environ.get("LEFT_ALONE_DAYS", "12"))
SEED = int(os.environ.get("LEFT_ALONE_SEED", "1"))
NUM_REQUESTS = 90
_ROUND_S = 240.0


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_loop_left_alone_gets_better_whatever_is_killed(kind: str, request: pytest.FixtureRequest) -> None:
    postgres: Postgres | None = request.getfixturevalue("postgres") if kind == "postgres" else None
    store = None if postgres is None else request.getfixturevalue("postgres_url")
    root = Path(tempfile.mkdtemp(prefix="left-alone-", dir=roomy_folder())) / "ws"
    app = LeftAlone(root, quick_base(), store=store, fixed=the_fixed_set(4))
    faults = Faults(app, SEED, postgres)
    try:
        use_it_for_days(app, faults)
    except BaseException:
        print(f"the workspace is left at {root}; faults: {faults.done}")
        faults.halt()
        app.kill_all()
        raise


def use_it_for_days(app: LeftAlone, faults: Faults) -> None:
    begun = time.monotonic()
    days = []
    faults.start()
    for day in range(NUM_DAYS):
        days.append(app.a_day(day, NUM_REQUESTS))
        app.wait_for_rounds(day + 1, _ROUND_S, faults.raise_problem)
    faults.end()
    rounds = app.wait_for_rounds(NUM_DAYS, _ROUND_S)
    check_all(app)
    fixed_requests_were_never_learnt(app)
    failures_are_within_what_is_stated(app)
    version, quality = app.quality()
    table = rounds_table(app, rounds, faults.done)
    told = summary(app, rounds, faults.done, days, time.monotonic() - begun)
    out = Path(os.environ.get("LEFT_ALONE_OUT", str(app.root)))
    print("", table, told, sep="\n\n")
    (out / f"left_alone_{'sqlite' if faults.postgres is None else 'postgres'}.md").write_text(f"{table}\n\n{told}\n")
    kinds = Counter(fault.kind for fault in faults.done)
    assert len(rounds) >= NUM_DAYS
    assert quality > app.start[1], f"{version}: {quality}, and the start was {app.start}"
    assert NUM_DAYS < 10 or set(kinds) == {"worker", "trainer", "server", "engine", "store"}, kinds
    assert app.close() == [], "nothing is left running"
