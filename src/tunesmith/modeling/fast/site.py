"""Linear layers that read the same input, with the adapters on them, as few and large products.

`y = x Wᵀ + (x Aᵀ)(sB)ᵀ`. The weights of the layers lie below each other in one matrix, of which the layers of the model
are views from then on. What the adapters add lies in the same matrix, so that most of their work is done by the same
product: as more columns, where inputs come with room for it (*wide* sites), or as more rows. Copies of A and B in the
model's dtype are made before each pass. Gradients go straight to the parameters', which are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunesmith.modeling.quantized import dense_weight, is_quantized

_ALIGNED = 64
_WIDE = 1.5
"""From so many outputs per input on it is cheaper to lengthen the inputs than to add to the outputs afterwards."""


@dataclass(frozen=True)
class Adapter:
    """One layer's A and B, and which rows and ranks of the site are theirs."""

    a: Any
    b: Any
    scale: float
    rows: slice
    ranks: slice


class Site:
    """One or several linear layers on the same input."""

    def __init__(self, modules: Sequence[Any], *, may_widen: bool = False) -> None:
        """`modules`: plain linear layers, or peft's with one LoRA adapter each. `may_widen`: whether whoever makes the
        inputs can leave room beside them (`width`)."""
        self._layers = [getattr(module, "base_layer", module) for module in modules]
        self.num_in: int = self._layers[0].in_features
        self.num_out: int = sum(layer.out_features for layer in self._layers)
        self._adapters = _adapters(modules)
        self._num_used = sum(adapter.a.shape[0] for adapter in self._adapters)
        self.num_ranks = -(-self._num_used // _ALIGNED) * _ALIGNED
        self._bias = _joined_bias(self._layers)
        self._is_dense = not any(map(is_quantized, self._layers))
        self._is_wide = may_widen and self._is_dense and self.num_ranks > 0 and self.num_out >= _WIDE * self.num_in
        self._down, self._up = self._take_weights()

    @property
    def width(self) -> int:
        """How wide the rows given to `forward` must be: the inputs, and room for what a wide site puts beside them."""
        return self.num_in + (self.num_ranks if self._is_wide else 0)

    @property
    def num_trained(self) -> int:
        return sum(adapter.a.numel() + adapter.b.numel() for adapter in self._adapters)

    def copies(self) -> tuple[list[Any], list[Any], list[float]]:
        """Where copies of the parameters go, those parameters, and by what each is multiplied."""
        places = [self._down[adapter.ranks] for adapter in self._adapters]
        places += [self._up[adapter.rows, adapter.ranks] for adapter in self._adapters]
        parameters = [adapter.a for adapter in self._adapters] + [adapter.b for adapter in self._adapters]
        return places, parameters, [*([1.0] * len(self._adapters)), *(adapter.scale for adapter in self._adapters)]

    def collect_into(self, gradients: Any) -> None:
        """From now on the gradients of the adapters are these numbers, which are zero."""
        parts = gradients.split(
            [adapter.a.numel() for adapter in self._adapters] + [adapter.b.numel() for adapter in self._adapters]
        )
        for number, adapter in enumerate(self._adapters):
            adapter.a.grad = parts[number].view_as(adapter.a)
            adapter.b.grad = parts[number + len(self._adapters)].view_as(adapter.b)
        self._down_gradient = gradients[: self._num_used * self.num_in].view(self._num_used, self.num_in)

    def forward(self, inputs: Any) -> tuple[Any, Any]:
        """Outputs, and the inner product that the gradients need again."""
        if not self.num_ranks:
            return self._biased(inputs @ self._weight().T), None
        if self._is_wide:
            inner = inputs[:, : self.num_in] @ self._down.T
            inputs[:, self.num_in :] = inner
            return self._biased(inputs @ self._weight().T), inner
        made = inputs @ self._weight().T
        outputs, inner = made[:, : self.num_out], made[:, self.num_out :].clone()  # else it would keep the outputs
        return self._biased(outputs.addmm_(inner, self._up.T)), inner

    def backward(self, inputs: Any, inner: Any, grad: Any) -> Any:
        """Gradient of the inputs; those of the adapters are added to their parameters'."""
        grad_inputs, grad_inner = self.backward_inputs(grad)
        self.learn(inputs, inner, grad, grad_inner)
        return grad_inputs

    def backward_inputs(self, grad: Any) -> tuple[Any, Any]:
        """Gradients of the inputs and of the inner product."""
        if not self.num_ranks:
            return grad @ self._weight(), None
        if self._is_wide:
            made = grad @ self._weight()
            grad_inputs, grad_inner = made[:, : self.num_in], made[:, self.num_in :]
            return grad_inputs.addmm_(grad_inner, self._down), grad_inner
        longer = grad.new_empty(len(grad), self.num_out + self.num_ranks)
        longer[:, : self.num_out] = grad
        grad_inner = longer[:, self.num_out :]
        torch.mm(grad, self._up, out=grad_inner)
        return longer @ self._weight(), grad_inner

    def learn(self, inputs: Any, inner: Any, grad: Any, grad_inner: Any) -> None:
        """Add to the gradients of the adapters."""
        if not self.num_ranks:
            return
        self._down_gradient.add_(grad_inner[:, : self._num_used].T @ inputs)
        for adapter in self._adapters:
            adapter.b.grad.add_(grad[:, adapter.rows].T @ inner[:, adapter.ranks], alpha=adapter.scale)

    def _take_weights(self) -> tuple[Any, Any]:
        """Join the layers' weights with room for the copies of A and B; those two rooms."""
        like = dense_weight(self._layers[0])
        down, up = like.new_zeros(self.num_ranks, self.num_in), like.new_zeros(self.num_out, self.num_ranks)
        if not self._is_dense:
            return down, up
        wider, higher = (self.num_ranks, 0) if self._is_wide else (0, self.num_ranks)
        self._joined = like.new_zeros(self.num_out + higher, self.num_in + wider)
        parts = self._joined[: self.num_out, : self.num_in].split([layer.out_features for layer in self._layers])
        for layer, part in zip(self._layers, parts, strict=True):
            part.copy_(layer.weight.data)
            layer.weight.data = part  # nothing is held twice
        return (down, self._joined[:, self.num_in :]) if self._is_wide else (self._joined[self.num_out :], up)

    def _weight(self) -> Any:
        """All matrices and what lies beside or below them; of a base in 4 bits, made for this product."""
        if self._is_dense:
            return self._joined
        return torch.cat([*(dense_weight(layer) for layer in self._layers), self._down])

    def _biased(self, outputs: Any) -> Any:
        return outputs if self._bias is None else outputs.add_(self._bias)


def _joined_bias(layers: Sequence[Any]) -> Any:
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
