"""TRL's arms: its own trainers and loops on the same model and the same examples; a callback reads the clock."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from benchmarks.training_arms.work import (
    NUM_CHECKED,
    SIZES,
    Example,
    Job,
    Measured,
    Size,
    examples_of,
    examples_per_step,
    forget_peak,
    new_model,
    num_parameters,
    num_timed,
    wait_for_device,
)

_WARM_UP, _MOST = 4, 48
"""Batches on a GPU: untimed, and at most. A step has many; timing whole steps of a slow arm would take minutes."""
_PACKED_LENGTH, _PACKED_ROWS = 2048, 8


def run_trl(job: Job) -> Measured:
    """The clock runs over batches, not steps: the update itself is a thousandth of a step's work."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    plan = _Plan(job, examples_of(job))
    with tempfile.TemporaryDirectory() as folder:
        began_at = time.perf_counter()
        trainer = TRAINERS[job.method](plan, folder)
        reference_s = time.perf_counter() - began_at if plan.is_ahead else 0.0
        start_loss = _start_loss(trainer, job.method)
        more: dict[str, Any] = {"num_parameters": num_parameters(trainer.model.get_base_model())}
        more["num_parameters"] -= sum(t.numel() for t in trainer.model.parameters() if t.requires_grad)
        if plan.is_packed:
            more["is_isolated"] = _is_isolated(trainer)
        clock = _clock(plan)
        trainer.add_callback(clock)
        forget_peak()
        trainer.train()
    rows = _rows_seen(trainer, plan, clock.first, clock.last)
    return Measured(
        seconds=clock.seconds,
        examples=sum(row[0] for row in rows),
        tokens=sum(row[1] for row in rows),
        computed_tokens=sum(row[1] for row in rows),
        start_loss=start_loss,
        losses=clock.losses,
        start_up_s=clock.start_up_s + reference_s,
        more=more | {"batches": clock.last - clock.first},
    )


