"""TRL's trainers with our batches, raw losses and stop decisions.

They use the public hooks of TRL and transformers where there are any: data loader, training step, callbacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tunesmith.models.packs import Item
from tunesmith.profiles.profile import Method, Recipe
from tunesmith.training.trainers.native.optimizer import learning_rate, new_optimizer
from tunesmith.training.trainers.trl.plan import Plan
from tunesmith.training.trainers.trl.rows import collator_of

_LOG_EVERY = 100  # only so that TRL empties its lists of averages; nobody reads them


class StepCallbacks(Protocol):
    """What a `TrlTrainer` calls while it runs."""

    def on_step_begin(self) -> None: ...

    def on_micro_batch_end(self, loss: float) -> None:
        """After each forward and backward pass; the losses of a step's micro-batches add up to the step's loss."""

    def on_pre_optimizer_step(self) -> None:
        """All gradients are there, unclipped."""

    def on_step_end(self) -> bool:
        """After the update; returns whether to continue."""


@dataclass(frozen=True)
class Setup:
    """The inputs of a `TrlTrainer`."""

    method: Method
    recipe: Recipe
    adapted: Any
    tokenizer: Any
    pad_id: int
    items: Sequence[Item]
    plan: Plan
    first_step: int
    folder: Path
    """Output folder of TRL, which is configured to save nothing."""


class TrlTrainer:
    """Runs one training with TRL."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.optimizer = new_optimizer(setup.adapted, setup.recipe)
        kind, config = _KINDS[setup.method]
        # a formality: what is trained on comes from our own loader
        formal = Dataset.from_dict({"number": [0]})
        with warnings.catch_warnings():
            # for dpo TRL copies the start into a second adapter: frozen, so its embeddings need not be tied
            warnings.filterwarnings("ignore", message="You have requested `ensure_weight_tying`")
            self._trainer = kind(
                model=setup.adapted,
                args=config(**_arguments(setup)),
                train_dataset=formal,
                data_collator=collator_of(setup.method, setup.items, setup.pad_id),
                processing_class=setup.tokenizer,
                optimizers=(self.optimizer, _scheduler(self.optimizer, setup)),
            )
        self._trainer.remove_callback(PrinterCallback)
        _freeze_reference(setup.adapted)

    def run(self, callbacks: StepCallbacks) -> None:
        """Run the remaining steps, unless the callbacks stop it."""
        setup = self._setup
        self._trainer.callbacks = callbacks
        self._trainer.loader = DataLoader(
            range(len(setup.items)),
            batch_size=setup.plan.micro_batches.size,
            sampler=setup.plan.from_step(setup.first_step),
            collate_fn=collator_of(setup.method, setup.items, setup.pad_id),
            generator=torch.Generator(),  # one of its own, so that it draws nothing from the training's numbers
        )
        self._trainer.add_callback(_Callback(callbacks))
        self._trainer.train()


class _Callback(TrainerCallback):  # type: ignore[misc]
    def __init__(self, callbacks: StepCallbacks) -> None:
        self._callbacks = callbacks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._callbacks.on_step_begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._callbacks.on_pre_optimizer_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if not self._callbacks.on_step_end():
            control.should_training_stop = True
        return control


class _WithCallbacks:
    """Mixed in front of a TRL trainer."""

    callbacks: StepCallbacks
    loader: Any

    def get_train_dataloader(self) -> Any:
        return self.loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.callbacks.on_micro_batch_end(float(loss))
        return loss


class _Sft(_WithCallbacks, SFTTrainer):  # type: ignore[misc]
    pass


class _Dpo(_WithCallbacks, DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset


class _Orpo(_WithCallbacks, ORPOTrainer):  # type: ignore[misc]
    @staticmethod
    def tokenize_row(feature: Any) -> Any:
        return feature


_KINDS: dict[Method, tuple[Any, Any]] = {
    Method.SFT: (_Sft, SFTConfig),
    Method.DPO: (_Dpo, DPOConfig),
    Method.ORPO: (_Orpo, ORPOConfig),
}


def _arguments(setup: Setup) -> dict[str, Any]:
    recipe, micro_batches, has_cuda = setup.recipe, setup.plan.micro_batches, torch.cuda.is_available()
    common = {
        "output_dir": str(setup.folder),
        "use_cpu": not has_cuda,
        "bf16": has_cuda,
        "fp16": False,
        "gradient_checkpointing": has_cuda,
        "per_device_train_batch_size": micro_batches.size,
        "gradient_accumulation_steps": micro_batches.num,
        "max_steps": max(1, setup.plan.num_steps - setup.first_step),
        "max_grad_norm": 0.0,  # we clip, because only we see the raw norm then
        "seed": recipe.seed,
        "save_strategy": "no",  # its checkpoints hold pickles
        "eval_strategy": "no",
        "logging_steps": _LOG_EVERY,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    match setup.method:
        case Method.DPO:
            return common | {"beta": recipe.beta, "max_length": None, "disable_dropout": False}
        case Method.ORPO:
            return common | {"beta": recipe.beta, "max_length": recipe.max_length, "disable_dropout": False}
        case _:
            return common | {"max_length": None, "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}


def _scheduler(optimizer: Any, setup: Setup) -> Any:
    recipe, first, num = setup.recipe, setup.first_step, setup.plan.num_steps

    def share(step: int) -> float:
        return learning_rate(recipe, min(first + step, num - 1), num) / recipe.peak_lr

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _freeze_reference(adapted: Any) -> None:
    """For dpo, TRL keeps a copy of the start as a second adapter: it is neither trained nor disturbed by dropout."""
    for name, parameter in adapted.named_parameters():
        if ".ref." in name:
            parameter.requires_grad_(False)
    for module in adapted.modules():
        if "ref" in getattr(module, "lora_dropout", {}):
            module.lora_dropout["ref"] = torch.nn.Identity()
