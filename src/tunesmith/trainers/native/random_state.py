"""The random numbers a training uses: seeded once, and saved without pickle so that a resumed run draws the same."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

_TORCH, _CUDA = "rng/torch", "rng/cuda"


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # CUDA devices included


def random_tensors() -> dict[str, Any]:
    """torch's generators, as tensors for a safetensors file."""
    tensors = {_TORCH: torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[_CUDA] = torch.cuda.get_rng_state()
    return tensors


def random_json() -> dict[str, Any]:
    """Python's and numpy's generators, as JSON."""
    version, numbers, gauss = random.getstate()
    _, keys, place, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [[int(key) for key in keys], int(place), int(has_gauss), float(cached)],
    }


def put_random_state(tensors: dict[str, Any], plain: dict[str, Any]) -> None:
    """Go on drawing where the state was saved; only a device of another kind starts its own numbers afresh."""
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, place, has_gauss, cached = plain["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(tensors[_TORCH])
    if torch.cuda.is_available() and _CUDA in tensors:
        torch.cuda.set_rng_state(tensors[_CUDA])
