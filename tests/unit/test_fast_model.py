"""The fast path computes what transformers and peft compute: log-probabilities and gradients, here in fp32 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from tunesmith.models.adapters import new_adapter, trained_parameters
from tunesmith.models.attention import gather
from tunesmith.models.fast import head
from tunesmith.models.fast import lora_linear as site
from tunesmith.models.fast.kernels import add_copies
from tunesmith.models.fast.model import FastModel, unsupported_reason
from tunesmith.models.packs import Completion, Item, packed, padded
from tunesmith.models.scoring import evaluating, span_log_probs
from tunesmith.models.segments import GraphBucket, Segment, graph_bucket, pad_to_bucket, varlen_layout, varlen_layout_in
from tunesmith.profiles.profile import Recipe

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biased, not tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}


PROMPTS = st.lists(st.tuples(st.integers(1, 900), st.lists(st.integers(1, 300), max_size=4)), min_size=1, max_size=30)
"""Lengths of prompts, each with those of the answers to it."""


def an_adapted(name: str = "qwen3", targets: Any = "all-linear", rank: int = 4) -> Any:
    """A small model with an adapter away from its start."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        name.partition(",")[0],
        **{
            "vocab_size": 90, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
            "eos_token_id": 1, "bos_token_id": 2, **SHAPES[name],
        },
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for parameter in base.parameters():  # biases and norms start where mistakes do not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    adapted = new_adapter(base, Recipe(lora_rank=rank, lora_alpha=7.0, lora_dropout=0.0, target_modules=targets))
    for _, parameter in trained_parameters(adapted):
        parameter.data = 0.2 * torch.randn_like(parameter)
    return adapted


def some_items() -> list[Item]:
    """Shared prompts, lone conversations, context that counts."""
    draw = torch.Generator().manual_seed(3)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 90, (num,), generator=draw).tolist())

    def answer(num: int, *, is_chosen: bool = True) -> Completion:
        return Completion(tokens(num), (True,) * num, is_chosen)

    return [
        Item("pair", tokens(9), (answer(5), answer(7, is_chosen=False)), counts_context=True),
        Item("single", (), (Completion(tokens(11), (False,) * 4 + (True,) * 7),)),
        Item("three", tokens(6), (answer(1), answer(3), answer(2))),
        Item("one", tokens(4), (answer(6),)),
    ]


def gradients_of(adapted: Any, spans: Any) -> dict[str, Any]:
    weights = torch.linspace(0.5, 2.0, len(spans))  # of each span another share: a swap would be seen
    (torch.tanh(spans / 30) * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in trained_parameters(adapted)}


def slow_and_fast(adapted: Any, batch: Any, **options: Any) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    slow = span_log_probs(adapted, batch)
    expected = gradients_of(adapted, slow)
    adapted.zero_grad()
    model = FastModel(adapted, **options)
    model.start_step()
    fast = model.span_log_probs(batch)
    return slow.detach(), fast.detach(), expected, gradients_of(adapted, fast)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_fast_path_gives_the_log_probabilities_and_gradients_of_the_slow_one(name: str, is_packed: bool) -> None:
    adapted = an_adapted(name)
    assert unsupported_reason(adapted) is None
    batch = packed(some_items()) if is_packed else padded(some_items(), 0)
    slow, fast, expected, found = slow_and_fast(adapted, batch)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    assert all(float(gradient.abs().max()) > 0 for gradient in expected.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wide_from", [0.1, 100.0], ids=["inputs lengthened", "outputs added to"])
def test_both_ways_of_adding_the_adapter_give_the_same(monkeypatch: pytest.MonkeyPatch, wide_from: float) -> None:
    monkeypatch.setattr(site, "_WIDE", wide_from)
    slow, fast, expected, found = slow_and_fast(an_adapted("qwen2"), packed(some_items()))
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), ("k_proj", "up_proj", "down_proj")])
def test_adapters_on_some_projections_only(targets: tuple[str, ...]) -> None:
    slow, fast, expected, found = slow_and_fast(an_adapted("llama", targets, rank=3), packed(some_items()))
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num", [1, 3])
def test_layers_computed_again_give_the_same_gradients(num: int) -> None:
    _, fast, expected, found = slow_and_fast(an_adapted(), packed(some_items()), checkpointed_layers=num)
    assert torch.isfinite(fast).all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_over_passes_and_start_anew_with_a_step() -> None:
    adapted, items = an_adapted(), some_items()
    model = FastModel(adapted)
    model.start_step()
    once = gradients_of(adapted, model.span_log_probs(packed(items[:2])))
    twice = gradients_of(adapted, model.span_log_probs(packed(items[:2])))
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient, rtol=1e-5, atol=1e-7)
    model.start_step()
    assert all(float(parameter.grad.abs().max()) == 0 for _, parameter in trained_parameters(adapted))


def test_changed_parameters_are_seen_at_the_next_pass_and_the_slow_path_still_works() -> None:
    adapted, batch = an_adapted("llama"), packed(some_items())
    before = span_log_probs(adapted, batch)
    model = FastModel(adapted)
    torch.testing.assert_close(span_log_probs(adapted, batch), before)  # its weights are views now
    for _, parameter in trained_parameters(adapted):
        parameter.data *= 1.5
    with evaluating(adapted):
        torch.testing.assert_close(model.span_log_probs(batch), span_log_probs(adapted, batch), rtol=1e-5, atol=1e-5)
        assert not model.span_log_probs(batch).requires_grad


