"""Everything a training works on, made from its spec alone: so every process of a team makes the same.

Data as items, base with adapter, optimizer, order of examples, reference log-probabilities, the step maker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.core.errors import ConfigError, DataError
from tunesmith.datasets.reading import read_split
from tunesmith.datasets.report import Example, Split
from tunesmith.models.adapters import load_adapter, new_adapter, read_config, start_differences
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.loading import load_base, pick_device
from tunesmith.models.packs import Item, Packer, to_learn
from tunesmith.models.scoring import ComputeBackend, TransformersBackend, answer_log_probs, supports_packing
from tunesmith.models.tuned import whole
from tunesmith.profiles.base_model import is_whole_model
from tunesmith.profiles.profile import Method
from tunesmith.programs.host import Program
from tunesmith.runs.spec import RunSpec, TrainSpec
from tunesmith.training.rules.memory_plan import MemoryPlan
from tunesmith.training.trainers.native.batch_sampler import Order
from tunesmith.training.trainers.native.compute import backend_for
from tunesmith.training.trainers.native.controller import Training
from tunesmith.training.trainers.native.distributed import Team
from tunesmith.training.trainers.native.items import make_items, max_length
from tunesmith.training.trainers.native.memory import Planner, told
from tunesmith.training.trainers.native.objectives import Objective, Reference, drift_partners, objective_of
from tunesmith.training.trainers.native.optimizer import new_optimizer
from tunesmith.training.trainers.native.preflight import Preflight, check_base, choose_embeddings, examine
from tunesmith.training.trainers.native.random_state import seed_everything
from tunesmith.training.trainers.native.references import recalled
from tunesmith.training.trainers.native.state import ADAPTER
from tunesmith.training.trainers.native.step import MadeStep, StepMaker
from tunesmith.training.trainers.native.validation import Validator, chosen_cases


@dataclass(frozen=True)
class Voice:
    """How those who assemble speak: the leader of a team through its program, the others to nobody."""

    log: Callable[[str, str], None]
    progress: Callable[[int, int, str], None]
    is_ending: Callable[[], bool]
    preflight: Callable[[Any, ChatFormat, Sequence[Tokenized]], Preflight]
    """Looks at the bare base before anything is put on it."""


def leading_voice(program: Program) -> Voice:
    return Voice(program.log, program.progress, lambda: program.terminating, partial(check_base, program))


def listening_voice(log: Callable[[str, str], None], progress: Callable[[int, int, str], None]) -> Voice:
    """For those that only read the data, and never load the base."""

    def look(base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> Preflight:
        raise AssertionError("nothing is computed here")

    return Voice(log, progress, lambda: False, look)


def silent_voice(run: RunSpec) -> Voice:
    def look(base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> Preflight:
        return examine(run, base, chat, examples, lambda _done, _total: None)

    return Voice(lambda _message, _level: None, lambda _done, _total, _unit: None, lambda: False, look)


@dataclass(frozen=True)
class Data:
    """What is trained and validated on, tokenised."""

    items: list[Item]
    dropped: list[str]
    case_items: list[Item]
    case_examples: list[Example]


@dataclass(frozen=True)
class Assembly:
    """What the loop works with."""

    training: Training
    items: Sequence[Item]
    order: Order
    steps: StepMaker
    preflight: Preflight | None
    """None for a training that goes on."""
    memory: MemoryPlan

    def make_step(self, done: int) -> MadeStep:
        """The step after so many others."""
        return self.steps.make(done, self.order.num_steps, self._items_of(done), self._items_of(done + 1))

    def _items_of(self, step: int) -> list[Item]:
        if step >= self.order.num_steps:
            return []
        return [self.items[index] for index in self.order.batch(step).indices]


def read_data(run: RunSpec, chat: ChatFormat, voice: Voice) -> Data:
    """The dataset's examples as items; those that do not fit are dropped whole, told and counted."""
    folder, limit = Path(run.dataset.path), max_length(run)

    def told(done: int, total: int) -> None:
        voice.progress(done, total, "example")

    training = make_items(run, chat, read_split(folder, Split.TRAIN), told)
    if not training.items:
        raise DataError(
            f"dataset {run.dataset.id}: none of its {len(training.dropped)} training examples fits into "
            f"{limit} tokens; raise recipe.max_length (the base takes {run.base.context})"
        )
    if training.dropped:
        voice.log(
            f"{len(training.dropped)} training examples are longer than {limit} tokens and were dropped whole, "
            f"e.g. {training.dropped[0]}",
            "warning",
        )
    num_rewritten = sum(item.num_rewritten for item in training.items)
    if num_rewritten:
        voice.log(
            f"{num_rewritten} earlier answers are context only: the base's chat template writes them in another way "
            "once others follow; see docs/data.md",
            "warning",
        )
    candidates = read_split(folder, Split.VALIDATION)
    chosen = [candidates[place] for place in chosen_cases(len(candidates), run.validation.max_cases, run.recipe.seed)]
    cases = make_items(run, chat, chosen, told)
    if not cases.items:
        voice.log("no validation examples: nothing is validated, and the last step counts as the best", "warning")
    return Data(training.items, training.dropped, cases.items, cases.examples)


