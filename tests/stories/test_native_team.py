"""Several processes: the same training as one, resumed with as many, refused with another number, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_program,
    a_recipe,
    a_train_spec,
    losses_of,
    pair_rows,
    resume_from,
    train_here,
    weights_of,
)
from tunesmith.core.errors import DataError
from tunesmith.profiles.base_model import ADAPTER_WEIGHTS
from tunesmith.profiles.profile import Budgets, Checkpoints, Method
from tunesmith.programs.host import ProgramFailure
from tunesmith.programs.protocol import ResultStatus
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec
from tunesmith.training.trainers.native.train import train

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("team") / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("team") / "pairs", pair_rows(80), validation_share=0.1)


def a_spec(base: BaseModelRef, data: DatasetRef, method: Method, num_processes: int, **changes: Any) -> TrainSpec:
    recipe = {"method": method, "batch_tokens": 600, "micro_batch_tokens": 150, "max_steps": 6, "epochs": 50.0}
    return a_train_spec(
        base,
        data,
        method=method,
        num_processes=num_processes,
        recipe=a_recipe(**(recipe | {"lora_dropout": 0.0} | changes.pop("recipe", {}))),
        **({"checkpoints": Checkpoints(every_steps=1, keep=100)} | changes),
    )


@pytest.mark.parametrize("method", [Method.SFT, Method.KTO])
def test_two_processes_follow_the_losses_of_one(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path, method: Method
) -> None:
    from safetensors.torch import load_file

    for num in (1, 2):
        result = train_here(a_spec(base, data, method, num), tmp_path / str(num))
        assert result.status is ResultStatus.SUCCEEDED
    assert losses_of(tmp_path / "2") == pytest.approx(losses_of(tmp_path / "1"), rel=1e-5)
    one, two = (load_file(tmp_path / num / "artifact" / ADAPTER_WEIGHTS) for num in ("1", "2"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5
    assert list(tmp_path.glob("*/.team*")) == []


def test_team_resumed_equals_never_stopped_and_another_size_is_refused(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    spec = a_spec(base, data, Method.DPO, 2, recipe={"lora_dropout": 0.1})
    train_here(spec, tmp_path / "straight")
    source = resume_from(tmp_path / "straight", 3)
    train_here(spec.model_copy(update={"resume": source}), tmp_path / "resumed")
    steps = losses_of(tmp_path / "straight")
    assert losses_of(tmp_path / "resumed") == {step: loss for step, loss in steps.items() if step > 3}
    assert weights_of(tmp_path / "resumed") == weights_of(tmp_path / "straight")
    alone = spec.model_copy(update={"resume": source, "run": spec.run.model_copy(update={"num_processes": 1})})
    with pytest.raises(DataError, match="world_size is 1 now and was 2 there"):
        train_here(alone, tmp_path / "alone")


def test_a_process_of_the_team_that_dies_ends_the_training(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    spec = a_spec(base, data, Method.SFT, 2, recipe={"max_steps": 100_000, "epochs": 1000.0})
    folder = tmp_path / "out"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tunesmith.runs.spec import TrainSpec\n"
        "from support.native import train_here\n"
        "train_here(TrainSpec.model_validate_json(sys.stdin.read()), Path(sys.argv[2]))\n"
    )
    argv = [sys.executable, "-c", script, str(Path(__file__).parents[1]), str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as leader:
        assert leader.stdin is not None
        leader.stdin.write(spec.model_dump_json())
        leader.stdin.close()
        wait_for_steps(folder, leader)
        [follower] = children_of(leader.pid)
        os.kill(follower, signal.SIGKILL)
        assert leader.wait(60) != 0
    assert not (folder / "artifact").exists()
    assert not Path(f"/proc/{follower}").exists()


def test_leader_that_fails_or_is_told_to_end_early_leaves_no_process_behind(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    """The others are waiting inside a sum by then: nobody may wait for them."""
    before = set(children_of(os.getpid()))
    spec = a_spec(base, data, Method.DPO, 2)
    program = a_program(spec, tmp_path / "ended")
    program.terminating = True  # as TERM leaves it; noticed while the reference is asked
    assert train(program).status is ResultStatus.INTERRUPTED
    poor = spec.model_copy(update={"run": spec.run.model_copy(update={"budgets": Budgets(tokens=1)})})
    with pytest.raises(ProgramFailure, match="raise the budget"):
        train_here(poor, tmp_path / "poor")
    assert set(children_of(os.getpid())) <= before


def wait_for_steps(folder: Path, leader: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "events.jsonl").exists() or len(losses_of(folder)) < 3:
        assert leader.poll() is None, leader.stderr.read() if leader.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
