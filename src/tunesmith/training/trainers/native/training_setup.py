"""Builds everything a training needs from its spec alone, so every process of a group builds the same.

That is: items, base with adapter, optimizer, batch sampler, reference log-probabilities and the training step.
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
from tunesmith.training.trainers.native.batch_sampler import BatchSampler
from tunesmith.training.trainers.native.compute import backend_for
from tunesmith.training.trainers.native.controller import Training
from tunesmith.training.trainers.native.distributed import TrainingGroup
from tunesmith.training.trainers.native.items import make_items, max_length
from tunesmith.training.trainers.native.memory import Planner, describe
from tunesmith.training.trainers.native.objectives import Objective, Reference, kl_partners, objective_of
from tunesmith.training.trainers.native.optimizer import new_optimizer
from tunesmith.training.trainers.native.preflight import Preflight, check_base, choose_embeddings, examine
from tunesmith.training.trainers.native.random_state import seed_everything
from tunesmith.training.trainers.native.references import cached_reference
from tunesmith.training.trainers.native.state import ADAPTER
from tunesmith.training.trainers.native.step import StepResult, TrainStep
from tunesmith.training.trainers.native.validation import Validator, chosen_cases


@dataclass(frozen=True)
class Reporter:
    """Log and progress output during setup; only rank 0 reports."""

    log: Callable[[str, str], None]
    progress: Callable[[int, int, str], None]
    is_ending: Callable[[], bool]
    preflight: Callable[[Any, ChatFormat, Sequence[Tokenized]], Preflight]
    """Checks the bare base before an adapter is attached."""


def rank0_reporter(program: Program) -> Reporter:
    return Reporter(program.log, program.progress, lambda: program.terminating, partial(check_base, program))


def data_reporter(log: Callable[[str, str], None], progress: Callable[[int, int, str], None]) -> Reporter:
    """For callers that only read the data and never load the base."""

    def preflight(base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> Preflight:
        raise AssertionError("nothing is computed here")

    return Reporter(log, progress, lambda: False, preflight)


def null_reporter(run: RunSpec) -> Reporter:
    def preflight(base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> Preflight:
        return examine(run, base, chat, examples, lambda _done, _total: None)

    return Reporter(lambda _message, _level: None, lambda _done, _total, _unit: None, lambda: False, preflight)


@dataclass(frozen=True)
class Data:
    """What is trained and validated on, tokenised."""

    items: list[Item]
    dropped: list[str]
    case_items: list[Item]
    case_examples: list[Example]


@dataclass(frozen=True)
class TrainingSetup:
    """What the training loop needs."""

    training: Training
    items: Sequence[Item]
    sampler: BatchSampler
    train_step: TrainStep
    preflight: Preflight | None
    """None for a resumed training."""
    memory: MemoryPlan

    def make_step(self, done: int) -> StepResult:
        """Run the next optimizer step; `done` is the number of steps made before."""
        return self.train_step.run(done, self.sampler.num_steps, self._items_of(done), self._items_of(done + 1))

    def _items_of(self, step: int) -> list[Item]:
        if step >= self.sampler.num_steps:
            return []
        return [self.items[index] for index in self.sampler.batch(step).indices]


def read_data(run: RunSpec, chat: ChatFormat, reporter: Reporter) -> Data:
    """Tokenise the dataset's examples; those that are too long are dropped, logged and counted."""
    folder, limit = Path(run.dataset.path), max_length(run)

    def on_progress(done: int, total: int) -> None:
        reporter.progress(done, total, "example")

    training = make_items(run, chat, read_split(folder, Split.TRAIN), on_progress)
    if not training.items:
        raise DataError(
            f"dataset {run.dataset.id}: none of its {len(training.dropped)} training examples fits into "
            f"{limit} tokens; raise recipe.max_length (the base takes {run.base.context})"
        )
    if training.dropped:
        reporter.log(
            f"{len(training.dropped)} training examples are longer than {limit} tokens and were dropped whole, "
            f"e.g. {training.dropped[0]}",
            "warning",
        )
    num_rewritten = sum(item.num_rewritten for item in training.items)
    if num_rewritten:
        reporter.log(
            f"{num_rewritten} earlier answers are context only: the base's chat template writes them in another way "
            "once others follow; see docs/data.md",
            "warning",
        )
    candidates = read_split(folder, Split.VALIDATION)
    chosen = [candidates[place] for place in chosen_cases(len(candidates), run.validation.max_cases, run.recipe.seed)]
    cases = make_items(run, chat, chosen, on_progress)
    if not cases.items:
        reporter.log("no validation examples: nothing is validated, and the last step counts as the best", "warning")
    return Data(training.items, training.dropped, cases.items, cases.examples)


