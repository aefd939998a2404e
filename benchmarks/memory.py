"""Memory: the peak that the native trainer foretells beside the one it takes, over sizes, methods, lengths and passes.

    python benchmarks/memory.py [--quick] [--budget-s 400] [--only TEXT]

Each combination runs two steps in a process of its own, from random weights; nothing is learnt from one for the next.
Without a GPU a tiny shape shows the same figures for this process's own memory; they are not judged.
"""

from __future__ import annotations

import os
import sys

if sys.path[0].endswith("benchmarks"):
    sys.path[0] = os.path.dirname(sys.path[0])  # queue.py beside this script would hide the standard library's

import argparse
import importlib
import importlib.util
import json
import platform
import subprocess
import time
from dataclasses import asdict
from typing import Any

from benchmarks.training_arms.work import Job, examples_of, forget_peak, wait_for_device

AIM = 0.10
"""How far the forecast may be from the peak."""
_LEAST_S = 20.0


def combination(size: str, method: str, pack_tokens: int, layers: int = 0, **more: Any) -> Job:
    """Steps of one pass and a half, so that one pass is full."""
    return Job(
        more.pop("arm", "native"), method, size, steps=1, seconds=0.0, warm_up=1,
        tokens_per_step=3 * pack_tokens // 2, pack_tokens=pack_tokens, checkpointed_layers=layers, **more,
    )  # fmt: skip


ON_GPU = (
    combination("qwen3-0.6b", "sft", 32768),
    combination("qwen3-8b", "sft", 16384, 18),
    combination("qwen3-0.6b", "orpo", 32768),
    combination("qwen3-8b", "sft", 8192),
    combination("qwen3-0.6b", "dpo", 32768),
    combination("qwen3-1.7b", "sft", 32768),
    combination("qwen3-0.6b", "sft", 65536),
    combination("qwen3-8b", "orpo", 8192, 12),
    combination("qwen3-1.7b", "dpo", 16384),
    combination("qwen3-0.6b", "sft", 16384, 14),
    combination("qwen3-0.6b", "sft", 4096, longest=16384),
    combination("qwen3-1.7b", "orpo", 16384, 28),
    combination("qwen3-8b", "dpo", 8192, 36),
    combination("qwen3-0.6b", "sft", 8192, arm="native, slow path"),
    combination("qwen3-8b", "sft", 8192, quantize="nf4"),
    combination("qwen3-1.7b", "sft", 2048, longest=8192),
)
ON_CPU = (combination("tiny", "sft", 4096), combination("tiny", "orpo", 2048))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the first four combinations")
    parser.add_argument("--budget-s", type=float, help="no combination is started or goes on after this")
    parser.add_argument("--only", default="", help="those whose name holds this text")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(json.dumps(run(Job(**json.loads(options.job)))))
        return
    is_cuda = describe()
    jobs = [job for job in (ON_GPU if is_cuda else ON_CPU) if options.only in name_of(job)]
    deadline = time.monotonic() + options.budget_s if options.budget_s else None
    figures = {}
    for job in jobs[:4] if options.quick else jobs:
        figures[name_of(job)] = found = measured(job, deadline)
        print(f"{name_of(job):58} {line_of(found, is_cuda)}", flush=True)
    errors = [abs(found["error"]) for found in figures.values() if "error" in found]
    if is_cuda and errors:
        near = sum(error <= AIM for error in errors)
        print(f"{near} of {len(errors)} within {AIM:.0%}; the worst is off by {max(errors):.1%}")
    print(json.dumps({"name": "memory", "ratios": {}, "figures": figures}))


def describe() -> bool:
    import torch

    is_cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_cuda else "no GPU"
    print(f"command: python benchmarks/memory.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, {device}")
    if not is_cuda:
        print("the forecast is held against the peak on a GPU only: here a tiny shape, for looking at, not judged")
    return is_cuda


def name_of(job: Job) -> str:
    more = f", longest {job.longest}" if job.longest else ""
    more += ", nf4" if job.quantize == "nf4" else ""
    more += ", slow path" if job.arm == "native, slow path" else ""
    layers = f", {job.checkpointed_layers} layers again" if job.checkpointed_layers else ""
    return f"{job.size} {job.method}, passes of {job.pack_tokens}{layers}{more}"


def line_of(found: dict[str, Any], is_cuda: bool) -> str:
    if "failed" in found or "skipped" in found:
        return "; ".join(f"{why}: {text}" for why, text in found.items())
    judged = "" if not is_cuda else "   ok" if abs(found["error"]) <= AIM else "   OFF"
    return (
        f"predicted {found['forecast_gb']:7.2f} GB   peak {found['peak_gb']:7.2f} GB   {found['error']:+7.1%}{judged}"
    )


def measured(job: Job, deadline: float | None) -> dict[str, Any]:
    left = deadline - time.monotonic() if deadline is not None else None
    if left is not None and left < _LEAST_S:
        return {"skipped": "no time was left"}
    if job.quantize == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        return {"skipped": "bitsandbytes is not installed: pip install 'tunesmith[qlora]'"}
    argv = [sys.executable, os.path.abspath(__file__), "--job", json.dumps(asdict(job))]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in the {left:.0f} s that were left"}
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run(job: Job) -> dict[str, Any]:
    """Inside the combination's own process."""
    import torch
    from benchmarks.training_arms.native import build_training, forecast_bytes

    from tunesmith.training.trainers.native.memory import peak_bytes

    # every library is loaded before the process is weighed
    importlib.import_module("tunesmith.training.trainers.native.step")
    examples = examples_of(job)
    before = 0 if torch.cuda.is_available() else peak_bytes()
    predicted = None
    try:
        native = build_training(job, examples)
        predicted = forecast_bytes(job, native, before) / 2**30
        forget_peak()
        for number in range(min(2, native.order.num_steps)):
            native.step(number)
        wait_for_device()
    except torch.OutOfMemoryError:
        told = "nothing" if predicted is None else f"{predicted:.1f} GB"
        return {"failed": f"out of memory with {peak_bytes() / 2**30:.1f} GB in use; {told} predicted"}
    peak = peak_bytes() / 2**30
    return {"forecast_gb": round(predicted, 3), "peak_gb": round(peak, 3), "error": round(predicted / peak - 1, 4)}


if __name__ == "__main__":
    main()
