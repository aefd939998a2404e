"""Recorded passes give the numbers of computed ones, for every row of their form; a second pass never mixes in."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine"),
]


def a_model(num_layers: int = 3) -> Any:
    import transformers

    from tunesmith.models.adapters import new_adapter, trained_parameters
    from tunesmith.models.fast.model import FastModel
    from tunesmith.profiles.profile import Recipe

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        "qwen3", vocab_size=500, hidden_size=128, intermediate_size=384, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device("cuda"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    adapted = new_adapter(base, Recipe(lora_dropout=0.0))
    for _, parameter in trained_parameters(adapted):
        parameter.data = 0.05 * torch.randn_like(parameter)
    return FastModel(adapted)


def a_row(seed: int, *, is_shared: bool) -> Any:
    from tunesmith.models.packs import Completion, Item, packed

    draw = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        num = int(torch.randint(least, most, (1,), generator=draw))
        return tuple(torch.randint(20, 500, (num,), generator=draw).tolist())

    def answer() -> Completion:
        ids = tokens(5, 40)
        return Completion(ids, (True,) * len(ids))

    items = [
        Item(f"e{number}", tokens(5, 90), (answer(), answer()) if is_shared else (answer(),))
        for number in range(4 + seed % 5)
    ]
    return packed(items)


def asked(model: Any, batch: Any) -> tuple[Any, Any]:
    model.start_step()
    spans = model.span_log_probs(batch)
    torch.tanh(spans / 50).sum().backward()
    return spans.detach().clone(), model._gradients.clone()


@pytest.mark.parametrize("is_shared", [False, True], ids=["lone", "shared prompts"])
def test_replayed_passes_equal_computed_ones_for_other_rows_and_moved_parameters(is_shared: bool) -> None:
    from tunesmith.models.adapters import trained_parameters

    recording, computing = a_model(), a_model()
    computing.cuda_graphs = None
    for seed in range(30):
        batch = a_row(seed, is_shared=is_shared)
        found, expected = asked(recording, batch), asked(computing, batch)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-3)
        cosine = torch.nn.functional.cosine_similarity(found[1], expected[1], dim=0)
        assert float(cosine) > 0.9999
        assert float(found[1].norm() / expected[1].norm()) == pytest.approx(1, abs=1e-2)
        for one in (recording, computing):  # what is replayed must see the parameters as they are now
            for number, (_, parameter) in enumerate(trained_parameters(one.model)):
                parameter.data += 0.003 * torch.cos(torch.arange(parameter.numel(), device="cuda") + number).view_as(
                    parameter
                )
    assert recording.cuda_graphs.problem is None
    assert len(recording.cuda_graphs._graphs) >= 1


def test_gradients_of_several_passes_of_a_step_add_up() -> None:
    model, batches = a_model(), [a_row(seed, is_shared=False) for seed in (1, 1, 1, 2)]
    alone = [asked(model, batch)[1] for batch in batches]
    model.start_step()
    for batch in batches:
        torch.tanh(model.span_log_probs(batch) / 50).sum().backward()
    torch.testing.assert_close(model._gradients, sum(alone), rtol=1e-2, atol=1e-4)


def test_a_pass_that_another_has_overtaken_says_so_instead_of_giving_its_numbers() -> None:
    model, batch = a_model(), a_row(1, is_shared=False)
    for _ in range(2):
        asked(model, batch)
    first = model.span_log_probs(batch)
    model.span_log_probs(batch)
    with pytest.raises(RuntimeError, match="another forward pass began"):
        first.sum().backward()


def test_scoring_between_two_passes_computes_and_disturbs_nothing() -> None:
    from tunesmith.models.scoring import evaluating

    model, batch, other = a_model(), a_row(1, is_shared=False), a_row(2, is_shared=False)
    expected = [asked(model, batch)[1] for _ in range(3)][-1]
    model.start_step()
    spans = model.span_log_probs(batch)
    with evaluating(model.model):
        assert torch.isfinite(model.span_log_probs(other)).all()
    torch.tanh(spans / 50).sum().backward()
    torch.testing.assert_close(model._gradients, expected, rtol=1e-2, atol=1e-4)
