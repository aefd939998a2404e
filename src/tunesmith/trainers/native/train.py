"""The native trainer: check, load, train, publish. One attempt at one run, from its spec to its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunesmith.data.dataset import fingerprint_of, read_split
from tunesmith.domain.dataset import Example, Split
from tunesmith.domain.profile import Method
from tunesmith.domain.program import Phase, Result, ResultStatus
from tunesmith.domain.spec import RunSpec
from tunesmith.domain.task import ErrorClass
from tunesmith.errors import ConfigError, DataError
from tunesmith.modeling.adapters import load_adapter, new_adapter, read_config
from tunesmith.modeling.chat import ChatFormat, Tokenized
from tunesmith.modeling.loading import load_base, load_tokenizer, pick_device
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.trainers.inputs import Inputs, read_inputs
from tunesmith.trainers.native.loop import Ending, Loop, Work
from tunesmith.trainers.native.optimizer import new_optimizer
from tunesmith.trainers.native.order import Order
from tunesmith.trainers.native.random_state import seed_everything
from tunesmith.trainers.native.state import ADAPTER, BEST, Standing, read_state, restore
from tunesmith.trainers.native.step import StepMaker
from tunesmith.trainers.native.validation import LOSS, Validator, check_metric, chosen_cases

_TOLD_EVERY = 500


@dataclass(frozen=True)
class _Data:
    """What is trained and validated on, tokenised."""

    examples: list[Tokenized]
    num_dropped: int
    validator: Validator | None


def train(program: Program) -> Result:
    """Entry point, called by `tunesmith.trainers.main`."""
    run = program.train_spec.run
    _refuse_what_it_cannot_do(run)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    program.phase(Phase.HASH)
    inputs = _read_inputs(run)
    program.phase(Phase.LOAD)
    tokenizer = load_tokenizer(Path(run.base.path))
    chat = ChatFormat(tokenizer)
    data = _tokenize(program, chat)
    loop = _prepare(program, chat, data)
    ending = loop.run()
    return _result(program, loop, ending, inputs, data, str(tokenizer.chat_template))


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.method is not Method.SFT:
        raise ConfigError(f"recipe.method: the native trainer does sft, not {run.method.value}; set recipe.method: sft")
    if run.trainer_options:
        raise ConfigError(
            f"trainer.options: the native trainer has none, found {', '.join(sorted(run.trainer_options))}"
        )
    check_metric(run.validation)


def _read_inputs(run: RunSpec) -> Inputs:
    """As for every trainer, and the dataset's fingerprint from every text in it rather than from its manifest."""
    inputs = read_inputs(run)
    found = fingerprint_of(Path(run.dataset.path))
    if found != run.dataset.fingerprint:
        raise ProgramFailure(ErrorClass.DATA, f"dataset {run.dataset.id} is not what its fingerprint says")
    return replace(inputs, dataset_fingerprint=found)


def _tokenize(program: Program, chat: ChatFormat) -> _Data:
    spec, run = program.train_spec, program.train_spec.run
    folder = Path(run.dataset.path)
    training, dropped = _fitting(program, chat, read_split(folder, Split.TRAIN))
    if not training:
        raise DataError(
            f"dataset {run.dataset.id}: none of its {len(dropped)} training examples fits into "
            f"{_max_length(run)} tokens; raise recipe.max_length (the base takes {run.base.context})"
        )
    if dropped:
        program.log(
            f"{len(dropped)} training examples are longer than {_max_length(run)} tokens and were dropped whole, "
            f"e.g. {dropped[0]}",
            "warning",
        )
    if run.recipe.packing:
        program.log("recipe.packing is on, but this trainer does not pack: it batches examples of similar length")
    candidates = read_split(folder, Split.VALIDATION)
    chosen = [candidates[place] for place in chosen_cases(len(candidates), run.validation.max_cases, run.recipe.seed)]
    cases, _ = _fitting(program, chat, chosen)
    if not cases:
        program.log("no validation examples: nothing is validated, and the last step counts as the best", "warning")
        return _Data([case for _, case in training], len(dropped), None)
    validator = Validator(
        chat,
        [case for _, case in cases],
        [example for example, _ in cases],
        _micro_batch_tokens(run, spec.micro_batch_divisor),
    )
    return _Data([case for _, case in training], len(dropped), validator)


def _fitting(
    program: Program, chat: ChatFormat, examples: list[Example]
) -> tuple[list[tuple[Example, Tokenized]], list[str]]:
    """What fits into the longest allowed sequence, with its tokens; and the ids of what does not."""
    limit = _max_length(program.train_spec.run)
    kept: list[tuple[Example, Tokenized]] = []
    dropped: list[str] = []
    for number, example in enumerate(examples, start=1):
        tokens = chat.tokenize(example.id, example.messages)
        if len(tokens) > limit:
            dropped.append(example.id)
        else:
            kept.append((example, tokens))
        if number % _TOLD_EVERY == 0:
            program.progress(number, len(examples), "example")
    return kept, dropped