def test_logits_are_made_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(11, 8, requires_grad=True)
    weight, tokens = torch.randn(20, 8), torch.randint(0, 20, (11,))
    expected = torch.log_softmax(hidden @ weight.T, -1).gather(1, tokens[:, None])[:, 0]
    (expected * torch.arange(11)).sum().backward()
    gradient, hidden.grad = hidden.grad, None
    for rows in (1, 4, 11, 50):
        monkeypatch.setattr(head, "ROWS", rows)
        found = head.log_probs(hidden, weight, tokens)
        (found * torch.arange(11)).sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(hidden.grad, gradient)
        hidden.grad = None


def test_keys_of_a_shared_prompt_get_the_gradients_of_all_their_copies() -> None:
    varlen = varlen_layout([Segment(3), Segment(2, prompt=0), Segment(1, prompt=0), Segment(4)])
    values = torch.randn(10, 2, 3, requires_grad=True)
    grad = torch.randn(len(varlen.key_indices), 2, 3)
    values[varlen.key_indices].backward(grad)
    expected, values.grad = values.grad, None
    gather(values, varlen.key_indices, varlen.copies).backward(grad)
    torch.testing.assert_close(values.grad, expected)
    torch.testing.assert_close(add_copies(grad, varlen.copies), expected)


def test_what_the_fast_path_does_not_compute_is_refused_by_name() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip

    def a_base(family: str) -> Any:
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **shape))

    def reason(family: str = "llama", **recipe: Any) -> str:
        found = unsupported_reason(
            new_adapter(a_base(family).requires_grad_(False), Recipe(**{"lora_dropout": 0.0, **recipe}))
        )
        assert found is not None
        return found

    assert "gemma" in reason("gemma")
    assert "dropout" in reason(lora_dropout=0.1)
    assert "DoRA" in reason(dora=True)
    assert "more is trained" in reason(train_embeddings=True)
    assert unsupported_reason(a_base("llama")) == "every weight is trained"


@pytest.mark.parametrize("is_shared", [False, True], ids=["lone", "shared prompts"])
def test_rows_filled_up_to_a_common_form_keep_every_segment_with_its_keys(is_shared: bool) -> None:
    forms = set()
    for extra in range(0, 120, 40):
        plain = [Segment(300 + extra), Segment(41), Segment(7)]
        segments = [*plain, Segment(20, prompt=0), Segment(30, prompt=0)] if is_shared else plain
        forms.add(graph_bucket(segments))
        check_filled_up(segments, graph_bucket(segments))
    assert len(forms) <= 2


@given(PROMPTS, PROMPTS)
@example(
    one=[(182, [165]), (385, []), (731, []), (229, [1, 289]), (149, [1, 37, 300]), (210, [229, 300]), (633, [])],
    other=[
        (1, []),
        (1, [1, 152, 123]),
        (245, []),
        (363, [1, 234, 249, 300]),
        (279, [300, 300]),
        (536, []),
        (724, [300, 300]),
        (580, [300, 300, 300]),
    ],
)
def test_whatever_fits_in_a_bucket_can_be_padded_to_it(
    one: list[tuple[int, list[int]]], other: list[tuple[int, list[int]]]
) -> None:
    first, second = segments_of(one), segments_of(other)
    check_filled_up(first, graph_bucket(first))
    if graph_bucket(first).fits_in(graph_bucket(second), 1.5):
        check_filled_up(first, graph_bucket(second))


def segments_of(prompts: list[tuple[int, list[int]]]) -> list[Segment]:
    made: list[Segment] = []
    for length, answers in prompts:
        number = len(made)
        made.append(Segment(length))
        made += [Segment(answer, prompt=number) for answer in answers]
    return made


def check_filled_up(segments: list[Segment], bucket: GraphBucket) -> None:
    filled = pad_to_bucket(segments, bucket)
    assert max(segment.length for segment in filled) <= bucket.longest, "a kernel would stop before its end"
    assert list(filled[: len(segments)]) == segments
    found, expected = varlen_layout_in(filled, bucket), varlen_layout(filled)
    num, num_keys = len(expected.cu_seqlens_q), len(expected.key_indices)
    assert sum(segment.length for segment in filled) == bucket.num_tokens == int(found.cu_seqlens_q[-1])
    assert (len(found.cu_seqlens_q), len(found.key_indices)) == (
        bucket.num_segments + 1,
        bucket.num_tokens + bucket.num_shared,
    )
    assert found.cu_seqlens_q[:num].equal(expected.cu_seqlens_q)
    assert found.cu_seqlens_k[:num].equal(expected.cu_seqlens_k)
    assert (found.cu_seqlens_q[num - 1 :] == bucket.num_tokens).all()
    assert (found.cu_seqlens_k[num - 1 :] == num_keys).all()
    assert found.key_indices[:num_keys].equal(expected.key_indices)
    copies = found.copies
    assert copies[: len(expected.copies)].equal(expected.copies)
    assert (copies[len(expected.copies) :] == -1).all()
    assert len(copies) == bucket.num_copies
    assert found.is_plain == (bucket.num_copies == 1)
    assert bucket.longest >= max(expected.max_seqlen_k, *(segment.length for segment in filled))
