"""The demo's base: a Llama of under a million parameters with a byte tokenizer, trained here in about a minute.

It learns to turn dates in words into ISO dates (`dates.base_rows`) and is saved as an ordinary Hugging Face folder.
`cached_base` builds it once per cache folder, also when two processes ask at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.environment import set_defaults_here
from tunesmith.core.errors import DataError
from tunesmith.core.files import publish_folder, verify_folder
from tunesmith.demo import dates
from tunesmith.models.chat import ChatFormat

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CONTEXT = 256


@dataclass(frozen=True)
class _Size:
    """Shape and training of a base."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    steps: int
    batch: int
    adam_lr: float = 3e-3
    muon_lr: float = 0.02
    warmup: int = 20
    cooldown: float = 0.4
    """Share of the steps in which the learning rates fall to zero."""
    prompt_weight: float = 0.3
    """How much the bytes of the question count: reading them well is half of the task."""


_FULL = _Size(hidden=192, layers=2, heads=6, feed_forward=512, steps=250, batch=32)
_QUICK = _Size(hidden=96, layers=2, heads=3, feed_forward=256, steps=150, batch=32)


def cached_base(cache_dir: Path, quick: bool = False, on_progress: Progress | None = None) -> Path:
    """The folder of the built base; built now unless the cache has it whole."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    name = f"demo-base-{'quick' if quick else 'full'}-{_recipe_hash()[:12]}"
    final = cache_dir / name
    with (cache_dir / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, then finds the first one's work
        if _is_whole(final):
            return final
        staged = cache_dir / f".building-{name}"
        for leftover in (staged, final):
            shutil.rmtree(leftover, ignore_errors=True)
        build_base(staged, quick=quick, on_progress=on_progress)
        publish_folder(staged, final)
    return final


def build_base(folder: Path, *, quick: bool, on_progress: Progress | None = None) -> None:
    """Train the base and save it into the folder in Hugging Face format."""
    set_defaults_here()
    import torch
    import transformers

    size = _QUICK if quick else _FULL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = byte_tokenizer()
        model = _new_model(size, tokenizer)
        _train(model, tokenizer, size, on_progress or (lambda _done, _total: None))
    transformers.utils.logging.disable_progress_bar()  # the caller has one of its own
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """One token per byte, and one per special marker."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",  # noqa: S106 (a marker, no password)
        bos_token="<|begin|>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _new_model(size: _Size, tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def _train(model: Any, tokenizer: Any, size: _Size, on_progress: Progress) -> None:
    """Muon for the matrices, AdamW for the rest: with AdamW alone the same quality takes three times as long."""
    import torch

    chat = ChatFormat(tokenizer)
    rows = dates.base_rows(size.steps * size.batch, seed=0)
    examples = [chat.tokenize(str(number), row["messages"]) for number, row in enumerate(rows)]
    matrices = [tensor for name, tensor in model.named_parameters() if tensor.ndim == 2 and "embed" not in name]
    rest = [tensor for tensor in model.parameters() if all(tensor is not matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=size.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=size.adam_lr, weight_decay=0.01, betas=(0.9, 0.98), fused=True),
    )
    peaks = (size.muon_lr, size.adam_lr)
    model.train()
    for step in range(size.steps):
        factor = min(1.0, (step + 1) / size.warmup, (size.steps - step) / (size.steps * size.cooldown))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad(set_to_none=True)
        batch = examples[step * size.batch : (step + 1) * size.batch]
        _loss(model, batch, tokenizer.pad_token_id, size.prompt_weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        on_progress(step + 1, size.steps)
    model.eval()


def _loss(model: Any, batch: Any, pad_id: int, prompt_weight: float) -> Any:
    import torch

    width = max(len(example) for example in batch)
    ids = torch.tensor([[*example.ids, *[pad_id] * (width - len(example))] for example in batch])
    answers = torch.tensor([[*example.loss_mask, *[False] * (width - len(example))] for example in batch])[:, 1:]
    questions = (ids[:, 1:] != pad_id) & ~answers
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    losses = losses.view(answers.shape)
    return losses[answers].mean() + prompt_weight * losses[questions].mean()


def _recipe_hash() -> str:
    """Changes with anything that could change the base: this file and the rows it learns from."""
    sources = (Path(__file__), Path(dates.__file__))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        verify_folder(folder)
    except DataError:
        return False
    return True
