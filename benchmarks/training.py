"""Training throughput: the native trainer beside TRL's arms, same model, same examples, in one run.

    python benchmarks/training.py [--quick] [--method sft|dpo|orpo] [--size tiny|small|qwen3-0.6b|qwen3-8b]

Random weights; examples of log-normal length; tokens are real ones, padding not counted. Each arm runs in a process of
its own, in turns; the best of its rounds counts. The first step of an arm is not timed. Every arm also tells the loss
over all examples before training, so that a fast arm that computes something else is seen: one that packs must agree
with the others, or its examples saw each other.
"""

from __future__ import annotations

import sys

if sys.path[0].endswith("benchmarks"):
    del sys.path[0]  # queue.py beside this script would hide the standard library's

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

EXAMPLES_PER_STEP = 16
MICRO_BATCH = 8
ISOLATED = 1e-3
"""How far an arm's loss may be from ours, relative: packing that mixes examples is off by more."""


@dataclass(frozen=True)
class Size:
    """A model's shape, how long its examples are, and how much of it one step takes."""

    family: str
    shape: dict[str, Any]
    mean_tokens: int
    max_tokens: int
    micro_batch_tokens: int


SIZES = {
    "tiny": Size(
        "llama",
        {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048},
        mean_tokens=120, max_tokens=768, micro_batch_tokens=4096,
    ),
    "small": Size(
        "llama",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
         "tie_word_embeddings": True},
        mean_tokens=120, max_tokens=768, micro_batch_tokens=4096,
    ),
    "qwen3-0.6b": Size(
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
         "tie_word_embeddings": True},
        mean_tokens=363, max_tokens=2048, micro_batch_tokens=32768,
    ),
    "qwen3-8b": Size(
        "qwen3",
        {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096},
        mean_tokens=363, max_tokens=2048, micro_batch_tokens=16384,
    ),
}  # fmt: skip
ARMS = {
    "sft": ["native", "native, padded", "trl default", "trl no checkpointing", "trl packed"],
    "dpo": ["native", "native, padded", "trl default", "trl no checkpointing"],
    "orpo": ["native", "native, padded", "trl default", "trl no checkpointing"],
}


@dataclass(frozen=True)
class Job:
    arm: str
    method: str
    size: str
    steps: int
    seed: int = 1


