"""The memory plan decides purely: forecasts that grow with what they should, plans that fit, refusals that help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.profiles.architecture import ModelShape
from tunesmith.profiles.profile import Method, Recipe
from tunesmith.training.rules.memory_forecast import (
    CONSTANTS,
    GB,
    ForecastInputs,
    correction_of,
    forecast,
    forecast_inputs,
    measured_ratio,
    shape_key,
)
from tunesmith.training.rules.memory_plan import MemoryPlan, plan

QWEN_600M = ModelShape(
    family="qwen3",
    hidden=1024,
    intermediate=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
    is_tied=True,
    has_qk_norm=True,
    num_parameters=596_000_000,
)
QWEN_8B = replace(
    QWEN_600M,
    hidden=4096,
    intermediate=12_288,
    num_layers=36,
    num_heads=32,
    is_tied=False,
    num_parameters=8_190_000_000,
)
SHAPES = st.sampled_from([QWEN_600M, QWEN_8B, replace(QWEN_600M, num_layers=3, vocab_size=1000, has_qk_norm=False)])
METHODS = st.sampled_from([Method.SFT, Method.DPO, Method.ORPO, Method.KTO])
PACKS = st.integers(16, 65_536)
RANKS = st.integers(1, 256)
LIMITS = st.integers(1 * GB, 150 * GB)


def a_recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"batch_tokens": 32_768, "lora_dropout": 0.0, **fields})


def planned(gigabytes: float, shape: ModelShape = QWEN_600M, longest: int = 2048, **fields: Any) -> MemoryPlan:
    return plan(shape, a_recipe(**fields), Method.SFT, int(gigabytes * GB), longest)


@st.composite
def some_terms(draw: st.DrawFn) -> ForecastInputs:
    device = draw(st.sampled_from(["cuda", "cpu"]))
    return ForecastInputs(
        device=device,
        is_fast=device == "cuda" and draw(st.booleans()),
        wanted_share=draw(st.floats(0.0, 1.0)),
        shares_prompts=draw(st.booleans()),
        correction=draw(st.floats(0.5, 2.0)),
    )


# ---- forecasts ------------------------------------------------------------------------------------------------------


@given(SHAPES, METHODS, some_terms(), PACKS, PACKS, RANKS, RANKS)
def test_forecast_never_shrinks_with_a_larger_pack_or_rank(
    shape: ModelShape, method: Method, inputs: ForecastInputs, pack: int, other: int, rank: int, other_rank: int
) -> None:
    small, large = sorted((pack, other))
    low, high = (a_recipe(lora_rank=value) for value in sorted((rank, other_rank)))
    assert forecast(shape, low, method, small, 0, inputs).total <= forecast(shape, low, method, large, 0, inputs).total
    assert forecast(shape, low, method, small, 0, inputs).total <= forecast(shape, high, method, small, 0, inputs).total


@given(SHAPES, METHODS, some_terms(), PACKS)
def test_forecast_grows_with_layers_and_shrinks_with_each_checkpointed_one_but_the_first(
    shape: ModelShape, method: Method, inputs: ForecastInputs, pack: int
) -> None:
    recipe = a_recipe()
    deeper = replace(shape, num_layers=shape.num_layers + 1, num_parameters=shape.num_parameters + shape.num_in_layer)
    assert (
        forecast(shape, recipe, method, pack, 0, inputs).total < forecast(deeper, recipe, method, pack, 0, inputs).total
    )
    totals = [forecast(shape, recipe, method, pack, layers, inputs).total for layers in range(1, shape.num_layers + 1)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] <= forecast(shape, recipe, method, pack, 0, inputs).total or shape.num_layers < 3


def test_forecast_of_the_fast_path_counts_what_a_layer_keeps() -> None:
    """By hand, 0.6B, rank 16: bytes of a token per layer, and what comes out of the last one."""
    per_layer = 2048 + 2 * 24 * 128 + 2 * 32 * 128 + 2 * 16 * 128 + 64 + 2048 + 4 * 3072 + 2 * 4 * 64 + 8
    made = forecast(QWEN_600M, a_recipe(), Method.SFT, 10_240)
    assert made.activations == 10_240 * (28 * per_layer + 2048)
    assert made.weights == 2 * QWEN_600M.num_parameters
    assert made.head == 10_240 * 2048
    assert made == forecast(QWEN_600M, a_recipe(), Method.SFT, 10_001), "passes are filled up"


def test_forecast_of_the_measured_prototype_is_in_its_region() -> None:
    """45 GB were measured for 0.6B at 32k tokens by a prototype that kept more than the fast path does."""
    assert 30 * GB < forecast(QWEN_600M, a_recipe(), Method.SFT, 32_768).total < 50 * GB


def test_slow_twin_needs_more_than_the_fast_path_and_a_cpu_more_than_that() -> None:
    fast = forecast(QWEN_600M, a_recipe(), Method.SFT, 4096, 0, ForecastInputs())
    plain = forecast(QWEN_600M, a_recipe(), Method.SFT, 4096, 0, ForecastInputs(is_fast=False))
    on_cpu = forecast(QWEN_600M, a_recipe(), Method.SFT, 4096, 0, ForecastInputs(device="cpu", is_fast=False))
    assert plain.activations > 2 * fast.activations
    assert plain.head == int(4096 * 151_936 * 4 * CONSTANTS.plain_head)
    assert 1.5 * plain.activations < on_cpu.activations < 4 * plain.activations
    assert on_cpu.weights == 2 * plain.weights


def test_quantised_base_is_smaller_by_what_its_matrices_save() -> None:
    whole, small = (forecast(QWEN_8B, a_recipe(quantize=name), Method.SFT, 32_768) for name in ("none", "nf4"))
    matrices = QWEN_8B.num_in_layer * QWEN_8B.num_layers
    assert whole.weights - small.weights == pytest.approx((2 - CONSTANTS.nf4_bytes) * matrices)
    assert small.transient > whole.transient


def test_full_tuning_holds_four_fp32_copies_and_pays_for_its_update() -> None:
    full = forecast(QWEN_600M, a_recipe(tuning="full"), Method.SFT, 16, 0, ForecastInputs(is_fast=False))
    assert full.weights + full.trained >= 16 * QWEN_600M.num_parameters
    assert full.moving >= CONSTANTS.update_bytes * QWEN_600M.num_parameters


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({"target_modules": ("q_proj",)}, 16 * (1024 + 2048) * 28),
        ({"target_modules": ("self_attn.qkv_proj", "k_proj")}, 16 * (3 * 1024 + 2048 + 1024 + 1024) * 28),
        ({"target_modules": ("q_proj", "lm_head")}, 16 * (1024 + 2048) * 28 + 16 * (151_936 + 1024)),
    ],
)
def test_trained_state_counts_the_modules_that_get_an_adapter(fields: dict[str, Any], num: int) -> None:
    assert forecast(QWEN_600M, a_recipe(**fields), Method.SFT, 16).trained == 18 * num


def test_trained_embeddings_are_counted_once_where_they_are_tied() -> None:
    tied, untied = (
        forecast(replace(QWEN_600M, is_tied=is_tied), a_recipe(train_embeddings=True), Method.SFT, 16).trained
        for is_tied in (True, False)
    )
    assert untied - tied == 16 * 151_936 * 1024


# ---- corrections ----------------------------------------------------------------------------------------------------


def test_correction_is_the_median_within_bounds_and_one_without_evidence() -> None:
    assert correction_of([]) == 1.0
    assert correction_of([1.1, 1.2, 9.0]) == 1.2
    assert correction_of([7.0]) == 2.0
    assert correction_of([0.01]) == 0.5
    assert correction_of([float("nan"), 0.0]) == 1.0


@given(PACKS, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_ratio_of_a_measured_peak_does_not_depend_on_the_correction_in_force(
    pack: int, correction: float, truth: float
) -> None:
    """A second run under the correction of the first learns the same factor: corrections do not pile up."""
    plain = forecast(QWEN_600M, a_recipe(), Method.SFT, pack)
    measured = int(plain.fixed + truth * plain.moving)
    corrected = forecast(QWEN_600M, a_recipe(), Method.SFT, pack, 0, ForecastInputs(correction=correction))
    assert measured_ratio(corrected, correction, measured) == pytest.approx(truth, rel=1e-3)
    right = forecast(QWEN_600M, a_recipe(), Method.SFT, pack, 0, ForecastInputs(correction=truth))
    assert right.total == pytest.approx(measured, rel=1e-6)


def test_key_tells_apart_what_needs_another_amount_and_not_what_a_pack_changes() -> None:
    def key(shape: ModelShape = QWEN_600M, method: Method = Method.SFT, device: Any = "cuda", **fields: Any) -> str:
        recipe = a_recipe(**fields)
        return shape_key(shape, recipe, method, forecast_inputs(shape, recipe, method, device))

    others = [key(QWEN_8B), key(method=Method.DPO), key(device="cpu"), key(quantize="nf4"), key(tuning="full")]
    assert len({key(), *others, key(dora=True)}) == 7
    assert key() != key(lora_dropout=0.1), "dropout is for the slow twin"
    assert key() == key(lora_rank=64, micro_batch_tokens=512, lr=1e-3)


# ---- plans ----------------------------------------------------------------------------------------------------------


@given(
    SHAPES, METHODS, LIMITS, st.integers(16, 8192), st.integers(16, 100_000), st.sampled_from(["auto", "none", "all"])
)
def test_plan_fits_or_is_refused_with_what_to_change(
    shape: ModelShape, method: Method, limit: int, longest: int, batch_tokens: int, mode: str
) -> None:
    recipe = a_recipe(batch_tokens=batch_tokens, activation_checkpointing=mode)
    made = plan(shape, recipe, method, limit, longest)
    if made.refusal is not None:
        least = 0 if mode == "none" else shape.num_layers
        assert forecast(shape, recipe, method, longest, least, forecast_inputs(shape, recipe, method, "cuda")).total > (
            limit * (1 - CONSTANTS.headroom) - 1
        )
        assert "recipe.quantize: nf4" in made.refusal
        return
    assert made.forecast.total <= limit * (1 - CONSTANTS.headroom)
    assert longest <= made.pack_tokens <= max(longest, 65_536)
    assert made.pack_tokens <= max(longest, batch_tokens) + 255
    assert (
        made.checkpointed_layers in {"auto": range(shape.num_layers + 1), "none": [0], "all": [shape.num_layers]}[mode]
    )


def enough_for(shape: ModelShape, tokens: int, layers: int = 0, **fields: Any) -> float:
    """Just so many gigabytes that such a pass fits; the figures of the forecast may be measured anew."""
    return forecast(shape, a_recipe(**fields), Method.SFT, tokens, layers).total / GB / (1 - CONSTANTS.headroom) + 1e-3


def test_plan_takes_the_whole_step_where_it_fits_and_the_largest_pass_that_does_elsewhere() -> None:
    for tokens in (32_768, 24_576, 16_384, 4096):
        made = planned(enough_for(QWEN_600M, tokens))
        assert (made.pack_tokens, made.checkpointed_layers) == (tokens, 0)
    assert "32768 tokens do not fit" in made.reason
    assert planned(1000).pack_tokens == 32_768


def test_plan_checkpoints_only_when_no_useful_pass_fits_and_only_as_much_as_needed() -> None:
    made = planned(enough_for(QWEN_8B, 4096, 20), QWEN_8B)
    assert (made.pack_tokens, made.checkpointed_layers) == (4096, 20)
    assert "20 of 36 layers" in made.reason
    assert planned(enough_for(QWEN_8B, 4096), QWEN_8B).checkpointed_layers == 0


def test_plan_of_the_slow_path_checkpoints_all_layers_or_none() -> None:
    room = enough_for(QWEN_8B, 4096, 18, fast_path=False)
    assert planned(room, QWEN_8B, fast_path=False).checkpointed_layers == QWEN_8B.num_layers
    assert planned(2 * room, QWEN_8B, fast_path=False).checkpointed_layers == 0


def test_plan_makes_passes_smaller_than_useful_only_when_everything_is_computed_again() -> None:
    room = enough_for(QWEN_8B, 3072, QWEN_8B.num_layers)
    made = planned(room, QWEN_8B, longest=1024)
    assert (made.refusal, made.pack_tokens, made.checkpointed_layers) == (None, 3072, QWEN_8B.num_layers)
    assert planned(room, QWEN_8B, longest=3072, activation_checkpointing="none").refusal is not None


def test_plan_honours_the_cap_of_the_profile_even_below_the_longest_example() -> None:
    assert planned(140, micro_batch_tokens=6000).pack_tokens == 6000
    short = planned(140, micro_batch_tokens=512)
    assert short.pack_tokens == 512
    assert short.forecast.total == forecast(QWEN_600M, a_recipe(), Method.SFT, 2048).total


def test_plan_on_a_cpu_makes_the_usual_passes() -> None:
    inputs = forecast_inputs(QWEN_600M, a_recipe(), Method.SFT, "cpu")
    made = plan(QWEN_600M, a_recipe(), Method.SFT, 200 * GB, 100, largest_step=900, inputs=inputs)
    assert made.pack_tokens == 4096
    assert made.forecast == forecast(QWEN_600M, a_recipe(), Method.SFT, 900, 0, inputs), "no step has more tokens"


@pytest.mark.parametrize(
    ("room", "shape", "fields", "hints"),
    [
        (10, QWEN_8B, {}, ["recipe.quantize: nf4", "hardware.memory_gb"]),
        (4, QWEN_600M, {"tuning": "full"}, ["recipe.tuning: lora"]),
        (2, QWEN_600M, {"activation_checkpointing": "none"}, ["activation_checkpointing: auto", "recipe.max_length"]),
        (2, QWEN_600M, {"lora_rank": 512}, ["recipe.lora_rank (512)"]),
    ],
)
def test_refusal_names_the_numbers_and_the_setting_to_change(
    room: float, shape: ModelShape, fields: dict[str, Any], hints: list[str]
) -> None:
    refusal = planned(room, shape, **fields).refusal
    assert refusal is not None
    assert f"of {room}.0 GB" in refusal
    assert all(hint in refusal for hint in hints), refusal


def test_plan_after_running_out_of_memory_halves_the_pass_and_keeps_nothing_where_it_cannot() -> None:
    first, second = (plan(QWEN_600M, a_recipe(), Method.SFT, 140 * GB, 2048, divisor=divisor) for divisor in (1, 2))
    assert (second.pack_tokens, second.checkpointed_layers) == (first.pack_tokens // 2, 0)
    assert second.forecast.total < first.forecast.total
    long = plan(QWEN_600M, a_recipe(), Method.SFT, 140 * GB, 40_000, divisor=2)
    assert long.checkpointed_layers == QWEN_600M.num_layers
    assert "ran out of memory" in long.reason


def test_plan_obeys_the_correction_of_earlier_runs() -> None:
    room = int(enough_for(QWEN_600M, 32_768) * GB)
    inputs = forecast_inputs(QWEN_600M, a_recipe(), Method.SFT, "cuda")
    plain, careful = (
        plan(QWEN_600M, a_recipe(), Method.SFT, room, 2048, inputs=replace(inputs, correction=factor))
        for factor in (1.0, 2.0)
    )
    assert careful.pack_tokens < plain.pack_tokens
    assert careful.forecast.total <= room
