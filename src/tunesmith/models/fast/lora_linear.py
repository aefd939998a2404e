"""Linear layers that read the same input, with the adapters on them, as one product forwards and one backwards.

`y = x Wᵀ + (x (sA)ᵀ) Bᵀ`. The weights of the layers lie below each other in one matrix, of which the layers of the
model are views from then on; likewise the matrices A. Copies of A and B in the model's dtype are made before each pass.
Gradients go straight to the parameters, which keep fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.models.quantized import dense_weight, is_quantized

_ALIGNED = 64
_WIDE = 1.5
"""From this ratio of outputs to inputs on, extra input columns are cheaper than a second product on the outputs."""


@dataclass(frozen=True)
class Adapter:
    """One layer's A and B, and its slices of the fused layer's output rows and ranks."""

    a: Any
    b: Any
    scale: float
    rows: slice
    ranks: slice


class FusedLoraLinear:
    """One or more linear layers with the same input and their LoRA adapters, computed as one product."""

    def __init__(self, modules: Sequence[Any], *, may_widen: bool = False) -> None:
        """`modules`: plain linear layers, or PEFT's with one LoRA adapter. `may_widen`: whether the caller can give
        inputs with spare columns (`input_width`)."""
        self._layers = [getattr(module, "base_layer", module) for module in modules]
        first = self._layers[0]
        self.num_in: int = first.in_features
        self.num_out: int = sum(layer.out_features for layer in self._layers)
        self._adapters = _adapters(modules)
        ranks = sum(adapter.a.shape[0] for adapter in self._adapters)
        self.num_ranks = -(-ranks // _ALIGNED) * _ALIGNED if ranks else 0
        is_dense = not any(map(is_quantized, self._layers))
        self._is_wide = may_widen and is_dense and self.num_ranks > 0 and self.num_out >= _WIDE * self.num_in
        self._dense = _concatenate_weights(self._layers, self.num_ranks if self._is_wide else 0) if is_dense else None
        self._bias = _concatenate_biases(self._layers)
        like = dense_weight(first)
        self._down = like.new_zeros(self.num_ranks, self.num_in)
        if self._dense is not None and self._is_wide:
            self._up = self._dense[:, self.num_in :]
        else:
            self._up = like.new_zeros(self.num_out, self.num_ranks)

    def copies(self) -> tuple[list[Any], list[Any], list[float]]:
        """Return views for the copies of the parameters, the parameters, and the factor that each copy is scaled by."""
        copies = [self._down[adapter.ranks] for adapter in self._adapters]
        copies += [self._up[adapter.rows, adapter.ranks] for adapter in self._adapters]
        parameters = [adapter.a for adapter in self._adapters] + [adapter.b for adapter in self._adapters]
        return copies, parameters, [*(adapter.scale for adapter in self._adapters), *([1.0] * len(self._adapters))]

    @property
    def input_width(self) -> int:
        """Number of columns that `forward` needs: the inputs, and spare columns for the inner product if it is wide."""
        return self.num_in + (self.num_ranks if self._is_wide else 0)

    def forward(self, inputs: Any) -> tuple[Any, Any]:
        """Outputs, and the inner product that the gradients need again."""
        if self._is_wide:
            inner = inputs[:, : self.num_in] @ self._down.T
            inputs[:, self.num_in :] = inner
            return self._product(inputs), inner
        outputs = self._product(inputs)
        if not self.num_ranks:
            return outputs, inputs.new_empty(0)
        inner = inputs @ self._down.T
        return outputs.addmm_(inner, self._up.T), inner

    def backward(self, inputs: Any, inner: Any, grad: Any) -> Any:
        """Return the gradient of the inputs; adds the adapters' gradients to their parameters."""
        grad_inputs, grad_inner = self.backward_inputs(grad)
        self.accumulate_grads(inputs, inner, grad, grad_inner)
        return grad_inputs

    def backward_inputs(self, grad: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the inner product."""
        made = grad @ self._weight()
        if not self.num_ranks:
            return made, None
        if self._is_wide:
            grad_inputs, grad_inner = made[:, : self.num_in], made[:, self.num_in :]
        else:
            grad_inputs, grad_inner = made, grad @ self._up
        return grad_inputs.addmm_(grad_inner, self._down), grad_inner

    def accumulate_grads(self, inputs: Any, inner: Any, grad: Any, grad_inner: Any) -> None:
        """Add this pass to the gradients of the adapters' parameters."""
        if not self.num_ranks:
            return
        # of each product only the blocks that are somebody's own are used; computing all at once is faster all the same
        grad_down, grad_up = grad_inner.T @ inputs, grad.T @ inner
        for adapter in self._adapters:
            adapter.b.grad.add_(grad_up[adapter.rows, adapter.ranks])
            adapter.a.grad.add_(grad_down[adapter.ranks], alpha=adapter.scale)

    def _product(self, inputs: Any) -> Any:
        weight = self._weight()
        return inputs @ weight.T if self._bias is None else torch.addmm(self._bias, inputs, weight.T)

    def _weight(self) -> Any:
        if self._dense is not None:
            return self._dense
        parts = [dense_weight(layer) for layer in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _concatenate_weights(layers: Sequence[Any], num_more: int) -> Any:
    """Return one matrix for all layers, with `num_more` extra columns. Each layer's weight becomes a view of it."""
    if len(layers) == 1 and not num_more:
        return layers[0].weight.data
    first = layers[0].weight.data
    combined = first.new_zeros(sum(layer.out_features for layer in layers), layers[0].in_features + num_more)
    for layer, part in zip(layers, combined.split([layer.out_features for layer in layers]), strict=True):
        own = part[:, : layer.in_features]
        own.copy_(layer.weight.data)
        layer.weight.data = own
    return combined


def _concatenate_biases(layers: Sequence[Any]) -> Any:
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not biases:
        return None
    missing = {layer: biases[0].new_zeros(layer.out_features) for layer in layers if layer.bias is None}
    return torch.cat([missing[layer] if layer.bias is None else layer.bias.data for layer in layers])


def _adapters(modules: Sequence[Any]) -> list[Adapter]:
    made: list[Adapter] = []
    row = rank = 0
    for module in modules:
        out = getattr(module, "base_layer", module).out_features
        if hasattr(module, "lora_A"):
            (name,) = module.lora_A
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            made.append(
                Adapter(a, b, float(module.scaling[name]), slice(row, row + out), slice(rank, rank + a.shape[0]))
            )
            rank += a.shape[0]
        row += out
    return made
