"""Every family of models writes in a batch what it writes alone; what fails fails alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from support.engine import asking
from tunesmith.models.adapter_weights import AdapterReader
from tunesmith.models.adapters import save_adapter
from tunesmith.serving.engine.lora_layers import LoraLayers
from tunesmith.serving.engine.scheduler import Scheduler
from tunesmith.serving.engine.sequence_state import EngineRefusal, SequenceState

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA: dict[str, Any] = {**COMMON, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "one window": ("slots", lambda: transformers.MistralConfig(**COMMON, sliding_window=8)),
    "windows in some layers": ("slots", lambda: transformers.Gemma3TextConfig(**GEMMA)),
    "capped scores": ("slots", lambda: transformers.Gemma2Config(**GEMMA)),
    "learned positions": (
        "slots",
        lambda: transformers.GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3, eos_token_id=2
        ),
    ),
    "experts": ("slots", lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4)),
    "convolutions": (
        "sequential",
        lambda: transformers.Lfm2Config(**COMMON, layer_types=["conv", "full_attention", "conv"]),
    ),
    "no attention": (
        "no_cache",
        lambda: transformers.MambaConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3, eos_token_id=2
        ),
    ),
}


class Plain:
    """Tokens without text."""

    stop_ids = frozenset({2})

    def text_of(self, ids: Any) -> str:
        return ""

    def token_text(self, token: int) -> str:
        return ""


class Heard:
    def __init__(self) -> None:
        self.refused: dict[str, EngineRefusal] = {}

    def delta(self, row: SequenceState, text: str, tokens: Any) -> None:
        pass

    def ended(self, row: SequenceState, finish: str) -> None:
        pass

    def failed(self, row: SequenceState, refusal: EngineRefusal) -> None:
        self.refused[row.id] = refusal


def a_model(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def some_rows(num: int, heard: Heard, adapters: tuple[str | None, ...] = (None,)) -> list[SequenceState]:
    luck, rows = random.Random(1), []
    for number in range(num):
        prompt = tuple(luck.randint(3, 96) for _ in range(luck.randint(2, 20)))
        asked = asking("", adapters[number % len(adapters)], prompt=prompt, max_tokens=14)
        rows.append(SequenceState.of(asked, prompt, 256, Plain(), heard))
        rows[-1].id = str(number)
    return rows


def write(scheduler: Scheduler, rows: list[SequenceState], *, at_once: bool = False) -> None:
    with torch.inference_mode():
        for row in rows:
            scheduler.waiting.append(row)
            if not at_once:
                scheduler.step()
        while not scheduler.is_idle:
            scheduler.step()


def alone(model: Any, prompt: tuple[int, ...]) -> list[int]:
    made = model.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    return list(made[0, len(prompt) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_family_writes_in_a_batch_what_it_writes_alone(family: str) -> None:
    runner_kind, config = FAMILIES[family]
    model, heard = a_model(config()), Heard()
    reference = copy.deepcopy(model)
    scheduler = Scheduler(model, LoraLayers(model), 0, 4)
    scheduler._pass_tokens = 12  # prompts take several passes, between which others are answered
    rows = some_rows(7, heard)
    write(scheduler, rows)
    assert scheduler.runner_kind == runner_kind
    assert not heard.refused
    assert [row.ids for row in rows] == [alone(reference, row.prompt) for row in rows]
    assert len({tuple(row.ids) for row in rows}) > 4, "rows that all say the same prove nothing"


def test_model_that_lays_rows_together_computes_each_adapter_by_itself(tmp_path: Path) -> None:
    config = transformers.Qwen2MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
    )
    model, heard = a_model(config), Heard()
    lora_layers, reader, references = LoraLayers(model), AdapterReader(model), {}
    for seed, name in enumerate(("a", "b")):
        modules = ["q_proj", "shared_expert.up_proj"]
        adapted = get_peft_model(copy.deepcopy(a_model(config)), LoraConfig(r=4, target_modules=modules))
        torch.manual_seed(seed)
        for key, tensor in adapted.named_parameters():
            if "lora_" in key:
                tensor.data.normal_(std=0.4)
        save_adapter(adapted, tmp_path / name, "base")
        references[name] = adapted
    for name in references:
        lora_layers.add(name, reader.read(tmp_path / name))
    scheduler, rows = Scheduler(model, lora_layers, 0, 6), some_rows(8, heard, ("a", "b"))
    write(scheduler, rows[:1])
    assert lora_layers.supports_mixed_batch
    write(scheduler, rows[1:], at_once=True)
    assert not heard.refused
    assert not lora_layers.supports_mixed_batch
    assert [row.ids for row in rows] == [alone(references[str(row.adapter)], row.prompt) for row in rows]


def test_too_little_memory_fails_the_last_to_come_and_the_others_go_on() -> None:
    model, heard = a_model(transformers.LlamaConfig(**COMMON)), Heard()
    reference = copy.deepcopy(model)
    scheduler, rows = Scheduler(model, LoraLayers(model), 0, 8), some_rows(6, heard)
    forward = model.forward

    def scarce(input_ids: Any, **kwargs: Any) -> Any:
        if input_ids.shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(input_ids=input_ids, **kwargs)

    model.forward = scarce
    write(scheduler, rows)
    assert 0 < len(heard.refused) < 6
    assert {(one.code, one.status) for one in heard.refused.values()} == {("out_of_memory", 503)}
    for row in rows:
        if row.id not in heard.refused:
            assert row.ids == alone(reference, row.prompt)


def test_row_that_cannot_be_computed_fails_alone() -> None:
    model, heard = a_model(transformers.LlamaConfig(**COMMON)), Heard()
    scheduler, rows = Scheduler(model, LoraLayers(model), 0, 8), some_rows(4, heard)
    rows[2].prompt = (5, 9999)  # no such token
    write(scheduler, rows, at_once=True)
    assert list(heard.refused) == ["2"]
    assert heard.refused["2"].code == "engine"
    assert all(row.ids for row in rows if row.id != "2")


def test_row_taken_out_while_prompts_are_read_leaves_the_others_right() -> None:
    model, heard = a_model(transformers.LlamaConfig(**COMMON)), Heard()
    reference = copy.deepcopy(model)
    scheduler, rows = Scheduler(model, LoraLayers(model), 0, 8), some_rows(5, heard)
    scheduler._pass_tokens = 10
    with torch.inference_mode():
        scheduler.waiting.extend(rows)
        scheduler.step()
        assert scheduler.remove("1") is rows[1]
        assert scheduler.remove("1") is None
        while not scheduler.is_idle:
            scheduler.step()
    assert rows[1].ids == []
    others = [row for row in rows if row.id != "1"]
    assert [row.ids for row in others] == [alone(reference, row.prompt) for row in others]
