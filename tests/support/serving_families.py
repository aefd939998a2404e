"""Tiny random models of every family whose adapters can be converted to GGUF, and their GGUF twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.serving_bases import CONTEXT, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS
from tunesmith.demo.base_model import CHAT_TEMPLATE, byte_tokenizer
from tunesmith.deployment.targets.gguf_adapter import ROTATED, rotated_rows

_HEAD = HIDDEN // HEADS


def _settings() -> dict[str, Any]:
    return {
        "vocab_size": len(byte_tokenizer()),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _make(family: str) -> Any:
    import transformers as hf

    common = _settings()
    scaled = {"head_dim": _HEAD, "query_pre_attn_scalar": _HEAD, "sliding_window": CONTEXT}
    makers: dict[str, Callable[[], Any]] = {
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**common, head_dim=_HEAD, sliding_window=None)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**common)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**common, head_dim=_HEAD)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**common, head_dim=_HEAD)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**common, **scaled)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**common, **scaled, layer_types=["sliding_attention"] * LAYERS)
        ),
    }
    return makers[family]()


FAMILIES = ("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")


def a_model(family: str) -> Any:
    """Its embeddings are small enough that a token does not only predict itself."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _make(family).eval()
    if family.startswith("gemma"):
        model.get_input_embeddings().weight.data *= 0.1
    return model


def write_family(family: str, path: Path) -> Path:
    import gguf

    model, tokenizer = a_model(family), byte_tokenizer()
    architecture = {"mistral": "llama"}.get(family, family)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokenizer))
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    turning = config.rope_parameters
    writer.add_rope_freq_base(turning.get("full_attention", turning)["rope_theta"])
    if architecture in ROTATED:
        writer.add_rope_dimension_count(_HEAD)
    if family in ("gemma2", "gemma3"):
        writer.add_sliding_window(CONTEXT)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_tokens(writer, tokenizer)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), LAYERS
    )
    for key, weight in model.state_dict().items():
        values = weight.float().numpy()
        if family.startswith("gemma"):
            if key == "lm_head.weight":
                continue  # tied
            values = values + 1 if key.endswith("norm.weight") else values
        if architecture in ROTATED and key.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotated_rows(values, HEADS if "q_proj" in key else KV_HEADS)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokens(writer: Any, tokenizer: Any) -> None:
    import gguf

    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges(["ÿ ÿ"])  # a list may not be empty; this pair makes no known token, so it merges nothing
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
