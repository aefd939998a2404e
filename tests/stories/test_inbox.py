"""The inbox holds failed runs until somebody tries them again, each with the line that says what went wrong."""

from __future__ import annotations

import pytest

from support.fleet import MakeFleet
from support.workspaces import cli
from tunesmith.client.inbox import telling_line

SEGFAULT = """the program ended by signal 11
loading the model
Fatal Python error: Segmentation fault

Current thread 0x00007f0a4c1f5740 (most recent call first):
  File "/app/trainer.py", line 3 in train
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main

Extension modules: numpy.core._multiarray_umath, yaml._yaml (total: 2)"""


def test_telling_line_is_the_error_and_no_frame_of_its_stack() -> None:
    assert telling_line(SEGFAULT) == "Fatal Python error: Segmentation fault"
    raised = 'failed\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\nValueError: no rows\n'
    assert telling_line(raised) == "ValueError: no rows"
    hung = 'no progress for 5 s in phase train\nCurrent thread 0x01 (most recent call first):\n  File "x.py", line 1'
    assert telling_line(hung) == "no progress for 5 s in phase train"
    assert telling_line("") == ""


def test_failed_run_waits_in_the_inbox_until_it_is_tried_again(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"script": "fail", "error_class": "data"})
    run_id = fleet.submit()
    fleet.work()
    [item] = fleet.client.system.inbox()
    assert (item.kind, item.id) == ("failed run", run_id)
    assert item.error.endswith("scripted failure at step 3")
    shown = cli("inbox", cwd=fleet.root).out
    assert f"run retry {run_id}" in shown
    assert "scripted failure at step 3" in shown
    again = fleet.client.runs.retry(run_id, overrides=("trainer.options.script=finish",)).id
    assert fleet.client.system.inbox() == []
    fleet.work()
    assert fleet.state(again) == "deployed"


@pytest.mark.real_programs  # the end of its log is read, and a forked one has a deep stack
def test_crashing_run_is_one_item_with_the_error_of_its_program(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(options={"script": "crash"}, profile={"budgets": {"wall_s": 60.0}})
    run_id = fleet.submit()
    fleet.work()
    [item] = fleet.client.system.inbox()
    assert (item.kind, item.id, item.error) == ("parked run", run_id, "Fatal Python error: Segmentation fault")
    assert "runpy" not in cli("inbox", cwd=fleet.root).out
