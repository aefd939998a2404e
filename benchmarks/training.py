"""Training throughput: the native trainer beside TRL's arms, same model, same examples, in one run.

    python benchmarks/training.py [--quick] [--methods sft,dpo,orpo] [--sizes qwen3-0.6b,qwen3-8b] [--budget-s 480]
                                  [--out FOLDER] [--profile]
    python benchmarks/training.py --draw results.json … --out FOLDER

Random weights; examples of log-normal length; tokens are real ones, padding not counted. Each arm runs in a process of
its own. On a CPU arms take turns and the best of their rounds counts; on a GPU each runs once, the native trainer
first. Steps before the timed ones are told as start-up. Every arm also tells the loss of the same examples before
training, and one that packs whether an example sees its neighbour: a fast arm that computes something else gets no
ratio.
"""

from __future__ import annotations

import os
import sys

if sys.path[0].endswith("benchmarks"):
    sys.path[0] = os.path.dirname(sys.path[0])  # queue.py beside this script would hide the standard library's

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.training_arms import report
from benchmarks.training_arms.work import SIZES, Job, Measured, forget_peak, peak_memory_gb

METHODS = ("sft", "dpo", "orpo")
_LEAST_S = 20.0
"""With less left of the budget, no arm is started."""
ARMS = {
    "native": METHODS,
    "trl default": METHODS,
    "trl no checkpointing": METHODS,
    "trl no checkpointing, reference ahead": ("dpo",),
    "trl packed + liger": ("sft",),
    "trl packed": ("sft",),
    "native, slow path": METHODS,
    "native, padded": METHODS,
}
"""Which methods have them; in order of importance."""


def main() -> None:
    options = parsed()
    if options.job:
        print(json.dumps(run(Job(**json.loads(options.job)))))
        return
    if options.draw:
        results = merged([json.loads(Path(path).read_text()) for path in options.draw])
        for path in report.write(Path(options.out or "."), results):
            print(f"written: {path}")
        return
    is_cuda = has_cuda()
    results = describe(is_cuda)
    deadline = time.monotonic() + options.budget_s if options.budget_s else None
    cells: dict[tuple[str, str, str], report.Cell] = {}
    for _ in range(1 if is_cuda or options.quick else 3):
        for job in jobs_of(options, is_cuda):
            keep_best(cells, measure(job, is_cuda, deadline, options.peak_tflops))
    results["cells"] = list(cells.values())
    report.judge(results["cells"])
    for cell in results["cells"]:
        print(report.line_of(cell))
    if options.out:
        for path in report.write(Path(options.out), results):
            print(f"written: {path}")
    figures = {f"{cell['method']} {cell['size']} {cell['arm']}": short(cell) for cell in results["cells"]}
    print(json.dumps({"name": "training", "ratios": report.ratios_of(results["cells"]), "figures": figures}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, one round, only the arms that matter most")
    parser.add_argument("--methods", help="of sft, dpo, orpo, with commas; all on a GPU, sft elsewhere")
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}; qwen3-0.6b and 8b on a GPU, tiny elsewhere")
    parser.add_argument("--arms", help="only these, with semicolons between them")
    parser.add_argument("--steps", type=int, help="timed steps, at most")
    parser.add_argument("--seconds", type=float, help="about how long each arm is timed; 0: all the steps")
    parser.add_argument("--tokens-per-step", type=int, help="of the native trainer; TRL's have as many examples")
    parser.add_argument("--pack-tokens", type=int, help="of one pass of the native trainer")
    parser.add_argument("--checkpointed-layers", type=int, default=0, help="of the native trainer")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="of this GPU, that MFU is measured by")
    parser.add_argument("--budget-s", type=float, help="no arm goes on for longer than this, counted from the start")
    parser.add_argument("--profile", action="store_true", help="kernels of two more steps of the native trainer")
    parser.add_argument("--out", help="folder for results.json, table.md and a chart per method")
    parser.add_argument("--draw", nargs="+", help="only write table and charts, of these results.json together")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, known in (("methods", METHODS), ("sizes", tuple(SIZES))):
        unknown = set(filter(None, (getattr(options, name) or "").split(","))) - set(known)
        if unknown:
            parser.error(f"--{name}: {sorted(unknown)[0]!r} is none of {', '.join(known)}")
    return options


def jobs_of(options: argparse.Namespace, is_cuda: bool) -> list[Job]:
    """Arm by arm, so that a short budget leaves out the same arms everywhere."""
    methods = (options.methods or (",".join(METHODS) if is_cuda else "sft")).split(",")
    sizes = (options.sizes or ("qwen3-0.6b,qwen3-8b" if is_cuda else "tiny")).split(",")
    arms = [arm.strip() for arm in options.arms.split(";")] if options.arms else list(ARMS)
    jobs = []
    left_out = {"native, padded"} if is_cuda or options.quick else set()
    left_out |= set() if is_cuda else {"native, slow path"}  # without CUDA there is no other path
    for arm in arms:
        if not options.arms and arm in left_out:
            continue
        for size in sizes:
            for method in methods:
                if method in ARMS.get(arm, ()):
                    jobs.append(new_job(options, is_cuda, arm, method, size))
    return jobs


