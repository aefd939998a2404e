"""One contract for every registered trainer: what it declares, says, how it ends, and that it resumes exactly."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.programs import World, finish, strays, wait_until
from tunesmith.core.errors import NotFound
from tunesmith.core.files import verify_folder
from tunesmith.profiles.profile import Method
from tunesmith.programs.launch import RunningProgram, tail_of_log
from tunesmith.programs.protocol import Ack, CheckpointEvent, Finished, Metrics, Progress, Started, ValidationEvent
from tunesmith.programs.result_check import check_train_result
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import ResumeSource, TrainSpec
from tunesmith.training.trainers.base import TrainerInfo
from tunesmith.training.trainers.registry import TRAINERS, find_trainer

BY_HAND = "command by hand"
COMMANDS = {"command": "examples/command_trainer.py", BY_HAND: "examples/trainer_without_tunesmith.py"}
"""The command trainer goes through the contract twice: with a program on our library, and with one without it."""
NEEDS = {"native": ("torch", "train"), "trl": ("trl", "trl")}
"""Those that load a model: the package they need, and the extra that brings it."""
ONLY_ON_GPU = {"unsloth"}
RUNNABLE = sorted({*TRAINERS, BY_HAND} - ONLY_ON_GPU)
TRAINING = sorted(set(RUNNABLE) - {"dry-run"})


def runnable(names: list[str]) -> list[Any]:
    """Cases of one trainer run in one process of the suite, because they share a finished training."""
    return [pytest.param(name, marks=[*_marks(name), pytest.mark.xdist_group(f"trainer-{name}")]) for name in names]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    package, extra = NEEDS.get(name, ("json", ""))
    is_missing = importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(is_missing, reason=f"{package} is not installed: pip install 'tunesmith[{extra}]'")
    return [skip, pytest.mark.extra] if name == "trl" else [skip]  # its import alone takes seconds a program


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, World]]:
    """One for those that load a model, made when it is needed, one for those that do not."""
    made: dict[bool, World] = {}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture
def world(worlds: dict[bool, World], name: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    needs_model = name in NEEDS
    if needs_model not in worlds:
        worlds[needs_model] = World(tmp_path_factory.mktemp("contract"), needs_model=needs_model)
    return worlds[needs_model]


def a_spec(world: World, name: str, *, steps: int = 6, **changes: Any) -> TrainSpec:
    """A training of so many steps, said in each trainer's own way."""
    if name == "sim":
        changes |= {"options": {"steps": steps, "step_s": 0.02}}
    elif name in COMMANDS:
        changes |= {"options": {"argv": ["python", COMMANDS[name]]}}
    recipe = world.run_spec().recipe.model_copy(update={"max_steps": steps, "epochs": 1000.0})
    return world.train_spec("command" if name == BY_HAND else name, **{"recipe": recipe, **changes})


@dataclass(frozen=True)
class Finished12:
    """A training of twelve steps that nothing disturbed."""

    spec: TrainSpec
    folder: Path
    events: list[Any]
    outcome: AttemptState


@pytest.fixture(scope="module")
def finished(worlds: dict[bool, World]) -> dict[str, Finished12]:
    """Made once for each trainer: a program that loads a model takes seconds to start."""
    return {}


@pytest.fixture
def whole(finished: dict[str, Finished12], world: World, name: str) -> Finished12:
    if name not in finished:
        spec = a_spec(world, name, steps=12)
        running = world.launch(spec)
        outcome = judged(world, spec, running)
        finished[name] = Finished12(spec, world.folder(spec), all_events(running), outcome)
    return finished[name]


def judged(world: World, spec: TrainSpec, running: RunningProgram) -> AttemptState:
    code = finish(running, 120.0)
    judgement = check_train_result(spec, world.folder(spec), code)
    assert judgement.outcome is not AttemptState.FAILED, f"{judgement.error}\n{tail_of_log(world.folder(spec))}"
    assert strays(spec.attempt.attempt_id) == []
    return judgement.outcome


def all_events(running: RunningProgram) -> list[Any]:
    events: list[Any] = []
    while batch := running.events():
        events += batch
    return events


def wait_for_step(running: RunningProgram, step: int) -> None:
    def reached() -> bool:
        assert running.poll() is None, tail_of_log(running.directory)
        running.keepalive()
        return any(isinstance(event, Metrics) and event.step >= step for event in running.events())

    wait_until(reached, 120.0)


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_declares_itself(name: str) -> None:
    info = TRAINERS[name]
    assert info.name == name
    assert info.default_tier in info.tiers
    assert info.methods
    assert Method.AUTO not in info.methods  # it is resolved before a trainer sees it
    assert info.description
    if name == "command":
        assert (info.argv, info.module, info.takes_options) == ((), None, True)
        return
    assert info.argv[0] == "python"
    assert info.module is not None
    assert importlib.util.find_spec(info.module) is not None


