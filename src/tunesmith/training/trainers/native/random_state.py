"""The random numbers a training uses: seeded once, and saved without pickle so that a resumed run draws the same.

Every process of a training draws its own, so that each has its place in the saved state: ``rank-N/``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def repeat_exactly() -> None:
    """On a CPU the same training gives the same bits. On CUDA it does not: the fast kernels for attention add up in
    whatever order they finish, and making them wait costs a good part of the speed."""
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # CUDA devices included


def random_tensors(rank: int = 0) -> dict[str, Any]:
    """torch's generators of this process, as tensors for a safetensors file; those of several ranks can be merged."""
    tensors = {f"rank-{rank}/rng/torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[f"rank-{rank}/rng/cuda"] = torch.cuda.get_rng_state()
    return tensors


def random_json(rank: int = 0) -> dict[str, Any]:
    """Python's and numpy's generators of this process, as JSON; those of several ranks can be merged."""
    version, numbers, gauss = random.getstate()
    _, keys, place, has_gauss, cached = numpy.random.get_state()
    return {
        f"rank-{rank}": {
            "python": [version, list(numbers), gauss],
            "numpy": [[int(key) for key in keys], int(place), int(has_gauss), float(cached)],
        }
    }


def put_random_state(tensors: dict[str, Any], plain: dict[str, Any], rank: int = 0) -> None:
    """Go on drawing where the state was saved; only a device of another kind starts its own numbers afresh."""
    ours = plain[f"rank-{rank}"]
    version, numbers, gauss = ours["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, place, has_gauss, cached = ours["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(tensors[f"rank-{rank}/rng/torch"])
    if torch.cuda.is_available() and f"rank-{rank}/rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rank-{rank}/rng/cuda"])
