"""A base with its adapter, computed layer by layer our own way: which models can be, and their log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tunesmith.models.adapters import trained_parameters
from tunesmith.models.attention import Apart, Rules
from tunesmith.models.fast import FAST_FAMILIES
from tunesmith.models.fast.batches import Prepared, prepared
from tunesmith.models.fast.cuda_graphs import Recordings, is_small
from tunesmith.models.fast.head import log_probs
from tunesmith.models.fast.kernels import Heads, Norm, norm, norm_backward, run
from tunesmith.models.fast.layer import Layer
from tunesmith.models.fast.lora_linear import Site
from tunesmith.models.packs import Layout
from tunesmith.models.quantized import is_quantized
from tunesmith.models.segments import moved

_PROJECTION = re.compile(
    r"\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.lora_[AB]\.default\.weight\Z"
)


def why_not(adapted: Any) -> str | None:
    """What keeps this model from being computed here; None if nothing does."""
    config = adapted.config
    if config.model_type not in FAST_FAMILIES or getattr(config, "hidden_act", None) != "silu":
        return f"models of type {config.model_type} are not among those known here ({', '.join(sorted(FAST_FAMILIES))})"
    if not hasattr(adapted, "peft_config"):
        return "every weight is trained"
    if getattr(config, "attention_dropout", 0.0):
        return "its attention drops out"
    settings = next(iter(adapted.peft_config.values()))
    if settings.use_dora or settings.lora_dropout or settings.bias != "none" or getattr(settings, "lora_bias", False):
        return "the adapter has dropout, DoRA or biases"
    if not all(_PROJECTION.search(name) for name, _ in trained_parameters(adapted)):
        return "more is trained than adapters on the projections of the decoder layers"
    return None


class FastModel:
    """Shares every weight with the model it is made from; gradients go to the same parameters."""

    def __init__(self, adapted: Any, *, checkpointed_layers: int = 0) -> None:
        """`checkpointed_layers`: of so many layers only the input is kept, and the rest computed again."""
        base = adapted.get_base_model()
        self.model = adapted
        self._layers = _layers(adapted)
        self._num_checkpointed = checkpointed_layers
        self._embed, self._rotary = base.get_input_embeddings().weight, base.model.rotary_emb
        self._norm, self._head = _norm(base.model.norm), base.get_output_embeddings().weight
        copies = [site.copies() for layer in self._layers for site in layer.sites]
        self._places = [place for places, _, _ in copies for place in places]
        self._parameters = [parameter for _, parameters, _ in copies for parameter in parameters]
        self._scales = [scale for _, _, scales in copies for scale in scales]
        self._gradients = torch.zeros(
            sum(parameter.numel() for parameter in self._parameters), device=self._head.device
        )
        parts = self._gradients.split([parameter.numel() for parameter in self._parameters])
        self._own = [part.view_as(parameter) for parameter, part in zip(self._parameters, parts, strict=True)]
        self._num_parameters = sum(parameter.numel() for parameter in base.parameters())
        can_record = self._head.is_cuda and not checkpointed_layers and not any(map(is_quantized, base.modules()))
        self.recordings = Recordings(self._through) if can_record else None
        self._foreseen: dict[int, tuple[Layout, Prepared]] = {}  # by id; the layout is held, so that no other gets it

    def start_step(self) -> None:
        """Gradients are zero, and are collected in one piece of memory from here on."""
        self._gradients.zero_()
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.grad = own

    def foresee(self, layout: Layout) -> None:
        self._foreseen[id(layout)] = (layout, self._prepared(layout))

    def span_log_probs(self, layout: Layout) -> Any:
        """Of each span of the layout the sum of the log-probabilities of its tokens; differentiable if asked for."""
        device = self._head.device
        foreseen = self._foreseen.pop(id(layout), None)
        row = self._prepared(layout) if foreseen is None else foreseen[1]
        residual, delta = self._pass(row)
        places, tokens, spans = (moved(tensor, device) for tensor in (row.places, layout.wanted, layout.spans))
        found = log_probs(_Last.apply(residual, delta, places, self._norm), self._head, tokens)
        return torch.zeros(layout.num_spans, device=device).index_add(0, spans, found)

    def _prepared(self, layout: Layout) -> Prepared:
        if not self._head.is_cuda:
            return prepared(layout, None)
        return prepared(layout, self.recordings.choose if self.recordings is not None else lambda form: form)

    def _pass(self, given: Prepared) -> tuple[Any, Any]:
        """All layers: the residual stream, and what the last one adds to it."""
        row = given.row(self._head.device, self._turns)
        form, recordings = given.form, self.recordings if torch.is_grad_enabled() else None
        if form is not None and recordings is not None and is_small(form.num_tokens, self._num_parameters):
            return recordings(form, row)
        return self._through(row.ids, row.cos, row.sin, row.attend)

    def _turns(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines of the rotary positions."""
        cos, sin = self._rotary(self._embed[:1, None], positions[None])
        return cos[0], sin[0]

    def _through(self, ids: Any, cos: Any, sin: Any, attend: Apart) -> tuple[Any, Any]:
        self._copy_parameters()
        residual = self._embed[ids]
        residual.requires_grad_(torch.is_grad_enabled())
        delta = torch.zeros_like(residual)
        for number, layer in enumerate(self._layers):
            call: Callable[..., tuple[Any, Any]] = layer
            if number < self._num_checkpointed and torch.is_grad_enabled():
                call = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
            residual, delta = call(residual, delta, cos, sin, attend)
        return residual, delta

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        """The parameters as they are now, in the dtype of the model."""
        torch._foreach_copy_(self._places, self._parameters)
        torch._foreach_mul_(self._places, self._scales)


class _Last(torch.autograd.Function):
    """The last norm, at the wanted places alone."""

    @staticmethod
    def forward(ctx: Any, residual: Any, delta: Any, places: Any, last: Norm) -> Any:
        rows = residual.index_select(0, places) + delta.index_select(0, places)
        ctx.last, ctx.shape = last, residual.shape
        ctx.save_for_backward(rows, places)
        return run(norm, rows, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        rows, places = ctx.saved_tensors
        grad = run(norm_backward, grads[0], None, rows, ctx.last)
        total = torch.zeros(ctx.shape, dtype=rows.dtype, device=rows.device).index_add_(0, places, grad)
        return total, total, None, None


def _layers(adapted: Any) -> list[Layer]:
    return [_layer(module, adapted.config) for module in adapted.get_base_model().model.layers]


def _layer(module: Any, config: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    # Mistral's layers ask the config, Qwen's know their own
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return Layer(
        first_norm=_norm(module.input_layernorm),
        qkv=Site([attention.q_proj, attention.k_proj, attention.v_proj], may_widen=True),
        heads=Heads(
            num_queries=config.num_attention_heads,
            num_keys=config.num_key_value_heads,
            size=attention.head_dim,
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        ),
        out=Site([attention.o_proj]),
        second_norm=_norm(module.post_attention_layernorm),
        gate_up=Site([mlp.gate_proj, mlp.up_proj], may_widen=True),
        down=Site([mlp.down_proj]),
        rules=Rules(scaling=attention.scaling, window=window),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)