def test_trainer_unknown_name_lists_the_nearest() -> None:
    assert isinstance(find_trainer("native"), TrainerInfo)
    with pytest.raises(NotFound, match="did you mean 'native'"):
        find_trainer("natve")


@pytest.mark.parametrize("name", runnable(RUNNABLE))
def test_trainer_finishes_and_is_believed(whole: Finished12, name: str) -> None:
    assert whole.outcome is AttemptState.SUCCEEDED
    assert isinstance(whole.events[0], Started)
    assert isinstance(whole.events[-1], Finished)
    assert [event.seq for event in whole.events] == list(range(1, len(whole.events) + 1))
    assert any(isinstance(event, Progress) for event in whole.events)
    assert list(whole.folder.glob(".staged*")) == []


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_tells_steps_validations_and_checkpoints(whole: Finished12, name: str) -> None:
    told = [event for event in whole.events if isinstance(event, Metrics)]
    assert [event.step for event in told] == list(range(1, 13))
    assert all({"loss", "grad_norm", "lr"} <= set(event.values) for event in told)
    validated = [event for event in whole.events if isinstance(event, ValidationEvent)]
    assert {2, 4, 6, 8, 10, 12} <= {event.step for event in validated}
    assert all(whole.spec.run.validation.best_metric in event.values for event in validated)
    last = [event for event in whole.events if isinstance(event, CheckpointEvent) and "last" in event.kinds][-1]
    manifest = verify_folder(whole.folder / "checkpoints" / last.path, last.digest)
    assert "adapter/adapter_model.safetensors" in manifest.files
    assert "adapter/adapter_config.json" in manifest.files


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_publishes_nothing_that_could_run_code(whole: Finished12, name: str) -> None:
    found = [path for folder in ("checkpoints", "artifact") for path in (whole.folder / folder).rglob("*.*")]
    kinds = {path.suffix for path in found if path.is_file()}
    assert kinds <= {".safetensors", ".json", ".jinja"}


def test_dry_run_trains_nothing_and_writes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in [*world.base.rglob("*"), *world.dataset.path.rglob("*")]}
    spec = world.train_spec("dry-run")
    assert world.run(spec) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (world.folder(spec) / "artifact").exists()
    assert not (world.folder(spec) / "checkpoints").exists()
    assert json.loads((world.folder(spec) / "result.json").read_bytes())["metrics"]["num_train"] > 0


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_term_then_resume_equals_never_stopping(world: World, whole: Finished12, name: str) -> None:
    first = a_spec(world, name, steps=12, run_id=whole.spec.run.run_id)
    running = world.launch(first)
    wait_for_step(running, 3)
    running.terminate()
    assert judged(world, first, running) is AttemptState.INTERRUPTED
    saved = [event for event in all_events(running) if isinstance(event, CheckpointEvent)][-1]
    assert 3 <= saved.step < 12
    source = ResumeSource(
        path=str(world.folder(first) / "checkpoints" / saved.path), digest=saved.digest, step=saved.step
    )
    second = a_spec(world, name, steps=12, run_id=whole.spec.run.run_id, resume=source, number=2)
    again = world.launch(second)
    assert judged(world, second, again) is AttemptState.SUCCEEDED
    losses = losses_of(all_events(again))
    assert list(losses) == list(range(saved.step + 1, 13))
    assert losses.items() <= losses_of(whole.events).items()  # to the bit
    assert artifact_digest(world.folder(second)) == artifact_digest(whole.folder)


def losses_of(events: list[Any]) -> dict[int, float]:
    return {event.step: event.values["loss"] for event in events if isinstance(event, Metrics)}


