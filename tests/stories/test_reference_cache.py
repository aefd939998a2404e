"""Reference log-probabilities are computed once: resumed and later trainings take them from the cache, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fleet import MakeFleet
from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_program,
    a_recipe,
    a_train_spec,
    events_of,
    losses_of,
    pair_rows,
    resume_from,
    train_here,
    weights_of,
)
from tunesmith.profiles.profile import Checkpoints, Method, Validation
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.protocol import Log, Progress, ResultStatus
from tunesmith.runs.spec import BaseModelRef, DatasetRef, TrainSpec
from tunesmith.training.trainers.native.train import train

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

COMPUTED, TAKEN, REFUSED = "computed in", "taken from the cache", "are computed again"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModelRef:
    return a_base_ref(a_micro_base(tmp_path_factory.mktemp("references") / "base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("references") / "pairs", pair_rows(60), validation_share=0.2)


def a_spec(
    base: BaseModelRef, data: DatasetRef, folder: Path, method: Method = Method.DPO, **changes: Any
) -> TrainSpec:
    recipe = {"method": method, "lora_dropout": 0.1, "max_steps": 4, "epochs": 50.0, "micro_batch_tokens": 150}
    often = {"checkpoints": Checkpoints(every_steps=1, keep=100), "validation": Validation(every_steps=2)}
    recipe |= changes.pop("recipe", {})
    spec = a_train_spec(base, data, method=method, recipe=a_recipe(**recipe), **(often | changes))
    return spec.model_copy(update={"cache_dir": str(folder / "cache")})


def said(folder: Path) -> str:
    """What was logged about references."""
    logs = [event.message for event in events_of(folder) if isinstance(event, Log)]
    return "\n".join(message for message in logs if "reference log-probabilities" in message)


def asked(folder: Path) -> int:
    """How many items the model was asked about."""
    events = [event for event in events_of(folder) if isinstance(event, Progress)]
    return max((event.done for event in events if event.unit == "reference"), default=0)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "references").glob("*"))


@pytest.mark.parametrize("method", [Method.DPO, Method.KTO])
def test_resumed_and_second_run_take_the_reference_from_the_cache(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path, method: Method
) -> None:
    spec = a_spec(base, data, tmp_path, method)
    train_here(spec, tmp_path / "first")
    assert COMPUTED in said(tmp_path / "first")
    assert asked(tmp_path / "first") > 20
    steps = losses_of(tmp_path / "first")

    train_here(spec.model_copy(update={"resume": resume_from(tmp_path / "first", 2)}), tmp_path / "resumed")
    assert losses_of(tmp_path / "resumed") == {step: loss for step, loss in steps.items() if step > 2}

    train_here(a_spec(base, data, tmp_path, method, run_id="run-2"), tmp_path / "second")
    assert losses_of(tmp_path / "second") == steps
    for name in ("resumed", "second"):
        assert TAKEN in said(tmp_path / name)
        assert asked(tmp_path / name) == 0
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "first")
    assert len(kept(tmp_path)) == 1


def test_run_on_other_data_or_from_an_unkept_start_computes_its_own(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    train_here(a_spec(base, data, tmp_path), tmp_path / "first")
    other = a_dataset(tmp_path / "other", pair_rows(50), validation_share=0.2)
    train_here(a_spec(base, other, tmp_path), tmp_path / "second")
    nowhere = a_spec(base, data, tmp_path).model_copy(update={"cache_dir": None})
    train_here(nowhere, tmp_path / "third")
    assert COMPUTED in said(tmp_path / "second")
    assert said(tmp_path / "third") == ""
    assert asked(tmp_path / "third") == asked(tmp_path / "first") > asked(tmp_path / "second") > 0
    assert len(kept(tmp_path)) == 2


def test_damaged_file_is_not_used_and_is_written_again(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    spec = a_spec(base, data, tmp_path)
    train_here(spec, tmp_path / "first")
    [path] = kept(tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-3] + b"\x00\x00\x00")
    train_here(spec, tmp_path / "second")
    assert REFUSED in said(tmp_path / "second")
    assert COMPUTED in said(tmp_path / "second")
    assert losses_of(tmp_path / "second") == losses_of(tmp_path / "first")
    assert kept(tmp_path) == [path]
    assert path.read_bytes() == good


def test_folder_that_cannot_be_written_costs_the_training_nothing(
    base: BaseModelRef, data: DatasetRef, tmp_path: Path
) -> None:
    spec = a_spec(base, data, tmp_path)
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert train_here(spec, tmp_path / "out").status is ResultStatus.SUCCEEDED
    assert "could not be cached" in said(tmp_path / "out")


def test_training_told_to_end_while_it_asks_keeps_nothing(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    program = a_program(a_spec(base, data, tmp_path), tmp_path / "out")
    program.terminating = True
    assert train(program).status is ResultStatus.INTERRUPTED
    assert kept(tmp_path) == []


def test_team_of_two_takes_the_same_way_together(base: BaseModelRef, data: DatasetRef, tmp_path: Path) -> None:
    spec = a_spec(base, data, tmp_path, Method.KTO, num_processes=2, recipe={"max_steps": 2})
    train_here(spec, tmp_path / "first")
    train_here(spec, tmp_path / "second")
    assert COMPUTED in said(tmp_path / "first")
    assert TAKEN in said(tmp_path / "second")
    assert losses_of(tmp_path / "second") == losses_of(tmp_path / "first")
    assert weights_of(tmp_path / "second") == weights_of(tmp_path / "first")
    assert len(kept(tmp_path)) == 1


def test_worker_keeps_references_in_its_workspace_for_the_next_training(make_fleet: MakeFleet, tmp_path: Path) -> None:
    recipe = {"method": "dpo", "max_steps": 2, "max_length": 256, "micro_batch_tokens": 1024}
    fleet = make_fleet(trainer="native", profile={"recipe": recipe, "validation": {"every_steps": 1000}})
    a_micro_base(fleet.root / "models" / "tiny")
    source = fleet.root / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(60)))
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    run_id = fleet.client.runs.submit("support", source).id
    fleet.work("train", timeout_s=90)
    first = fleet.folder(run_id, fleet.attempts(run_id)[0])
    assert COMPUTED in said(first), fleet.logs()
    assert len(list((fleet.client.workspace.cache_dir / "references").iterdir())) == 1
    train_here(TrainSpec.model_validate_json((first / "spec.json").read_bytes()), tmp_path / "second")
    assert TAKEN in said(tmp_path / "second")
    assert losses_of(tmp_path / "second") == losses_of(first)
