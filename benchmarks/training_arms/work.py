"""What every arm is given: the same model with random weights, the same examples, and how long to go on."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

EXAMPLES_PER_STEP = 16
"""Of a step where no number of tokens was asked for."""
NUM_CHECKED = 32
"""Examples whose loss every arm tells before training."""


@dataclass(frozen=True)
class Size:
    """A model's shape, how long its examples are, and how much of it one step and one pass take."""

    family: str
    shape: dict[str, Any]
    mean_tokens: int
    """Before the longest are cut off."""
    max_tokens: int
    spread: float
    """Of the logarithm of a length."""
    prompt_share: float
    """Of an example of sft; what is left is learnt. 0: every token is learnt."""
    pair_tokens: tuple[int, int] | None
    """Of a pair, the mean tokens of its prompt and of each answer; None: as an example of sft, with two answers."""
    pack_tokens: int
    tokens_per_step: int
    """0: as many as `EXAMPLES_PER_STEP` examples have."""


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, is_tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip


def _for_cpu(shape: dict[str, Any]) -> Size:
    return Size("llama", shape, 120, 768, 0.7, 1 / 3, None, pack_tokens=4096, tokens_per_step=0)


def _for_gpu(shape: dict[str, Any], pack_tokens: int, tokens_per_step: int) -> Size:
    return Size("qwen3", shape, 372, 2048, 0.8, 0.0, (470, 155), pack_tokens, tokens_per_step)


SIZES = {
    "tiny": _for_cpu(
        {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048},
    ),
    "small": _for_cpu(
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
         "tie_word_embeddings": True},
    ),
    "qwen3-0.6b": _for_gpu(_qwen3(1024, 3072, 28, 16, is_tied=True), 32768, 65536),
    "qwen3-1.7b": _for_gpu(_qwen3(2048, 6144, 28, 16, is_tied=True), 32768, 65536),
    "qwen3-8b": _for_gpu(_qwen3(4096, 12288, 36, 32, is_tied=False), 16384, 32768),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One arm, once."""

    arm: str
    method: str
    size: str
    steps: int
    """Most timed steps."""
    seconds: float
    """About how long to time; 0: all the steps."""
    warm_up: int
    """Steps before the timed ones: kernels are compiled and memory is found in them."""
    tokens_per_step: int
    pack_tokens: int
    checkpointed_layers: int = 0
    longest: int = 0
    """Tokens of the longest example, which there is then one of; 0: as the size has it."""
    quantize: str = "none"
    is_profiled: bool = False
    seed: int = 1


@dataclass(frozen=True)
class Example:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    def num_tokens(self, method: str, *, is_shared: bool = False) -> int:
        """Of all its conversations, each with its prompt; shared, the prompt of a pair counts once."""
        num = len(self.prompt) + len(self.chosen)
        if method == "sft":
            return num
        return num + len(self.rejected) + (0 if is_shared else len(self.prompt))


@dataclass
class Measured:
    """What an arm did in its timed part, and what led up to it."""

    seconds: float
    examples: int
    tokens: int
    """Real ones, every conversation with its prompt: the same for every arm that saw the same examples."""
    computed_tokens: int
    """Those that really went through the model; padding not counted."""
    start_loss: float
    losses: list[float]
    start_up_s: float
    """Warm-up steps, compilation in them; and what has to be known of the dataset before the first step."""
    more: dict[str, Any] = field(default_factory=dict)


def examples_of(job: Job) -> list[Example]:
    """As many as the warm-up and all timed steps take; the same ones for every arm."""
    import numpy

    size, num_steps = SIZES[job.size], job.warm_up + job.steps
    max_tokens = job.longest or size.max_tokens
    draw = numpy.random.default_rng(job.seed)

    def tokens(num: int) -> list[int]:
        found: list[int] = draw.integers(10, size.shape["vocab_size"], num).tolist()
        return found

    def length(mean: float, spread: float, most: int) -> int:
        return min(most, max(8, round(mean * float(draw.lognormal(-spread * spread / 2, spread)))))

    made: list[Example] = []
    total = 0
    while total < job.tokens_per_step * num_steps if job.tokens_per_step else len(made) < EXAMPLES_PER_STEP * num_steps:
        if job.method != "sft" and size.pair_tokens is not None:
            prompt = tokens(length(size.pair_tokens[0], 0.7, 2 * max_tokens // 3))
            answers = [tokens(length(size.pair_tokens[1], 0.7, max_tokens // 3)) for _ in range(2)]
        else:
            num = length(size.mean_tokens, size.spread, max_tokens)
            prompt = tokens(max(1, round(num * size.prompt_share)))
            answers = [tokens(max(2, round((num - len(prompt)) * scale))) for scale in (1.0, draw.uniform(0.7, 1.3))]
        if job.longest and not made:
            answers[0] = tokens(job.longest - len(prompt))
        made.append(Example(prompt, *[answer[: max_tokens - len(prompt)] for answer in answers]))
        total += made[-1].num_tokens(job.method, is_shared=True)
    return made


def examples_per_step(job: Job, examples: list[Example], multiple: int) -> int:
    """About as many as a step of the native trainer has, in whole batches."""
    if not job.tokens_per_step:
        return EXAMPLES_PER_STEP
    mean = sum(example.num_tokens(job.method, is_shared=True) for example in examples) / len(examples)
    return max(1, round(job.tokens_per_step / mean / multiple)) * multiple


def new_model(size: Size) -> Any:
    """Random weights, made where they are used; bf16 on a GPU."""
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


def num_parameters(model: Any) -> int:
    return sum(tensor.numel() for tensor in model.parameters())


def wait_for_device() -> None:
    """What was asked of a GPU is only queued: a clock must be read after it is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gb() -> float:
    """Of the GPU's allocator since `forget_peak`, or of this process on a CPU."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def num_timed(seconds: float, one_s: float, most: int, least: int = 1) -> int:
    """How many of something that takes so long make about `seconds`; all of them if that is 0."""
    return max(least, min(most, round(seconds / max(one_s, 1e-6)))) if seconds else most
