"""Which way a training computes, and layers that are computed again on the slow path."""

from __future__ import annotations

import torch
from test_fast_model import an_adapted, gradients_of, some_items

from tunesmith.models.packs import packed, padded
from tunesmith.models.scoring import TransformersBackend, probe_items
from tunesmith.training.trainers.native.compute import _disagreement, backend_for


def test_without_a_gpu_the_slow_path_computes() -> None:
    assert isinstance(backend_for(an_adapted()), TransformersBackend)


def test_layers_computed_again_on_the_slow_path_give_the_same_gradients_packed_and_padded() -> None:
    for batch in (packed(some_items()), padded(some_items(), 0)):
        adapted = an_adapted().train()
        expected = gradients_of(adapted, TransformersBackend(adapted).span_log_probs(batch))
        backend = backend_for(adapted, checkpointed_layers=1)
        backend.start_step()
        torch.testing.assert_close(gradients_of(adapted, backend.span_log_probs(batch)), expected, rtol=1e-5, atol=1e-7)
        assert adapted.config._attn_implementation != "tunesmith_segments"


def test_a_fast_path_that_computes_something_else_is_found_out() -> None:
    from tunesmith.models.fast.model import FastModel

    adapted = an_adapted()
    fast = FastModel(adapted)
    assert _disagreement(fast, TransformersBackend(adapted)) is None
    fast._layers = fast._layers[:-1]
    found = _disagreement(fast, TransformersBackend(adapted))
    assert found is not None
    assert "differs" in found


def test_the_probe_leaves_the_first_tokens_alone_which_may_have_embeddings_of_zeros() -> None:
    adapted = an_adapted()
    adapted.get_input_embeddings().weight.data[:3] = 0.0
    used = {token for item in probe_items(adapted) for token in (*item.prompt, *item.completions[0].ids)}
    assert min(used) >= 16
    assert max(used) < 90
    assert len(used) > 20
