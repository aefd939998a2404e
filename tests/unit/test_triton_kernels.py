"""The kernels for CUDA compute what the reference implementation computes: in Triton's interpreter, and on a device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install 'tunesmith[kernels]'"
)


def run_cases(**environ: str) -> None:
    argv = [sys.executable, "-m", "pytest", "-v", "-v", "-p", "no:cacheprovider", "-m", "", str(CASES)]
    done = subprocess.run(argv, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "12 passed" in done.stdout


@pytest.mark.extra
@needs_triton
def test_kernels_agree_with_the_reference_implementation_in_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: run `make gpu` on a GPU machine")
def test_kernels_agree_with_the_reference_implementation_on_the_device() -> None:
    run_cases()
