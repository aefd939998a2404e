"""The native arm: what a run of the product assembles, without its program around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    adapted: Any
    items: list[Any]
    order: Any
    packer: Any
    objective: Any
    maker: Any
    reference_s: float
    """What was asked of the model before its first step, for dpo."""

    def step(self, number: int) -> Any:
        """The result of the step, as the product's loop sees it."""
        return self.maker.make(number, self.order.num_steps, self.of_step(number))

    def of_step(self, number: int) -> list[Any]:
        return [self.items[index] for index in self.order.batch(number).indices]


def run_native(job: Job) -> Measured:
    examples = examples_of(job)
    native = assemble(job, examples)
    start_loss = loss_of(native, native.items[:NUM_CHECKED])
    forget_peak()
    losses, began_at, step_s = [], time.perf_counter(), 0.0
    for number in range(job.warm_up):
        step_began_at = time.perf_counter()
        losses.append(float(native.step(number).loss))
        wait_for_device()
        step_s = time.perf_counter() - step_began_at
    start_up_s = time.perf_counter() - began_at + native.reference_s
    last = job.warm_up + num_timed(job.seconds, step_s, native.order.num_steps - job.warm_up, least=3)
    last = min(last, native.order.num_steps)
    began_at = time.perf_counter()
    made = [native.step(number) for number in range(job.warm_up, last)]
    wait_for_device()
    seconds = time.perf_counter() - began_at
    seen = [examples[index] for number in range(job.warm_up, last) for index in native.order.batch(number).indices]
    is_shared = native.packer.is_packing
    more: dict[str, Any] = {"num_parameters": native.model_parameters, "steps": len(made)}
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
        more=more | {"reference_s": native.reference_s},
    )


def assemble(job: Job, examples: Sequence[Example], quantize: str = "none") -> Native:
    """As `tunesmith.trainers.native.assemble` does from a spec."""
    from tunesmith.domain.profile import Method, Recipe
    from tunesmith.modeling.adapters import new_adapter
    from tunesmith.modeling.packs import Packer
    from tunesmith.modeling.scoring import answer_log_probs
    from tunesmith.trainers.native.objectives import objective_of
    from tunesmith.trainers.native.optimizer import new_optimizer
    from tunesmith.trainers.native.order import Order

    method, items = Method(job.method), [item_of(job.method, number, one) for number, one in enumerate(examples)]
    total = sum(len(item) for item in items)
    batch_tokens = job.tokens_per_step or -(-total // (job.warm_up + job.steps))
    recipe = Recipe(
        method=method, lora_dropout=0.0, lr=1e-4, warmup=0.0, schedule="constant",
        batch_tokens=batch_tokens, micro_batch_tokens=job.pack_tokens,
    )  # fmt: skip
    base = new_model(SIZES[job.size])
    model_parameters = num_parameters(base)
    adapted = new_adapter(base, recipe)
    optimizer = new_optimizer(adapted, recipe)
    packer = Packer(job.pack_tokens, 0, is_packing=job.arm != "native, padded")
    order = Order([len(item) for item in items], seed=job.seed, epochs=1, batch_tokens=batch_tokens)
    began_at = time.perf_counter()
    reference = answer_log_probs(adapted, items, packer) if method is Method.DPO else {}
    reference_s = time.perf_counter() - began_at
    objective = objective_of(method, recipe, reference or {}, {})
    maker = step_maker(job, adapted, optimizer, recipe, packer, objective)
    return Native(model_parameters, recipe, adapted, items, order, packer, objective, maker, reference_s)


def step_maker(job: Job, *parts: Any) -> Any:
    from tunesmith.trainers.native.step import StepMaker
    from tunesmith.trainers.native.team import Team

    return StepMaker(*parts, Team())


def item_of(method: str, number: int, example: Example) -> Any:
    from tunesmith.modeling.chat import Tokenized
    from tunesmith.modeling.packs import siblings, single

    def tokenized(answer: list[int]) -> Tokenized:
        trained = (False,) * len(example.prompt) + (True,) * len(answer)
        return Tokenized(f"e{number}", (*example.prompt, *answer), trained)

    if method == "sft":
        return single(tokenized(example.chosen))
    both = [tokenized(example.chosen), tokenized(example.rejected)]
    return siblings(f"e{number}", both, [True, False], counts_context=method == "orpo")


def loss_of(native: Native, items: Sequence[Any]) -> float:
    """As validation measures it."""
    from tunesmith.modeling.scoring import evaluating, span_log_probs
    from tunesmith.trainers.native.objectives import weigh

    weights = weigh(items)
    with evaluating(native.adapted):
        passes = [[items[index] for index in group] for group in native.packer.groups(items)]
        return sum(
            float(
                native.objective.terms(
                    some, span_log_probs(native.adapted, native.packer.layout(some)), weights, 0.0
                ).loss
            )
            for some in passes
        )
