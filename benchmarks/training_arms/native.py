"""The native arm: what a run of the product assembles, without its program around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.training_arms.kernels import profiled
from benchmarks.training_arms.work import (
    NUM_CHECKED,
    SIZES,
    Example,
    Job,
    Measured,
    examples_of,
    forget_peak,
    new_model,
    num_parameters,
    num_timed,
    wait_for_device,
)


@dataclass
class Native:
    """Everything a step needs."""

    model_parameters: int
    recipe: Any
    backend: Any
    path: str
    """What it says of the way it computes."""
    items: list[Any]
    order: Any
    packer: Any
    objective: Any
    maker: Any
    ready_s: float
    """For the way it computes to be chosen and, for dpo, the model to be asked before its first step."""

    def step(self, number: int) -> Any:
        """The result of the step, as the product's loop sees it."""
        return self.maker.run(number, self.order.num_steps, self._of_step(number), self._of_step(number + 1))

    def _of_step(self, number: int) -> list[Any]:
        if number >= self.order.num_steps:
            return []
        return [self.items[index] for index in self.order.batch(number).indices]


def run_native(job: Job) -> Measured:
    examples = examples_of(job)
    native = build_training(job, examples)
    start_loss = loss_of(native, native.items[:NUM_CHECKED])
    forget_peak()
    losses, began_at, step_s = [], time.perf_counter(), 0.0
    for number in range(job.warm_up):
        step_began_at = time.perf_counter()
        losses.append(float(native.step(number).loss))
        wait_for_device()
        step_s = time.perf_counter() - step_began_at
    start_up_s = time.perf_counter() - began_at + native.ready_s
    last = job.warm_up + num_timed(job.seconds, step_s, native.order.num_steps - job.warm_up, least=3)
    last = min(last, native.order.num_steps)
    began_at = time.perf_counter()
    made = [native.step(number) for number in range(job.warm_up, last)]
    wait_for_device()
    seconds = time.perf_counter() - began_at
    seen = [examples[index] for number in range(job.warm_up, last) for index in native.order.batch(number).indices]
    is_shared = native.packer.is_packing
    more: dict[str, Any] = {"num_parameters": native.model_parameters, "steps": len(made)}
    if native.packer.is_packing and next(native.backend.model.parameters()).is_cuda:
        more["forecast_gb"] = round(forecast_bytes(job, native) / 2**30, 2)
    if job.is_profiled:
        again = [number % native.order.num_steps for number in (last, last + 1)]
        more["profile"] = profiled(lambda: [native.step(number) for number in again], 2 * seconds / len(made))
    return Measured(
        seconds=seconds,
        examples=len(seen),
        tokens=sum(example.num_tokens(job.method) for example in seen),
        computed_tokens=sum(example.num_tokens(job.method, is_shared=is_shared) for example in seen),
        start_loss=start_loss,
        losses=losses + [float(one.loss) for one in made],
        start_up_s=start_up_s,
        more=more | {"path": native.path},
    )


