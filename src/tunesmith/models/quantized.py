"""A base whose linear layers are held in 4 bits (NF4, as in QLoRA), made with bitsandbytes where that works.

The weights are unpacked for each product and thrown away again: 0.52 bytes per weight stay instead of 2 or 4. The head
and the embeddings stay as they are, and so does a layer whose rows are no whole number of blocks: there, the CPU build
of bitsandbytes 0.50 unpacks wrong weights.
"""

from __future__ import annotations

from typing import Any

import torch

from tunesmith.core.errors import ConfigError

_BLOCK = 64
"""Weights that share one scale."""
_MAX_ERROR = 0.2
"""Of the largest weight: half the widest gap between NF4's sixteen values is 0.152, and the scales are rounded too."""
_INSTEAD = "or set recipe.quantize: none"


def is_quantized(linear: Any) -> bool:
    """Whether this layer's weight is held in 4 bits."""
    return getattr(getattr(linear, "weight", None), "quant_state", None) is not None


def dense_weight(linear: Any) -> Any:
    """The layer's weight as the matrix it computes with, bf16 or fp32; of a layer in 4 bits, a fresh copy."""
    weight = linear.weight
    if not is_quantized(linear):
        return weight.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def check_quantizing(device: Any) -> None:
    """Refuse unless a layer survives the way into 4 bits and back on this device: asked, because builds differ."""
    weight = torch.linspace(-1.0, 1.0, 8 * _BLOCK, dtype=_dtype_on(device)).view(4, 2 * _BLOCK)
    dense = torch.nn.Linear(2 * _BLOCK, 4, bias=False, device="meta")
    dense.weight = torch.nn.Parameter(weight, requires_grad=False)
    try:
        back = dense_weight(_in_4_bits(dense, device))
        error = float((back.float() - weight.to(device).float()).abs().max())
    except ImportError as problem:
        raise ConfigError(
            f"recipe.quantize: nf4 needs bitsandbytes, which cannot be imported here ({_reason(problem)}); "
            f"pip install 'tunesmith[qlora]', {_INSTEAD}"
        ) from None
    except Exception as problem:  # its native part raises whatever it likes where it has no build for the machine
        raise ConfigError(
            f"recipe.quantize: bitsandbytes does not work on {device.type} here ({_reason(problem)}); install a build "
            f"for this machine (pip install --upgrade 'tunesmith[qlora]'), {_INSTEAD}"
        ) from None
    if not error <= _MAX_ERROR:
        raise ConfigError(
            f"recipe.quantize: bitsandbytes computes wrong numbers on {device.type} here (a weight came back off by "
            f"{error:.2f}, nf4 explains {_MAX_ERROR}); pip install --upgrade 'tunesmith[qlora]', {_INSTEAD}"
        )


def quantize_linears(model: Any, device: Any) -> None:
    """Replace the model's linear layers, except its head, by the same in 4 bits on the device, one after the other."""
    head = model.get_output_embeddings()
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    ]
    for name, module in found:
        if not module.weight.is_floating_point():
            raise ConfigError(f"recipe.quantize: {name} of the base is quantised already; set recipe.quantize: none")
    fitting = [(name, module) for name, module in found if module.in_features % _BLOCK == 0]
    if not fitting:
        raise ConfigError(
            f"recipe.quantize: no linear layer of this base has rows of a multiple of {_BLOCK} weights, which nf4 "
            "needs; set recipe.quantize: none"
        )
    for name, module in fitting:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _in_4_bits(module, device))


def _in_4_bits(linear: Any, device: Any) -> Any:
    """The layer as bitsandbytes' own; the way from 16 or 32 bits to 4 happens on the device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=_dtype_on(device),
        quant_type="nf4",
        compress_statistics=True,  # the scales are quantised too
        device="meta",  # no random weights: what they are drawn from decides the adapter
    )
    # For a forward pass without gradients it would repack the weights into a layout that neither a backward pass nor
    # `dense_weight` can read, and compute in bf16.
    made.support_avx512bf16_for_cpu = False
    made.weight = Params4bit(
        linear.weight.detach(),
        requires_grad=False,
        quant_type="nf4",
        blocksize=_BLOCK,
        compress_statistics=True,
        module=made,
    ).to(device)
    if linear.bias is not None:
        made.bias = torch.nn.Parameter(linear.bias.detach().to(device), requires_grad=False)
    return made.train(linear.training)


def _dtype_on(device: Any) -> Any:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
