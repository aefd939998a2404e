"""The fused compute backend: which models it supports, and token log-probabilities of a base with a LoRA adapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tunesmith.models.adapters import trained_parameters
from tunesmith.models.attention import AttentionConfig, SegmentAttention
from tunesmith.models.fast import FAST_FAMILIES
from tunesmith.models.fast.batches import HostBatch, host_batch
from tunesmith.models.fast.cuda_graphs import CudaGraphCache, is_small
from tunesmith.models.fast.head import log_probs
from tunesmith.models.fast.kernels import Heads, Norm, norm, norm_backward, run
from tunesmith.models.fast.layer import Layer
from tunesmith.models.fast.lora_linear import FusedLoraLinear
from tunesmith.models.packs import MicroBatch
from tunesmith.models.quantized import is_quantized
from tunesmith.models.segments import to_device

_PROJECTION = re.compile(
    r"\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.lora_[AB]\.default\.weight\Z"
)


def unsupported_reason(adapted: Any) -> str | None:
    """Return why the fused backend does not support this model, or None if it does."""
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
        """`checkpointed_layers`: how many layers keep only their input and recompute the rest in the backward pass."""
        base = adapted.get_base_model()
        self.model = adapted
        self._layers = _layers(adapted)
        self._num_checkpointed = checkpointed_layers
        self._embed, self._rotary = base.get_input_embeddings().weight, base.model.rotary_emb
        self._norm, self._head = _norm(base.model.norm), base.get_output_embeddings().weight
        copies = [linear.copies() for layer in self._layers for linear in layer.linears]
        self._copies = [copy for own, _, _ in copies for copy in own]
        self._parameters = [parameter for _, parameters, _ in copies for parameter in parameters]
        self._scales = [scale for _, _, scales in copies for scale in scales]
        self._gradients = torch.zeros(
            sum(parameter.numel() for parameter in self._parameters), device=self._head.device
        )
        parts = self._gradients.split([parameter.numel() for parameter in self._parameters])
        self._own = [part.view_as(parameter) for parameter, part in zip(self._parameters, parts, strict=True)]
        self._num_parameters = sum(parameter.numel() for parameter in base.parameters())
        can_capture = self._head.is_cuda and not checkpointed_layers and not any(map(is_quantized, base.modules()))
        self.cuda_graphs = CudaGraphCache(self._run_layers) if can_capture else None
        # by id of the micro-batch, which is kept alive so that no other object can get the same id
        self._prefetched: dict[int, tuple[MicroBatch, HostBatch]] = {}

    def start_step(self) -> None:
        """Zero the gradients and collect them in one contiguous tensor from here on."""
        self._gradients.zero_()
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.grad = own

    def prefetch(self, batch: MicroBatch) -> None:
        self._prefetched[id(batch)] = (batch, self._host_batch(batch))

    def span_log_probs(self, batch: MicroBatch) -> Any:
        """Return the sum of token log-probabilities of each span; differentiable where gradients are enabled."""
        device = self._head.device
        prefetched = self._prefetched.pop(id(batch), None)
        on_host = self._host_batch(batch) if prefetched is None else prefetched[1]
        residual, delta = self._pass(on_host)
        inputs = (on_host.logit_indices, batch.wanted, batch.spans)
        indices, tokens, spans = (to_device(tensor, device) for tensor in inputs)
        values = log_probs(_FinalNorm.apply(residual, delta, indices, self._norm), self._head, tokens)
        return torch.zeros(batch.num_spans, device=device).index_add(0, spans, values)

    def _host_batch(self, batch: MicroBatch) -> HostBatch:
        if not self._head.is_cuda:
            return host_batch(batch, None)
        return host_batch(batch, self.cuda_graphs.choose if self.cuda_graphs is not None else lambda bucket: bucket)

    def _pass(self, on_host: HostBatch) -> tuple[Any, Any]:
        """Run all layers. Returns the residual stream and the last block's output, not added to it yet."""
        batch = on_host.to_device(self._head.device, self._rotary_tables)
        bucket, cuda_graphs = on_host.bucket, self.cuda_graphs if torch.is_grad_enabled() else None
        if bucket is not None and cuda_graphs is not None and is_small(bucket.num_tokens, self._num_parameters):
            return cuda_graphs(bucket, batch)
        return self._run_layers(batch.ids, batch.cos, batch.sin, batch.attend)

    def _rotary_tables(self, positions: Any) -> tuple[Any, Any]:
        """Cosines and sines of the rotary positions."""
        cos, sin = self._rotary(self._embed[:1, None], positions[None])
        return cos[0], sin[0]

    def _run_layers(self, ids: Any, cos: Any, sin: Any, attend: SegmentAttention) -> tuple[Any, Any]:
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
        """Copy the current fp32 parameters into the fused layers, in the model's dtype."""
        torch._foreach_copy_(self._copies, self._parameters)
        torch._foreach_mul_(self._copies, self._scales)


class _FinalNorm(torch.autograd.Function):
    """The final norm, only at the positions that predict a target token."""

    @staticmethod
    def forward(ctx: Any, residual: Any, delta: Any, indices: Any, last: Norm) -> Any:
        rows = residual.index_select(0, indices) + delta.index_select(0, indices)
        ctx.last, ctx.shape = last, residual.shape
        ctx.save_for_backward(rows, indices)
        return run(norm, rows, last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        rows, indices = ctx.saved_tensors
        grad = run(norm_backward, grads[0], None, rows, ctx.last)
        total = torch.zeros(ctx.shape, dtype=rows.dtype, device=rows.device).index_add_(0, indices, grad)
        return total, total, None, None


def _layers(adapted: Any) -> list[Layer]:
    return [_layer(module, adapted.config) for module in adapted.get_base_model().model.layers]


def _layer(module: Any, config: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    # Mistral's layers ask the config, Qwen's know their own
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return Layer(
        first_norm=_norm(module.input_layernorm),
        qkv=FusedLoraLinear([attention.q_proj, attention.k_proj, attention.v_proj], may_widen=True),
        heads=Heads(
            num_queries=config.num_attention_heads,
            num_keys=config.num_key_value_heads,
            size=attention.head_dim,
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        ),
        out=FusedLoraLinear([attention.o_proj]),
        second_norm=_norm(module.post_attention_layernorm),
        gate_up=FusedLoraLinear([mlp.gate_proj, mlp.up_proj], may_widen=True),
        down=FusedLoraLinear([mlp.down_proj]),
        config=AttentionConfig(scaling=attention.scaling, window=window),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)