@dataclass(frozen=True)
class Example:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, one round, without the padded arm")
    parser.add_argument("--method", choices=sorted(ARMS), default="sft")
    parser.add_argument("--size", choices=sorted(SIZES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(run(Job(**json.loads(options.job)))))
        return
    size = options.size or "tiny"
    steps, rounds = options.steps or (2 if options.quick else 8), 1 if options.quick else 3
    has_trl = importlib.util.find_spec("trl") is not None
    arms = [arm for arm in ARMS[options.method] if has_trl or not arm.startswith("trl")]
    if options.quick:
        arms.remove("native, padded")
    describe(size, options.method, has_trl)
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for arm in arms:
            figures = measure(Job(arm, options.method, size, steps))
            if figures and (arm not in best or figures["tokens_per_s"] > best[arm]["tokens_per_s"]):
                best[arm] = figures
    ratios = report(best)
    print(json.dumps({"name": "training", "ratios": ratios, "figures": best}))


def describe(size: str, method: str, has_trl: bool) -> None:
    names = ["torch", "transformers", "peft", *(["trl"] if has_trl else [])]
    print(f"command: python benchmarks/training.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {device_name()}")
    print(f"versions: {', '.join(f'{name} {importlib.metadata.version(name)}' for name in names)}")
    print(f"{method} on {size}: LoRA r 16, {EXAMPLES_PER_STEP} examples a step, mean {SIZES[size].mean_tokens} tokens")
    if not has_trl:
        print("trl is not installed, so its arms are left out: pip install -c constraints.txt -e '.[bench]'")


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def measure(job: Job) -> dict[str, float]:
    """One arm, once, in a process of its own; nothing if it runs out of memory."""
    argv = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{job.arm}: failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
        return {}
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def report(best: dict[str, dict[str, float]]) -> dict[str, float]:
    ours = best["native"]
    ratios = {}
    for arm, figures in best.items():
        ratio = ours["tokens_per_s"] / figures["tokens_per_s"]
        off = abs(figures["start_loss"] / ours["start_loss"] - 1)
        is_same = off < ISOLATED
        print(
            f"{arm:22} {figures['tokens_per_s']:>10,.0f} tokens/s {figures['examples_per_s']:>8.2f} examples/s "
            f"{figures['memory_mb']:>8,.0f} MB   native is {ratio:5.2f} x   loss before {figures['start_loss']:.5f}"
            + ("" if is_same else f"   NOT THE SAME COMPUTATION (off by {off:.1%})")
        )
        if arm != "native" and is_same:
            ratios[arm] = round(ratio, 2)
    return ratios


# ---- what every arm is given -----------------------------------------------------------------------------------------


def examples_of(size: Size, num: int, seed: int) -> list[Example]:
    """A third prompt, the rest answer; for pairs both answers are drawn alike."""
    draw = random.Random(seed)
    vocabulary = size.shape["vocab_size"]

    def tokens(num: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(num)]

    made = []
    for _ in range(num):
        total = min(size.max_tokens, max(8, round(draw.lognormvariate(0.0, 0.7) / 1.278 * size.mean_tokens)))
        prompt = tokens(total // 3)
        answers = [tokens(max(2, round((total - total // 3) * draw.uniform(0.7, 1.3)))) for _ in range(2)]
        made.append(Example(prompt, *[answer[: size.max_tokens - len(prompt)] for answer in answers]))
    return made


def new_model(size: Size) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = type(transformers.AutoConfig.for_model(size.family))(**size.shape, pad_token_id=0, eos_token_id=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    return model.requires_grad_(False)


def run(job: Job) -> dict[str, float]:
    size = SIZES[job.size]
    examples = examples_of(size, EXAMPLES_PER_STEP * (job.steps + 1), job.seed)
    if job.arm.startswith("native"):
        times, start_loss, num_tokens = run_native(job, size, examples)
    else:
        times, start_loss, num_tokens = run_trl(job, size, examples)
    timed = times[1:]
    tokens = sum(num_tokens[1:])
    return {
        "tokens_per_s": tokens / sum(timed),
        "examples_per_s": EXAMPLES_PER_STEP * len(timed) / sum(timed),
        "memory_mb": memory_mb(),
        "start_loss": start_loss,
    }


def memory_mb() -> float:
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def num_tokens_of(method: str, example: Example) -> int:
    """What a trainer without any sharing has to compute; the same count for every arm."""
    num = len(example.prompt) + len(example.chosen)
    return num if method == "sft" else num + len(example.prompt) + len(example.rejected)


# ---- the native trainer ----------------------------------------------------------------------------------------------


def run_native(job: Job, size: Size, examples: list[Example]) -> tuple[list[float], float, list[int]]:
    from tunesmith.domain.profile import Method, Recipe
    from tunesmith.modeling.adapters import new_adapter
    from tunesmith.modeling.chat import Tokenized
    from tunesmith.modeling.packs import Packer, siblings, single
    from tunesmith.modeling.scoring import answer_log_probs
    from tunesmith.trainers.native.objectives import objective_of
    from tunesmith.trainers.native.optimizer import new_optimizer
    from tunesmith.trainers.native.step import StepMaker
    from tunesmith.trainers.native.team import Team

    method = Method(job.method)
    recipe = Recipe(method=method, lora_dropout=0.0, lr=1e-4, warmup=0.0, schedule="constant")
    adapted = new_adapter(new_model(size), recipe)

    def tokenized(name: str, prompt: list[int], answer: list[int]) -> Tokenized:
        return Tokenized(name, (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))

    items = []
    for number, example in enumerate(examples):
        good = tokenized(f"e{number}", example.prompt, example.chosen)
        bad = tokenized(f"e{number}", example.prompt, example.rejected)
        both = siblings(f"e{number}", [good, bad], [True, False], counts_context=method is Method.ORPO)
        items.append(single(good) if method is Method.SFT else both)
    packer = Packer(size.micro_batch_tokens, 0, is_packing=job.arm == "native")
    # the reference is computed ahead, once per dataset: it is no part of a step, here as in TRL's precomputed arm
    reference = answer_log_probs(adapted, items, packer) if method is Method.DPO else {}
    objective = objective_of(method, recipe, reference or {}, {})
    maker = StepMaker(adapted, new_optimizer(adapted, recipe), recipe, packer, objective, Team())
    start_loss = native_loss(adapted, items, packer, objective)
    times, counts = [], []
    for step in range(job.steps + 1):
        part = slice(step * EXAMPLES_PER_STEP, (step + 1) * EXAMPLES_PER_STEP)
        began_at = time.perf_counter()
        maker.make(step, job.steps + 1, items[part])
        times.append(time.perf_counter() - began_at)
        counts.append(sum(num_tokens_of(job.method, example) for example in examples[part]))
    return times, start_loss, counts


def native_loss(adapted: Any, items: list[Any], packer: Any, objective: Any) -> float:
    from tunesmith.modeling.scoring import evaluating, span_log_probs
    from tunesmith.trainers.native.objectives import weigh

    weights = weigh(items)
    with evaluating(adapted):
        passes = [[items[index] for index in group] for group in packer.groups(items)]
        return sum(
            float(objective.terms(some, span_log_probs(adapted, packer.layout(some)), weights, 0.0).loss)
            for some in passes
        )


# ---- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(job: Job, size: Size, examples: list[Example]) -> tuple[list[float], float, list[int]]:
    """TRL's own loop; a callback takes the time of each optimizer step, and the first loss is asked for beforehand."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        trainer = TRL_OF[job.method](job, size, examples, folder)
        start_loss = trl_start_loss(trainer, job.method)
        clock = trl_clock()
        trainer.add_callback(clock)
        trainer.train()
    counts = [
        sum(num_tokens_of(job.method, example) for example in examples[start : start + EXAMPLES_PER_STEP])
        for start in range(0, len(examples), EXAMPLES_PER_STEP)
    ]
    if job.arm == "trl packed":  # it decides itself what a step holds: all of them together are the same tokens
        counts = [sum(counts) // len(clock.times)] * len(clock.times)
    return clock.times, start_loss, counts


def trl_clock() -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self._began_at = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._began_at = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter() - self._began_at)

    return Clock()


def trl_start_loss(trainer: Any, method: str) -> float:
    """Over all examples; sft is weighed by tokens, the others are means over batches, as TRL takes them."""
    import torch

    trainer.model.eval()
    total = weight = 0.0
    with torch.no_grad():
        for batch in map(trainer._prepare_inputs, trainer.get_train_dataloader()):
            num = float((batch["labels"] != -100).sum()) if method == "sft" else 1.0
            total += float(trainer.compute_loss(trainer.model, dict(batch))) * num
            weight += num
    trainer.model.train()
    return total / weight


def trl_settings(job: Job, folder: str, **more: Any) -> dict[str, Any]:
    import torch

    is_cpu = not torch.cuda.is_available()
    return {
        "output_dir": folder, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 1,
        "use_cpu": is_cpu, "bf16": not is_cpu, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "per_device_train_batch_size": MICRO_BATCH, "num_train_epochs": 1,
        "gradient_accumulation_steps": EXAMPLES_PER_STEP // MICRO_BATCH,
        "gradient_checkpointing": job.arm == "trl default", "logging_steps": 1000,
        "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")


def tokenizer_of(size: Size) -> Any:
    """TRL wants one; nothing is tokenised with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(size.shape["vocab_size"])}
    inner = Tokenizer(WordLevel(words, unk_token="<1>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<0>", eos_token="<2>", bos_token="<1>")


def trl_sft(job: Job, size: Size, examples: list[Example], folder: str) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packed = {"packing": True, "max_length": size.micro_batch_tokens, "per_device_train_batch_size": 1}
    args = trl_settings(job, folder, **(packed if job.arm == "trl packed" else {"max_length": None}))
    if job.arm == "trl packed":
        args["gradient_accumulation_steps"] = 1
    rows = {
        "input_ids": [example.prompt + example.chosen for example in examples],
        "labels": [[-100] * len(example.prompt) + example.chosen for example in examples],
    }
    return SFTTrainer(
        new_model(size), args=SFTConfig(**args), train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer_of(size), peft_config=lora(),
    )  # fmt: skip


def trl_dpo(job: Job, size: Size, examples: list[Example], folder: str) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    rows = {
        "prompt_ids": [example.prompt for example in examples],
        "chosen_ids": [example.chosen for example in examples],
        "rejected_ids": [example.rejected for example in examples],
    }
    args = trl_settings(job, folder, max_length=None, precompute_ref_log_probs=True, beta=0.1)
    return Tokenized(
        new_model(size), args=DPOConfig(**args), train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer_of(size), peft_config=lora(),
    )  # fmt: skip


def trl_orpo(job: Job, size: Size, examples: list[Example], folder: str) -> Any:
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    by_text = {f"p{number}": example for number, example in enumerate(examples)}

    class Tokenized(ORPOTrainer):  # type: ignore[misc]
        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            example, row = by_text[feature["prompt"]], {}
            for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
                row[f"{name}_input_ids"] = example.prompt + answer
                row[f"{name}_attention_mask"] = [1] * len(row[f"{name}_input_ids"])
                row[f"{name}_labels"] = [-100] * len(example.prompt) + answer
            row |= {"prompt_input_ids": example.prompt, "prompt_attention_mask": [1] * len(example.prompt)}
            return row

    texts = list(by_text)
    args = trl_settings(job, folder, max_length=size.max_tokens, beta=0.1, remove_unused_columns=False)
    return Tokenized(
        new_model(size), args=ORPOConfig(**args),
        train_dataset=Dataset.from_dict({"prompt": texts, "chosen": texts, "rejected": texts}),
        processing_class=tokenizer_of(size), peft_config=lora(),
    )  # fmt: skip


TRL_OF = {"sft": trl_sft, "dpo": trl_dpo, "orpo": trl_orpo}

if __name__ == "__main__":
    main()