def _max_length(run: RunSpec) -> int:
    return min(run.recipe.max_length, run.base.context)


def _micro_batch_tokens(run: RunSpec, divisor: int) -> int:
    return max(1, run.recipe.micro_batch_tokens // divisor)


def _prepare(program: Program, chat: ChatFormat, data: _Data) -> Loop:
    spec, run = program.train_spec, program.train_spec.run
    saved = read_state(spec.resume, run) if spec.resume else None
    seed_everything(run.recipe.seed)
    adapted = _adapted(run, load_base(Path(run.base.path), pick_device()))
    optimizer = new_optimizer(adapted, run.recipe)
    order = Order(
        [len(example) for example in data.examples],
        seed=run.recipe.seed,
        epochs=run.recipe.epochs,
        batch_tokens=run.recipe.batch_tokens,
        max_steps=run.recipe.max_steps,
    )
    steps = StepMaker(adapted, optimizer, run.recipe, _micro_batch_tokens(run, spec.micro_batch_divisor), chat.pad_id)
    work = Work(adapted, optimizer, data.examples, order, data.validator, steps)
    if saved is None or spec.resume is None:
        return Loop(program, work, Standing(), None)
    folder, standing = Path(spec.resume.path), saved.standing
    here = order.batch(max(0, standing.step - 1))
    if standing.step > order.num_steps or (here.epoch, here.position + 1) != (saved.epoch, saved.position):
        raise DataError(f"checkpoint {folder.name} stands at a place that this data does not have; start a new run")
    restore(folder, saved, adapted, optimizer)
    program.log(f"resumed at step {standing.step} of {order.num_steps}")
    best = None
    if standing.best_step is not None:
        best = folder / (ADAPTER if standing.best_step == standing.step else BEST)
    return Loop(program, work, standing, best)


def _adapted(run: RunSpec, base: Any) -> Any:
    """The base with a fresh adapter, or with the one the run starts from, which must have the recipe's shape."""
    if run.start is None:
        return new_adapter(base, run.recipe)
    folder, recipe = Path(run.start.path), run.recipe
    found = read_config(folder)
    for name, ours, theirs in (
        ("lora_rank", recipe.lora_rank, found.get("r")),
        ("lora_alpha", recipe.lora_alpha, found.get("lora_alpha")),
        ("train_embeddings", recipe.train_embeddings is True, bool(found.get("modules_to_save"))),
    ):
        if ours != theirs:
            raise ConfigError(
                f"recipe.{name} is {ours}, but adapter {run.start.id} that the run starts from has {theirs}; "
                "set it to that, or start from the base"
            )
    return load_adapter(base, folder, trainable=True, dropout=recipe.lora_dropout)


def _result(program: Program, loop: Loop, ending: Ending, inputs: Inputs, data: _Data, chat_template: str) -> Result:
    standing = loop.standing
    fields: dict[str, Any] = {
        "base_digest": inputs.base_digest,
        "start_digest": inputs.start_digest,
        "dataset_fingerprint": inputs.dataset_fingerprint,
        "best_step": standing.best_step,
        "num_steps": standing.step,
        "num_trained_tokens": standing.num_trained_tokens,
        "num_trained_examples": min(standing.num_seen, len(data.examples)),
        "num_dropped_examples": data.num_dropped,
        "train_s": loop.train_s,
        "metrics": _metrics(loop),
        "detail": {"num_tokens": standing.num_tokens, "num_seen": standing.num_seen},
    }
    match ending:
        case Ending.PAUSE | Ending.CANCEL | Ending.TERMINATED:
            fields["detail"]["reason"] = ending.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        case Ending.WALL | Ending.TOKENS:
            fields["detail"]["budget"] = ending.value
        case Ending.STOP:
            fields["detail"]["reason"] = ending.value
        case Ending.FINISHED:
            pass
    if loop.shelf.best_adapter is None:
        if program.terminating:
            fields["detail"]["reason"] = Ending.TERMINATED.value
            return program.result(ResultStatus.INTERRUPTED, **fields)
        raise ProgramFailure(
            ErrorClass.NONFINITE,
            f"{LOSS} was never a finite number, so no step can be called the best; lower recipe.lr",
        )
    program.phase(Phase.SAVE, "artifact")
    meta = {"run_id": program.train_spec.run.run_id, "step": standing.best_step, "base_digest": inputs.base_digest}
    fields["artifact"] = loop.shelf.publish_artifact(chat_template, meta)
    status = ResultStatus.STOPPED if ending is Ending.STOP else ResultStatus.SUCCEEDED
    return program.result(status, **fields)


def _metrics(loop: Loop) -> dict[str, float]:
    known = {
        "loss": loop.last_loss,
        LOSS: loop.standing.best_value,
        f"{LOSS}_before": loop.first_value,
    }
    return {name: value for name, value in known.items() if value is not None}
