"""A tiny random Llama, its GGUF twin with the same tokens and numbers, and adapters that change what it says."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tunesmith.core.files import publish_folder
from tunesmith.demo.base_model import CHAT_TEMPLATE, byte_tokenizer
from tunesmith.deployment.targets.base import ServedAdapter

CONTEXT = 512
HEADS, KV_HEADS, LAYERS, HIDDEN, INNER = 4, 2, 2, 128, 256
RANK, ALPHA = 4, 8


def a_tiny_llama(seed: int = 0) -> Any:
    """Large enough for the kernels of vLLM, and with weights so large that greedy answers differ clearly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=HIDDEN,
                intermediate_size=INNER,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                max_position_embeddings=CONTEXT,
                initializer_range=0.2,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        ).eval()


def save_base(folder: Path) -> Path:
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        a_tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def an_adapter(
    folder: Path, name: str, *, seed: int, rslora: bool = False, rank: int = RANK, base: Any = None
) -> ServedAdapter:
    """A published LoRA with random A and B on every linear layer."""
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=rslora)
    model = get_peft_model(a_tiny_llama() if base is None else base, config)
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data.normal_(0.0, 0.3, generator=generator)
    staged = folder / f".{name}"
    model.save_pretrained(staged)
    manifest = publish_folder(staged, folder / name)
    return ServedAdapter(name, folder / name, manifest.digest)


def write_gguf(path: Path) -> Path:
    """The same base for llama.cpp, in 32 bits: what differs is then nobody's rounding."""
    import gguf

    from tunesmith.deployment.targets.gguf_adapter import rotated_rows

    model, tokenizer = a_tiny_llama(), byte_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokenizer))
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges(["ÿ ÿ"])  # a list may not be empty; this pair makes no known token, so it merges nothing
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for key, weight in model.state_dict().items():
        values = weight.float().numpy()
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotated_rows(values, HEADS if "q_proj" in key else KV_HEADS)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(
    adapter: ServedAdapter | None, content: str, max_tokens: int, base: Any = None
) -> tuple[list[int], list[int], list[float]]:
    """Prompt, answer and log-probabilities in the trainer's stack: transformers and peft in float32."""
    import torch
    from peft import PeftModel

    tokenizer, model = byte_tokenizer(), a_tiny_llama() if base is None else base
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter.path)).eval()
    messages = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids, answer, log_probs = list(prompt_ids), [], []
    with torch.no_grad():
        for _ in range(max_tokens):
            scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
            token = int(scores.argmax())
            ids.append(token)
            answer.append(token)
            log_probs.append(float(scores[token]))
            if token == tokenizer.eos_token_id:
                break
    return list(prompt_ids), answer, log_probs
