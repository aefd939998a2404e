"""Where the time of a step goes: kernels of two profiled steps by family, and how long the GPU had nothing to do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

NUM_SHOWN = 25
FAMILIES = (
    ("attention bwd", re.compile(r"(flash|fmha|attention|sdpa|flex).*(bwd|bprop|backward|dot_do_o|dq)", re.I)),
    ("attention fwd", re.compile(r"flash|fmha|attention|sdpa|flex", re.I)),
    ("gemm", re.compile(r"gemm|cutlass|nvjet|cublas|gemv|splitk|::mm\b|addmm|bmm|xmma|wgmma", re.I)),
    ("copy", re.compile(r"memcpy|memset|copy|catarray|transpose|_to_copy|clone", re.I)),
    (
        "pointwise, triton",
        re.compile(
            r"triton|^_(apply_rotary|swiglu|token_log_probs|add_copies)|elementwise|reduce|softmax|norm|foreach|multi_tensor|adam|fused",
            re.I,
        ),
    ),
)
"""The first that matches counts: a backward kernel of attention is also one of attention."""


def profiled(work: Callable[[], object], wall_s: float) -> dict[str, Any]:
    """`wall_s` is what the same work takes unprofiled: the profiler itself makes it slower."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    is_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        work()
        if is_cuda:
            torch.cuda.synchronize()
    times: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    for event in seen.key_averages():
        spent = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if spent > 0 and not event.is_user_annotation:  # an annotation spans kernels that are counted themselves
            times[event.key] += spent / 1e6
            calls[event.key] += event.count
    return summary(times, calls, wall_s)


def summary(times: dict[str, float], calls: dict[str, int], wall_s: float) -> dict[str, Any]:
    """Shares of the time in kernels, by family and for the longest ones."""
    total = sum(times.values()) or 1.0
    families: defaultdict[str, float] = defaultdict(float)
    for name, spent in times.items():
        families[family_of(name)] += spent
    longest = sorted(times, key=lambda name: -times[name])[:NUM_SHOWN]
    return {
        "kernel_s": round(total, 4),
        "wall_s": round(wall_s, 4),
        "idle_share": round(max(0.0, 1.0 - total / wall_s), 4),
        "families": {name: round(spent / total, 4) for name, spent in sorted(families.items(), key=lambda it: -it[1])},
        "kernels": [
            {
                "name": name[:120],
                "family": family_of(name),
                "share": round(times[name] / total, 4),
                "calls": calls[name],
            }
            for name in longest
        ],
    }


def family_of(name: str) -> str:
    return next((family for family, pattern in FAMILIES if pattern.search(name)), "other")


def shown(profile: dict[str, Any]) -> str:
    lines = [
        f"two steps: {profile['wall_s']:.3f} s, kernels {profile['kernel_s']:.3f} s, idle {profile['idle_share']:.1%}",
        "  ".join(f"{family} {share:.1%}" for family, share in profile["families"].items()),
    ]
    lines += [
        f"{kernel['share']:7.2%} {kernel['calls']:>7} x  {kernel['family']:18} {kernel['name'][:90]}"
        for kernel in profile["kernels"]
    ]
    return "\n".join(lines)