def build_training(job: Job, examples: Sequence[Example]) -> Native:
    """As `tunesmith.training.trainers.native.train` and `build_training` do from a spec."""
    from tunesmith.models.adapters import new_adapter
    from tunesmith.models.loading import pick_device
    from tunesmith.models.packs import Packer
    from tunesmith.models.quantized import quantize_linears
    from tunesmith.models.scoring import answer_log_probs
    from tunesmith.profiles.profile import Method, Recipe
    from tunesmith.training.trainers.native.batch_sampler import BatchSampler
    from tunesmith.training.trainers.native.compute import backend_for
    from tunesmith.training.trainers.native.distributed import TrainingGroup
    from tunesmith.training.trainers.native.objectives import objective_of
    from tunesmith.training.trainers.native.optimizer import new_optimizer
    from tunesmith.training.trainers.native.random_state import repeat_exactly
    from tunesmith.training.trainers.native.step import TrainStep

    repeat_exactly()
    method, items = Method(job.method), [item_of(job.method, number, one) for number, one in enumerate(examples)]
    total = sum(len(item) for item in items)
    batch_tokens = job.tokens_per_step or -(-total // (job.warm_up + job.steps))
    recipe = Recipe(
        method=method, lora_dropout=0.0, lr=1e-4, warmup=0.0, schedule="constant",
        batch_tokens=batch_tokens, micro_batch_tokens=job.pack_tokens, quantize=job.quantize,
    )  # fmt: skip
    base = new_model(SIZES[job.size])
    model_parameters = num_parameters(base)
    if job.quantize == "nf4":
        quantize_linears(base, pick_device())
    adapted = new_adapter(base, recipe)
    optimizer = new_optimizer(adapted, recipe)
    packer = Packer(job.pack_tokens, 0, is_packing=job.arm != "native, padded")
    order = BatchSampler([len(item) for item in items], seed=job.seed, epochs=1, batch_tokens=batch_tokens)
    began_at = time.perf_counter()
    told: list[str] = []
    backend = backend_for(
        adapted,
        checkpointed_layers=job.checkpointed_layers,
        is_fast=job.arm != "native, slow path",
        log=lambda message, _level: told.append(message),
    )
    reference = answer_log_probs(backend, items, packer) if method is Method.DPO else {}
    ready_s = time.perf_counter() - began_at
    objective = objective_of(method, recipe, reference or {}, {})
    maker = TrainStep(backend, optimizer, recipe, packer, objective, TrainingGroup())
    path = told[-1] if told else "slow path"
    return Native(model_parameters, recipe, backend, path, items, order, packer, objective, maker, ready_s)


def item_of(method: str, number: int, example: Example) -> Any:
    from tunesmith.models.chat import Tokenized
    from tunesmith.models.packs import single, with_shared_prompt

    def tokenized(answer: list[int]) -> Tokenized:
        trained = (False,) * len(example.prompt) + (True,) * len(answer)
        return Tokenized(f"e{number}", (*example.prompt, *answer), trained)

    if method == "sft":
        return single(tokenized(example.chosen))
    both = [tokenized(example.chosen), tokenized(example.rejected)]
    return with_shared_prompt(f"e{number}", both, [True, False], counts_context=method == "orpo")


def loss_of(native: Native, items: Sequence[Any]) -> float:
    """As validation measures it."""
    from tunesmith.models.scoring import evaluating
    from tunesmith.training.trainers.native.objectives import loss_denominators

    weights, total = loss_denominators(items), 0.0
    with evaluating(native.backend.model):
        for group in native.packer.groups(items):
            some = [items[index] for index in group]
            spans = native.backend.span_log_probs(native.packer.micro_batch(some))
            total += float(native.objective.terms(some, spans, weights, 0.0).loss)
    return total


def forecast_bytes(job: Job, native: Native, process_bytes: int = 0) -> int:
    """As a run of the product foretells its peak, with nothing learnt from earlier runs."""
    from tunesmith.models.scoring import TransformersBackend
    from tunesmith.profiles.architecture import ModelShape
    from tunesmith.profiles.profile import Method
    from tunesmith.training.rules.memory_forecast import forecast, forecast_inputs

    config, method = native.backend.model.config, Method(job.method)
    shape = ModelShape(
        family=config.model_type, hidden=config.hidden_size, intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size, is_tied=config.tie_word_embeddings, has_qk_norm=config.model_type == "qwen3",
        num_parameters=native.model_parameters,
    )  # fmt: skip
    is_cuda = next(native.backend.model.parameters()).is_cuda
    terms = forecast_inputs(shape, native.recipe, method, "cuda" if is_cuda else "cpu")
    items = native.items
    wanted = sum(item.num_trained + (item.num_context if item.counts_context else 0) for item in items)
    terms = replace(
        terms,
        is_fast=not isinstance(native.backend, TransformersBackend),
        wanted_share=min(1.0, wanted / sum(len(item) for item in items)),
        process_bytes=process_bytes,
    )
    largest_step = max(native.order.num_tokens(step) for step in range(native.order.num_steps))
    largest = max(*(len(item) for item in items), min(job.pack_tokens, largest_step))
    return forecast(shape, native.recipe, method, largest, job.checkpointed_layers, terms).total