def artifact_digest(folder: Path) -> str:
    return verify_folder(folder / "artifact").digest


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_resume_from_a_damaged_checkpoint_is_refused(
    world: World, whole: Finished12, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "step-12"
    shutil.copytree(whole.folder / "checkpoints" / "step-12", folder)
    digest = verify_folder(folder).digest
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    source = ResumeSource(path=str(folder), digest=digest, step=12)
    second = a_spec(world, name, steps=12, run_id=whole.spec.run.run_id, resume=source, number=2)
    code = world.run(second)
    judgement = check_train_result(second, world.folder(second), code)
    assert judgement.outcome is AttemptState.FAILED
    assert judgement.error_class in (ErrorClass.DATA, ErrorClass.TRANSIENT)  # the next attempt takes an earlier one
    assert not (world.folder(second) / "artifact").exists()


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_stop_ends_with_the_best_so_far(world: World, name: str) -> None:
    spec = a_spec(world, name, steps=5000)
    running = world.launch(spec)
    wait_for_step(running, 3)
    running.send("rq-stop", RequestKind.STOP)
    assert judged(world, spec, running) is AttemptState.SUCCEEDED
    assert json.loads((world.folder(spec) / "result.json").read_bytes())["status"] == "stopped"
    assert [event.request_id for event in all_events(running) if isinstance(event, Ack)] == ["rq-stop"]
    verify_folder(world.folder(spec) / "artifact")


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_pause_saves_and_ends_as_interrupted(world: World, name: str) -> None:
    spec = a_spec(world, name, steps=5000)
    running = world.launch(spec)
    wait_for_step(running, 3)
    running.send("rq-pause", RequestKind.PAUSE)
    assert judged(world, spec, running) is AttemptState.INTERRUPTED
    events = all_events(running)
    assert [event.request_id for event in events if isinstance(event, Ack)] == ["rq-pause"]
    assert list((world.folder(spec) / "checkpoints").iterdir())


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_checkpoint_request_is_answered_and_training_goes_on(world: World, name: str) -> None:
    spec = a_spec(world, name, steps=16 if name in NEEDS else 40)
    running = world.launch(spec)
    wait_for_step(running, 1)
    running.send("rq-save", RequestKind.CHECKPOINT)
    assert judged(world, spec, running) is AttemptState.SUCCEEDED
    assert "rq-save" in [event.request_id for event in all_events(running) if isinstance(event, Ack)]


def damage_dataset(world: World, spec: TrainSpec) -> TrainSpec:
    dataset = spec.run.dataset.model_copy(update={"fingerprint": "0" * 64})
    return spec.model_copy(update={"run": spec.run.model_copy(update={"dataset": dataset})})


def swap_base(world: World, spec: TrainSpec) -> TrainSpec:
    base = spec.run.base.model_copy(update={"digest": "0" * 64})
    return spec.model_copy(update={"run": spec.run.model_copy(update={"base": base})})


def lose_dataset(world: World, spec: TrainSpec) -> TrainSpec:
    dataset = spec.run.dataset.model_copy(update={"path": str(world.root / "no-such-dataset")})
    return spec.model_copy(update={"run": spec.run.model_copy(update={"dataset": dataset})})


INPUTS = {
    "other dataset": (damage_dataset, ErrorClass.DATA),
    "other base": (swap_base, ErrorClass.MISMATCH),
    "no dataset": (lose_dataset, ErrorClass.DATA),
}


@pytest.mark.parametrize("fault", INPUTS)
@pytest.mark.parametrize("name", runnable(RUNNABLE))
def test_trainer_inputs_that_are_not_the_specs_are_refused(world: World, name: str, fault: str) -> None:
    change, error_class = INPUTS[fault]
    spec = change(world, a_spec(world, name))
    code = world.run(spec)
    judgement = check_train_result(spec, world.folder(spec), code)
    assert (judgement.outcome, judgement.error_class) == (AttemptState.FAILED, error_class), judgement.error
    assert not (world.folder(spec) / "artifact").exists()


@pytest.mark.parametrize("name", runnable(TRAINING))
def test_trainer_whose_keepalive_is_not_renewed_ends_itself(world: World, name: str) -> None:
    spec = a_spec(world, name, steps=100_000)
    attempt = spec.attempt.model_copy(update={"lease_s": 5.0 if name in NEEDS else 1.5})
    spec = spec.model_copy(update={"attempt": attempt})
    running = world.launch(spec)
    wait_for_step(running, 1)
    assert finish(running, 15.0) == 76
    assert check_train_result(spec, world.folder(spec), 76).outcome is AttemptState.LOST


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="unsloth is installed here")
def test_unsloth_where_it_cannot_run_refuses_in_one_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    spec = world.train_spec("unsloth")
    judgement = check_train_result(spec, world.folder(spec), world.run(spec))
    assert (judgement.outcome, judgement.error_class) == (AttemptState.FAILED, ErrorClass.CONFIG)
    assert judgement.error is not None
    assert judgement.error.startswith("trainer unsloth needs unsloth, which is not installed here")
    assert "use trainer trl or native" in judgement.error
    world.close()