def build_training(
    spec: TrainSpec, chat: ChatFormat, data: Data, group: TrainingGroup, reporter: Reporter
) -> TrainingSetup:
    """Build a training as it is before its first step. To resume, restore the checkpoint into the result.

    That checkpoint must have been verified before (`read_state`).
    """
    run = spec.run
    seed_everything(run.recipe.seed)
    sampler = BatchSampler(
        [len(item) for item in data.items],
        seed=run.recipe.seed,
        epochs=run.recipe.epochs,
        batch_tokens=run.recipe.batch_tokens,
        max_steps=run.recipe.max_steps,
    )
    planner = Planner(spec, data.items, sampler, group)
    memory = planner.plan()
    reporter.log(describe(memory), "info")
    is_full = run.recipe.tuning == "full"
    folder = Path(run.start.path if run.start and is_full else run.base.path)
    base = load_base(folder, pick_device(), quantize=run.recipe.quantize)
    is_packing = run.recipe.packing and _can_pack(base, reporter)
    preflight = None
    if spec.resume is None:
        preflight, train_embeddings = run_preflight(run, base, chat, data, reporter)
    elif is_full:
        train_embeddings = True
    else:  # decided when the training began; the caller has verified the checkpoint
        train_embeddings = bool(read_config(Path(spec.resume.path) / ADAPTER).get("modules_to_save"))
    adapted = adapted_base(run, base, train_embeddings=train_embeddings)
    optimizer = new_optimizer(adapted, run.recipe)
    make_backend = partial(backend_for, adapted, is_fast=run.recipe.fast_path, log=reporter.log)
    backend = make_backend(checkpointed_layers=memory.checkpointed_layers)
    is_fast = not isinstance(backend, TransformersBackend)
    other = planner.replanned(memory, is_fast=is_fast, with_embeddings=train_embeddings)
    if other is not None:
        memory, backend = other, make_backend(checkpointed_layers=other.checkpointed_layers)
        reporter.log(describe(memory), "info")
    packer = Packer(max_tokens=memory.pack_tokens, pad_id=chat.pad_id, is_packing=is_packing)
    compute = partial(reference_log_probs, backend, packer, group, reporter)
    reference = partial(cached_reference, spec, adapted, group, reporter.log, compute)
    objective = _objective(run, [data.items[index] for index in sampler.used()], data.case_items, reference)
    if group.rank > 0:
        seed_everything(run.recipe.seed + group.rank)  # from here on only dropout draws: in every process its own
    cases = data.case_items
    validator = Validator(backend, chat, cases, data.case_examples, packer, objective) if cases else None
    train_step = TrainStep(backend, optimizer, run.recipe, packer, objective, group)
    training = Training(adapted, optimizer, sampler, validator, group)
    return TrainingSetup(training, data.items, sampler, train_step, preflight, memory)


def run_preflight(run: RunSpec, base: Any, chat: ChatFormat, data: Data, reporter: Reporter) -> tuple[Preflight, bool]:
    """Run the preflight of the bare base on the data, and decide whether to train its embeddings."""
    if run.start is not None and is_whole_model(Path(run.start.path)) != (run.recipe.tuning == "full"):
        kind = "a fully tuned model" if is_whole_model(Path(run.start.path)) else "an adapter"
        raise ConfigError(
            f"recipe.tuning is {run.recipe.tuning}, but {run.start.id} that the run starts from is {kind}; "
            "start from the base"
        )
    found = reporter.preflight(base, chat, [tokens for item in data.items if (tokens := to_learn(item)) is not None])
    choice = choose_embeddings(run, found)
    reporter.log(f"embeddings are {'' if choice.train else 'not '}trained: {choice.reason}", "info")
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


def _can_pack(base: Any, reporter: Reporter) -> bool:
    if supports_packing(base):
        return True
    reporter.log("this model cannot keep packed examples apart: every example gets a row of its own instead", "warning")
    return False


def _objective(
    run: RunSpec, trained: Sequence[Item], cases: Sequence[Item], reference_of: Callable[[Sequence[Item]], Reference]
) -> Objective:
    """The method's objective, with its reference log-probabilities."""
    kl_items: dict[str, Item] = {}
    if run.method is Method.KTO:
        kl_items = kl_partners(trained) | kl_partners(cases)
    reference: Reference = {}
    if run.method in (Method.DPO, Method.KTO):
        reference = reference_of([*trained, *cases, *kl_items.values()])
    return objective_of(run.method, run.recipe, reference, kl_items)


def reference_log_probs(
    backend: ComputeBackend, packer: Packer, group: TrainingGroup, reporter: Reporter, items: Sequence[Item]
) -> Reference:
    """Return the log-probabilities of the answers before the first step, from the base or the adapter it starts from.

    They are computed with the training's own model, so no second copy of it is ever in memory.
    """
    own_items = group.shard(items)

    def should_continue(done: int) -> bool:
        reporter.progress(done, len(own_items), "reference")
        return not reporter.is_ending()

    log_probs = answer_log_probs(backend, own_items, packer, should_continue)
    if log_probs is None:
        raise Interrupted
    return group.merge(log_probs)


class Interrupted(Exception):
    """TERM came before the first step."""