def assemble(spec: TrainSpec, chat: ChatFormat, data: Data, team: Team, voice: Voice) -> Assembly:
    """As at the very beginning of the training, before its first step; whoever resumes restores on top of it.

    The checkpoint to resume from has been verified by then (`read_state`).
    """
    run = spec.run
    seed_everything(run.recipe.seed)
    order = Order(
        [len(item) for item in data.items],
        seed=run.recipe.seed,
        epochs=run.recipe.epochs,
        batch_tokens=run.recipe.batch_tokens,
        max_steps=run.recipe.max_steps,
    )
    planner = Planner(spec, data.items, order, team)
    memory = planner.plan()
    voice.log(told(memory), "info")
    is_full = run.recipe.tuning == "full"
    folder = Path(run.start.path if run.start and is_full else run.base.path)
    base = load_base(folder, pick_device(), quantize=run.recipe.quantize)
    is_packing = run.recipe.packing and _can_pack(base, voice)
    found = None
    if spec.resume is None:
        found, train_embeddings = look_at(run, base, chat, data, voice)
    elif is_full:
        train_embeddings = True
    else:  # decided when the training began; the checkpoint's bytes were verified by whoever resumes
        train_embeddings = bool(read_config(Path(spec.resume.path) / ADAPTER).get("modules_to_save"))
    adapted = adapted_base(run, base, train_embeddings=train_embeddings)
    optimizer = new_optimizer(adapted, run.recipe)
    make_backend = partial(backend_for, adapted, is_fast=run.recipe.fast_path, log=voice.log)
    backend = make_backend(checkpointed_layers=memory.checkpointed_layers)
    is_fast = not isinstance(backend, TransformersBackend)
    other = planner.replanned(memory, is_fast=is_fast, with_embeddings=train_embeddings)
    if other is not None:
        memory, backend = other, make_backend(checkpointed_layers=other.checkpointed_layers)
        voice.log(told(memory), "info")
    packer = Packer(max_tokens=memory.pack_tokens, pad_id=chat.pad_id, is_packing=is_packing)
    recall = partial(recalled, spec, adapted, team, voice.log, partial(ask_before, backend, packer, team, voice))
    objective = _objective(run, [data.items[index] for index in order.used()], data.case_items, recall)
    if team.rank > 0:
        seed_everything(run.recipe.seed + team.rank)  # from here on only dropout draws: in every process its own
    cases = data.case_items
    validator = Validator(backend, chat, cases, data.case_examples, packer, objective) if cases else None
    steps = StepMaker(backend, optimizer, run.recipe, packer, objective, team)
    training = Training(adapted, optimizer, order, validator, team)
    return Assembly(training, data.items, order, steps, found, memory)


def look_at(run: RunSpec, base: Any, chat: ChatFormat, data: Data, voice: Voice) -> tuple[Preflight, bool]:
    """What the bare base makes of the data, and whether its embeddings are to be trained too."""
    if run.start is not None and is_whole_model(Path(run.start.path)) != (run.recipe.tuning == "full"):
        kind = "a fully tuned model" if is_whole_model(Path(run.start.path)) else "an adapter"
        raise ConfigError(
            f"recipe.tuning is {run.recipe.tuning}, but {run.start.id} that the run starts from is {kind}; "
            "start from the base"
        )
    found = voice.preflight(base, chat, [tokens for item in data.items if (tokens := to_learn(item)) is not None])
    choice = choose_embeddings(run, found)
    voice.log(f"embeddings are {'' if choice.train else 'not '}trained: {choice.reason}", "info")
    return found, choice.train


def adapted_base(run: RunSpec, base: Any, *, train_embeddings: bool) -> Any:
    """The base with a fresh adapter, or with the one the run starts from, which must have the recipe's shape.

    For full tuning, the base itself (or the fully tuned one that the run starts from) with every weight to be trained.
    """
    if run.recipe.tuning == "full":
        return whole(base)
    if run.start is None:
        return new_adapter(base, run.recipe, train_embeddings=train_embeddings)
    folder = Path(run.start.path)
    differences = start_differences(run.recipe, read_config(folder), base)
    if differences:
        raise ConfigError("; ".join(differences))
    return load_adapter(base, folder, trainable=True, dropout=run.recipe.lora_dropout)


def _can_pack(base: Any, voice: Voice) -> bool:
    if supports_packing(base):
        return True
    voice.log("this model cannot keep packed examples apart: every example gets a row of its own instead", "warning")
    return False


def _objective(
    run: RunSpec, trained: Sequence[Item], cases: Sequence[Item], ask: Callable[[Sequence[Item]], Reference]
) -> Objective:
    """The method's objective, with the reference that it measures from."""
    drift_items: dict[str, Item] = {}
    if run.method is Method.KTO:
        drift_items = drift_partners(trained) | drift_partners(cases)
    reference: Reference = {}
    if run.method in (Method.DPO, Method.KTO):
        reference = ask([*trained, *cases, *drift_items.values()])
    return objective_of(run.method, run.recipe, reference, drift_items)


def ask_before(backend: ComputeBackend, packer: Packer, team: Team, voice: Voice, items: Sequence[Item]) -> Reference:
    """What the model makes of the answers before its first step: the base does, or the adapter that is started from.

    Asked with the weights it starts with, so no second copy of the model is ever in memory.
    """
    mine = team.share(items)

    def go_on(done: int) -> bool:
        voice.progress(done, len(mine), "reference")
        return not voice.is_ending()

    found = answer_log_probs(backend, mine, packer, go_on)
    if found is None:
        raise Interrupted
    return team.merged(found)


class Interrupted(Exception):
    """TERM came before the first step."""