class _Plan:
    """How an arm cuts its examples into batches and steps."""

    def __init__(self, job: Job, examples: list[Example]) -> None:
        import torch

        self.job, self.size = job, SIZES[job.size]
        self.is_cuda = torch.cuda.is_available()
        self.is_packed, self.is_liger = "packed" in job.arm, "liger" in job.arm
        self.is_ahead = "ahead" in job.arm
        self.is_checkpointing = job.arm == "trl default"
        self.batch = (16 if job.method == "sft" else 8) if self.is_cuda else 8
        self.accumulation = examples_per_step(job, examples, self.batch) // self.batch
        self.max_length = self.size.max_tokens
        if self.is_packed and self.is_cuda:
            self.batch, self.max_length = _PACKED_ROWS, _PACKED_LENGTH
            self.accumulation = max(1, job.tokens_per_step // (_PACKED_ROWS * _PACKED_LENGTH))
        elif self.is_packed:
            self.batch, self.max_length, self.accumulation = 1, job.pack_tokens, 1
        most = _WARM_UP + _MOST if self.is_cuda and not self.is_packed else len(examples)
        self.examples = examples[: -(-most // self.accumulation) * self.accumulation * self.batch]
        self.checked = examples[:NUM_CHECKED]

    @property
    def warm_up(self) -> int:
        """Batches."""
        if self.is_cuda:
            return _WARM_UP
        return 1 if self.is_packed else self.job.warm_up * self.accumulation


def _clock(plan: _Plan) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Waits for the device only where the timed part begins and ends, and once before to see how long one takes."""

        def __init__(self) -> None:
            self.first = plan.warm_up
            self.last = 0
            self.seconds = self.start_up_s = 0.0
            self.losses: list[float] = []
            self._done = 0
            self._began_at = self._half_at = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._began_at = time.perf_counter()

        def on_substep_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
            return self._count(state, control)

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
            return self._count(state, control)

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
            self.losses += [float(logs["loss"])] if "loss" in logs else []

        def _count(self, state: Any, control: Any) -> Any:
            self._done += 1
            if self._done == self.first - self.first // 2:
                wait_for_device()
                self._half_at = time.perf_counter()
            if self._done == self.first:
                wait_for_device()
                now = time.perf_counter()
                self.start_up_s = now - self._began_at
                one_s = (now - self._half_at) / (self.first // 2) if self.first > 1 else self.start_up_s
                left = state.max_steps * plan.accumulation - self._done
                self.last = self._done + num_timed(plan.job.seconds, one_s, max(1, left), least=min(3, left))
                self._began_at = time.perf_counter()
            elif self._done == self.last:
                wait_for_device()
                self.seconds = time.perf_counter() - self._began_at
                control.should_training_stop = True
            return control

    return Clock()


def _rows_seen(trainer: Any, plan: _Plan, first: int, last: int) -> list[tuple[int, int]]:
    """Of each example, or packed row, of the timed batches: how many examples and how many tokens it holds."""
    part = slice(first * plan.batch, last * plan.batch)
    if not plan.is_packed:
        return [(1, example.num_tokens(plan.job.method)) for example in plan.examples[part]]
    rows = trainer.train_dataset[part]
    return [(len(lengths), len(ids)) for lengths, ids in zip(rows["seq_lengths"], rows["input_ids"], strict=True)]


def _start_loss(trainer: Any, method: str) -> float:
    """Of the checked examples, in train mode: there is no dropout, and some kernels are only used there.

    sft is weighed by tokens; the others are means over batches, as TRL takes them.
    """
    import torch

    trainer.model.train()
    total = weight = 0.0
    with torch.no_grad():
        for batch in map(trainer._prepare_inputs, trainer.get_eval_dataloader()):
            num = float((batch["labels"][:, 1:] != -100).sum()) if method == "sft" else 1.0
            total += float(trainer.compute_loss(trainer.model, dict(batch))) * num
            weight += num
    return total / weight


def _is_isolated(trainer: Any) -> bool:
    """Whether an example of a packed row stays as it is when the one in front of it becomes another."""
    import torch

    batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
    second = int((batch["position_ids"][0] == 0).nonzero()[1])
    ids, positions = batch["input_ids"][:1, : second + 512], batch["position_ids"][:1, : second + 512]
    other = ids.clone()
    other[0, :second] = ids[0, :second].flip(0)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        before, after = (
            trainer.model(input_ids=some, position_ids=positions, use_cache=False).logits[0, second:].float()
            for some in (ids, other)
        )
    return bool((before - after).abs().max() <= 1e-3 * before.abs().max())


def _settings(plan: _Plan, folder: str, num_rows: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 1,
        "use_cpu": not plan.is_cuda, "bf16": plan.is_cuda, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": plan.batch, "per_device_eval_batch_size": plan.batch,
        "gradient_accumulation_steps": plan.accumulation, "max_length": plan.max_length,
        "max_steps": max(1, num_rows // (plan.batch * plan.accumulation)),
        "gradient_checkpointing": plan.is_checkpointing, "logging_steps": 1, "logging_nan_inf_filter": False,
        "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")


def _tokenizer(size: Size) -> Any:
    """TRL wants one; nothing is tokenised with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(size.shape["vocab_size"])}
    inner = Tokenizer(WordLevel(words, unk_token="<1>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<0>", eos_token="<2>", bos_token="<1>")


def _sft(plan: _Plan, folder: str) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def rows(examples: list[Example]) -> Any:
        return Dataset.from_dict(
            {
                "input_ids": [example.prompt + example.chosen for example in examples],
                "labels": [[-100] * len(example.prompt) + example.chosen for example in examples],
            }
        )

    num_rows = len(plan.examples)
    if plan.is_packed:  # nothing is cut, so it cannot be fewer rows than this
        num_rows = -(-sum(example.num_tokens("sft") for example in plan.examples) // plan.max_length)
    args = _settings(plan, folder, num_rows, packing=plan.is_packed, use_liger_kernel=plan.is_liger)
    return SFTTrainer(
        new_model(plan.size), args=SFTConfig(**args), train_dataset=rows(plan.examples),
        eval_dataset=rows(plan.checked), processing_class=_tokenizer(plan.size), peft_config=_lora(),
    )  # fmt: skip


def _dpo(plan: _Plan, folder: str) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    def rows(examples: list[Example]) -> Any:
        return Dataset.from_dict(
            {
                "prompt_ids": [example.prompt for example in examples],
                "chosen_ids": [example.chosen for example in examples],
                "rejected_ids": [example.rejected for example in examples],
            }
        )

    args = _settings(plan, folder, len(plan.examples), precompute_ref_log_probs=plan.is_ahead, beta=0.1)
    return Tokenized(
        new_model(plan.size), args=DPOConfig(**args), train_dataset=rows(plan.examples),
        eval_dataset=rows(plan.checked), processing_class=_tokenizer(plan.size), peft_config=_lora(),
    )  # fmt: skip


def _orpo(plan: _Plan, folder: str) -> Any:
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    by_text = {f"p{number}": example for number, example in enumerate(plan.examples)}
    by_text |= {f"c{number}": example for number, example in enumerate(plan.checked)}

    class Tokenized(ORPOTrainer):  # type: ignore[misc]
        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            example, row = by_text[feature["prompt"]], {}
            for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
                row[f"{name}_input_ids"] = example.prompt + answer
                row[f"{name}_attention_mask"] = [1] * len(row[f"{name}_input_ids"])
                row[f"{name}_labels"] = [-100] * len(example.prompt) + answer
            row |= {"prompt_input_ids": example.prompt, "prompt_attention_mask": [1] * len(example.prompt)}
            return row

    def rows(first: str) -> Any:
        texts = [text for text in by_text if text.startswith(first)]
        return Dataset.from_dict({"prompt": texts, "chosen": texts, "rejected": texts})

    args = _settings(plan, folder, len(plan.examples), beta=0.1, remove_unused_columns=False)
    return Tokenized(
        new_model(plan.size), args=ORPOConfig(**args), train_dataset=rows("p"), eval_dataset=rows("c"),
        processing_class=_tokenizer(plan.size), peft_config=_lora(),
    )  # fmt: skip


TRAINERS = {"sft": _sft, "dpo": _dpo, "orpo": _orpo}