def new_job(options: argparse.Namespace, is_cuda: bool, arm: str, method: str, size: str) -> Job:
    steps = options.steps or (2 if options.quick else 24 if is_cuda else 8)
    seconds = options.seconds if options.seconds is not None else (10.0 if is_cuda and not options.quick else 0.0)
    return Job(
        arm, method, size, steps, seconds,
        warm_up=4 if is_cuda else 1,
        tokens_per_step=options.tokens_per_step or SIZES[size].tokens_per_step,
        pack_tokens=options.pack_tokens or SIZES[size].pack_tokens,
        checkpointed_layers=options.checkpointed_layers,
        is_profiled=options.profile and arm == "native",
    )  # fmt: skip


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def describe(is_cuda: bool) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if is_cuda else "no GPU"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {device}"
    names = [
        name for name in ("torch", "transformers", "peft", "trl", "liger_kernel") if importlib.util.find_spec(name)
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    command = f"python benchmarks/training.py {' '.join(sys.argv[1:])}".rstrip()
    print(f"command: {command}\nmachine: {machine}\nversions: {versions}", flush=True)
    return {"name": "training", "command": command, "machine": machine, "versions": versions}


def measure(job: Job, is_cuda: bool, deadline: float | None, peak_tflops: float) -> report.Cell:
    """One arm, once, in a process of its own; or why there are no figures of it."""
    cell: report.Cell = {"method": job.method, "size": job.size, "arm": job.arm}
    left = deadline - time.monotonic() if deadline is not None else None
    lacking = lacking_for(job, is_cuda)
    if lacking or (left is not None and left < _LEAST_S):
        return told(cell | {"skipped": lacking or "no time was left"})
    argv = [sys.executable, os.path.abspath(__file__), "--job", json.dumps(asdict(job))]
    # as our programs have it, for every arm: where cores are shared, spinning makes TRL slower
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=left, env=env)
    except subprocess.TimeoutExpired:
        return told(cell | {"failed": f"not done in the {left:.0f} s that were left"})
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return told(cell | {"failed": "out of memory" if "out of memory" in why else why[:300]})
    cell |= json.loads(done.stdout.strip().splitlines()[-1])
    if "failed" not in cell:
        flop = 4.0 * cell["num_parameters"] * cell["computed_tokens_per_s"]
        cell["mfu"] = round(flop / (peak_tflops * 1e12), 4) if is_cuda else None
    return told(cell)


def lacking_for(job: Job, is_cuda: bool) -> str | None:
    """Why an arm cannot run here."""
    if "liger" in job.arm and not is_cuda:
        return "its kernels need a GPU"
    wanted = {"trl": "trl" in job.arm, "datasets": "trl" in job.arm, "liger_kernel": "liger" in job.arm}
    for name, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install -c constraints.txt -e '.[bench-gpu]'"
    return None


def told(cell: report.Cell) -> report.Cell:
    """At once, so that a run that is cut off has said what it found."""
    print(report.line_of(cell), flush=True)
    if "profile" in cell:
        from benchmarks.training_arms.kernels import shown

        print(shown(cell["profile"]), flush=True)
    return cell


def keep_best(cells: dict[tuple[str, str, str], report.Cell], cell: report.Cell) -> None:
    key = (cell["method"], cell["size"], cell["arm"])
    best = cells.get(key, {})
    if cell.get("tokens_per_s", 0.0) >= best.get("tokens_per_s", 0.0):
        cells[key] = cell


def short(cell: report.Cell) -> report.Cell:
    """What the last line tells of an arm; the rest is in results.json."""
    left_out = ("method", "size", "arm", "profile", "losses", "num_parameters")
    return {name: value for name, value in cell.items() if name not in left_out}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Arms that several runs measured count as the last of them has it."""
    cells = {(cell["method"], cell["size"], cell["arm"]): cell for one in results for cell in one["cells"]}
    whole = results[-1] | {"command": "`; `".join(dict.fromkeys(one["command"] for one in results))}
    whole["cells"] = list(cells.values())
    report.judge(whole["cells"])
    return whole


def run(job: Job) -> dict[str, Any]:
    """Inside the arm's own process."""
    import torch

    forget_peak()
    try:
        if job.arm.startswith("native"):
            from benchmarks.training_arms.native import run_native as run_arm
        else:
            from benchmarks.training_arms.trl_arms import run_trl as run_arm
        return figures_of(run_arm(job))
    except torch.OutOfMemoryError:
        return {"failed": f"out of memory, with {peak_memory_gb():.1f} GB in use"}


def figures_of(measured: Measured) -> dict[str, Any]:
    if measured.seconds <= 0:
        return {"failed": "it ended before anything was timed: ask for more steps"}
    return {
        "tokens_per_s": round(measured.tokens / measured.seconds, 1),
        "examples_per_s": round(measured.examples / measured.seconds, 3),
        "computed_tokens_per_s": round(measured.computed_tokens / measured.seconds, 1),
        "memory_gb": round(peak_memory_gb(), 2),
        "start_loss": measured.start_loss,
        "losses": [round(loss, 5) for loss in measured.losses[:10]],
        "start_up_s": round(measured.start_up_s, 1),
        "timed_s": round(measured.seconds, 2),
        **measured.more,
    }


if __name__ == "__main__":
    main()
