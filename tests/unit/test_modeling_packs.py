"""Packs: every family of models computes packed sequences as it computes them alone, and nothing is lost or cut."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.models.attention import SegmentAttention
from tunesmith.models.chat import Tokenized
from tunesmith.models.packs import Completion, Item, Packer, best_fit, packed, padded, single, with_shared_prompt
from tunesmith.models.scoring import evaluating, span_log_probs, supports_packing
from tunesmith.models.segments import Segment
from tunesmith.profiles.profile import FAMILIES

WINDOW = 7  # shorter than the sequences, so that it matters


def a_model(family: str) -> Any:
    """A random model of a family, with weights large enough that what a token sees changes what it says."""
    shape: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config_type = type(transformers.AutoConfig.for_model(family))
    known = set(config_type().to_dict())
    for name, value in (("head_dim", 8), ("sliding_window", WINDOW), ("query_pre_attn_scalar", 8)):
        shape |= {name: value} if name in known else {}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_type(**shape)).eval()


def trained(ids: list[int], *, skip: int = 0) -> Completion:
    return Completion(tuple(ids), tuple(place >= skip for place in range(len(ids))))


def some_items() -> list[Item]:
    ids = [(11 * number + 3) % 97 for number in range(60)]
    return [
        Item("pair", tuple(ids[:12]), (trained(ids[12:16]), trained(ids[16:25])), counts_context=True),
        Item("alone", (), (trained(ids[25:45], skip=8),)),
        Item("prompted", tuple(ids[45:50]), (trained(ids[50:60]),)),
    ]


@pytest.mark.parametrize("family", sorted(set().union(*FAMILIES.values())))
def test_every_family_keeps_packed_examples_apart(family: str) -> None:
    model, items = a_model(family), some_items()
    before = model.config._attn_implementation
    with evaluating(model):
        together = span_log_probs(model, packed(items))
        apart = torch.cat([span_log_probs(model, padded([item], 0)) for item in items])
        row = packed(items)
        mixed = span_log_probs(model, replace(row, segments=(Segment(sum(s.length for s in row.segments or ())),)))
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    assert float((mixed - apart).abs().max()) > 0.1, "the test could not have failed"
    assert supports_packing(model)
    assert model.config._attn_implementation == before


def test_a_model_that_ignores_the_segments_is_found_out() -> None:
    model = a_model("llama")
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def deaf(*args: Any, plain: Any = plain, segment_attention: Any = None, **options: Any) -> Any:
            length = options["hidden_states"].shape[1] if "hidden_states" in options else args[0].shape[1]
            own = SegmentAttention((Segment(length),), torch.device("cpu"))
            return plain(*args, segment_attention=own, **options)

        layer.self_attn.forward = deaf
    assert not supports_packing(model)


@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 100))
def test_best_fit_holds_every_index_once_within_the_capacity(sizes: list[int], capacity: int) -> None:
    groups = best_fit(sizes, capacity)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(sizes[index] for index in group) <= capacity for group in groups)
    loads = sorted(sum(sizes[index] for index in group) for group in groups)
    assert all(a + b > capacity for a, b in itertools.pairwise(loads)), "two groups would fit into one"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20), st.integers(1, 200))
def test_padded_groups_stay_within_the_limit(lengths: list[tuple[int, int]], limit: int) -> None:
    items = [
        Item(f"i{number}", tuple(range(prompt)), (trained([1] * answer), trained([2] * answer)))
        for number, (prompt, answer) in enumerate(lengths)
    ]
    groups = Packer(limit, 0, is_packing=False).groups(items)
    assert sorted(index for group in groups for index in group) == list(range(len(items)))
    for group in groups:
        assert len(group) == 1 or 2 * len(group) * max(items[index].longest for index in group) <= limit


def tokenized(name: str, prompt: list[int], answer: list[int]) -> Tokenized:
    return Tokenized(name, (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))


def test_siblings_share_the_prompt_and_never_a_trained_token() -> None:
    item = with_shared_prompt(
        "x", [tokenized("a", [1, 2, 3], [4, 5]), tokenized("b", [1, 2, 3], [4, 6, 7])], (True, False)
    )
    assert item.prompt == (1, 2, 3)
    assert [completion.ids for completion in item.completions] == [(4, 5), (4, 6, 7)]
    assert [completion.is_chosen for completion in item.completions] == [True, False]
    assert (len(item), item.longest, item.num_trained) == (8, 6, 5)


def test_siblings_with_other_prompts_share_what_is_common() -> None:
    item = with_shared_prompt("x", [tokenized("a", [1, 2, 3], [9]), tokenized("b", [1, 5], [9])], (True, False))
    assert item.prompt == (1,)
    assert [completion.ids for completion in item.completions] == [(2, 3, 9), (5, 9)]
    assert [completion.loss_mask for completion in item.completions] == [(False, False, True), (False, True)]


def test_packed_row_holds_each_token_once_and_positions_start_again() -> None:
    batch = packed(
        [single(tokenized("a", [1, 2], [3])), with_shared_prompt("b", [tokenized("b", [4], [5, 6])], (True,))]
    )
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch.wanted.tolist() == [3, 5, 6]
    assert batch.columns.tolist() == [1, 3, 4]
    assert batch.spans.tolist() == [1, 3, 3]
