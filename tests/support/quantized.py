"""For tests of a base in 4 bits, on a CPU and on CUDA: bitsandbytes or a skip, and a base that fits into blocks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tunesmith.demo.base_model import byte_tokenizer
from tunesmith.runs.spec import BaseModelRef


def skip_without_bitsandbytes() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # whatever its native part raises
        pytest.skip(f"bitsandbytes cannot be imported ({error}): pip install 'tunesmith[qlora]'")


def a_base_of_blocks(folder: Path) -> BaseModelRef:
    """A random Llama with rows of 64 weights and more, and biases: small, and every linear layer fits into NF4."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.native import a_base_ref

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=256,
                attention_bias=True,
                tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        for name, tensor in model.named_parameters():
            if name.endswith(".bias"):
                tensor.data.normal_(std=0.02)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return a_base_ref(folder)
