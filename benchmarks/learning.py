"""Does training help on a real base? Each method trains SmolLM2-135M, and held-out answers are scored before and after.

    python benchmarks/learning.py [--quick | --small] [--all | --method METHOD …]

Everything goes through the product: a workspace in a temporary folder, `runs.submit`, one `tunesmith worker`, the gate.
SFT and ORPO start from the bare base and are compared with it. DPO and KTO start from a live adapter of a short SFT and
are compared with that one, as both methods are meant to be used; `--all` runs all four, `--method` only those named.
`--quick` takes the demo's own tiny base and its dates, in under a minute; `--small` the real base with fewer steps and
cases, as the tests do.
"""

from __future__ import annotations

import sys

if sys.path[0].endswith("benchmarks"):
    del sys.path[0]  # queue.py beside this script would hide the standard library's

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.client import Client
from tunesmith.client.views import RunDetail
from tunesmith.demo import dates
from tunesmith.demo.base_model import cached_base
from tunesmith.evaluation.rules.comparison import paired_interval
from tunesmith.programs.protocol import Scores

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support import notes
from support.real_base import cached_smollm2, default_cache

GREEDY, SAMPLED, LOSS = "exact_match_greedy", "exact_match_sampled", "heldout_loss"
METHODS = ("sft", "orpo", "dpo", "kto")
SHORT_SFT = "short sft"
ANY_FORM = "right in any form"


@dataclass(frozen=True)
class Scale:
    """What is trained and measured, and how much of it."""

    base: Callable[[], Path]
    make_notes: Callable[[int, int], list[notes.Note]]
    num_notes: int
    num_cases: int
    max_new_tokens: int
    metrics: tuple[str, ...]
    recipe: dict[str, Any]
    steps: dict[str, int]
    lr: dict[str, float]
    heldout_share: float = 0.3
    seed: int = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the demo's tiny base, in under a minute")
    size.add_argument("--small", action="store_true", help="the real base, fewer steps and cases")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="dpo and kto too")
    which.add_argument("--method", action="append", choices=METHODS, help="only this one; may be given again")
    options = parser.parse_args()
    methods = METHODS if options.all else options.method or METHODS[:2]
    scale = QUICK if options.quick else SMALL if options.small else FULL
    base = scale.base()
    describe(base, scale)
    with tempfile.TemporaryDirectory(prefix="tunesmith-learning-") as folder, Client.init(folder) as client:
        outcomes = [learn(client, scale, base, plan) for plan in plans_for(methods)]
    show(outcomes)
    print(json.dumps({"name": "learning", "ratios": {}, "figures": {one["what"]: one for one in outcomes}}))


@dataclass(frozen=True)
class Plan:
    """One training: which method, in which profile, from where."""

    what: str
    method: str
    profile: str
    start: str = "base"
    deploy: str = "never"


def plans_for(methods: Sequence[str]) -> list[Plan]:
    """Methods that start from the base have a profile each; the others share one and the adapter live in it."""
    first = [Plan(method, method, profile=method) for method in METHODS[:2] if method in methods]
    then = [Plan(method, method, "further", start="live") for method in METHODS[2:] if method in methods]
    return first + ([Plan(SHORT_SFT, "sft", "further", deploy="promoted")] if then else []) + then


def learn(client: Client, scale: Scale, base: Path, plan: Plan) -> dict[str, Any]:
    """Prepare, train, judge; what came of it."""
    began = time.monotonic()
    write_profile(client, scale, base, plan)
    made = scale.make_notes(scale.num_notes, scale.seed)
    rows = notes.supervised_rows(made) if plan.method == "sft" else notes.preference_rows(made)
    data = client.workspace.root / f"{plan.method}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    submitted = client.runs.submit(plan.profile, data, start=plan.start, overrides=overrides(scale, plan))
    work(client)
    detail = client.runs.show(submitted.id)
    if detail.evaluation is None:
        raise SystemExit(f"{plan.what}: {detail.run.state}, {detail.run.reason}\n{client.runs.logs(submitted.id)}")
    return outcome(client, detail, plan, time.monotonic() - began)


def write_profile(client: Client, scale: Scale, base: Path, plan: Plan) -> None:
    profile = {
        "name": plan.profile,
        "role": "extractor",
        "base": {"path": str(base), "family": "llama"},
        "recipe": scale.recipe,
        "data": {"heldout_share": scale.heldout_share, "validation_share": 0.03},
        "validation": {"every_steps": 10, "max_cases": 8},
        "evaluation": {
            "metrics": list(scale.metrics),
            "max_cases": scale.num_cases,
            "max_new_tokens": scale.max_new_tokens,
        },
        "gate": {"primary": GREEDY, "min_cases": 50},
        "watch": {"for_s": 0, "interval_s": 0.5},
    }
    path = client.workspace.root / "profiles" / f"{plan.profile}.yaml"
    path.write_text(json.dumps(profile))  # JSON is YAML


def overrides(scale: Scale, plan: Plan) -> dict[str, Any]:
    return {
        "recipe.method": plan.method,
        "recipe.max_steps": scale.steps[plan.what],
        "recipe.lr": scale.lr[plan.method],
        "deploy.when": plan.deploy,
    }


def work(client: Client) -> None:
    """One worker process, until nothing is left to do.

    Threads that wait sleep instead of spinning: on a machine that others use too, spinning takes four times as long.
    """
    environ = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", **os.environ}
    command = [sys.executable, "-m", "tunesmith.cli.main", "--workspace", str(client.workspace.root)]
    log = client.workspace.root / "worker.log"
    with log.open("ab") as sink:
        done = subprocess.run([*command, "worker", "--until-idle"], stdout=sink, stderr=sink, env=environ, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the worker ended with {done.returncode}:\n{log.read_text(errors='replace')[-2000:]}")


def outcome(client: Client, detail: RunDetail, plan: Plan, seconds: float) -> dict[str, Any]:
    evaluation = detail.evaluation
    assert evaluation is not None
    trained = next(a.result for a in reversed(detail.attempts) if a.task == "train" and a.result is not None)
    kept = ("n", "baseline", "candidate", "low", "high")
    scores_file = client.workspace.data_dir / evaluation.scores_path
    return {
        "what": plan.what,
        "from": "base" if plan.start == "base" else SHORT_SFT,
        "verdict": evaluation.decision,
        "scores": {
            **{c["metric"]: {key: c[key] for key in kept} for c in evaluation.comparisons},
            ANY_FORM: any_form(scores_file),
        },
        "steps": trained["num_steps"],
        "examples": trained["num_trained_examples"],
        "tokens": trained["detail"]["num_tokens"],
        "trained_tokens": trained["num_trained_tokens"],
        "train_s": round(trained["train_s"], 1),
        "wall_s": round(seconds, 1),
    }


def any_form(scores_file: Path) -> dict[str, float]:
    """Share of greedy answers that name the right day, however they write it: a score that is blind to the format."""
    lines = (scores_file.parent / "cases.jsonl").read_text().splitlines()
    right = [json.loads(line)["messages"][-1]["content"] for line in lines]
    by_subject = Scores.model_validate_json(scores_file.read_bytes()).by_subject
    named = {
        side: [notes.names_the_day(score.answers[GREEDY], day) for score, day in zip(scores, right, strict=True)]
        for side, scores in by_subject.items()
    }
    gains = [after - before for before, after in zip(named["baseline"], named["candidate"], strict=True)]
    low, high = paired_interval(gains, 0.95, seed=1)
    shares = {side: sum(found) / len(right) for side, found in named.items()}
    return {"n": len(right), **shares, "low": low, "high": high}


def describe(base: Path, scale: Scale) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft"))
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    print(f"base {base.name}; {scale.num_notes} notes, seed {scale.seed}; recipe {json.dumps(scale.recipe)}")
    print(f"{os.cpu_count()} processors, {threads} threads; Python {platform.python_version()}, {versions}\n")


def show(outcomes: Sequence[dict[str, Any]]) -> None:
    print(f"{'method':9} {'from':10} {'score':20} {'n':>4} {'before':>7} {'after':>7}   gain, 95 % interval")
    for one in outcomes:
        for metric, score in one["scores"].items():
            gain = f"[{score['low']:+.3f}, {score['high']:+.3f}]"
            print(
                f"{one['what']:9} {one['from']:10} {metric:20} {score['n']:>4} {score['baseline']:>7.3f} "
                f"{score['candidate']:>7.3f}   {gain}"
            )
        print(
            f"{'':20} {one['verdict']}; {one['steps']} steps, {one['examples']} examples, {one['tokens']:,} tokens, "
            f"of them {one['trained_tokens']:,} learnt; training {one['train_s']:.0f} s of {one['wall_s']:.0f} s\n"
        )


def demo_notes(num: int, seed: int) -> list[notes.Note]:
    """Numeric dates, bare, about days that the demo's base never saw; the mistake is day and month swapped."""
    made = []
    for row in dates.numbers_rows(num, seed):
        asked, answer = (message["content"] for message in row["messages"])
        year, month, day = json.loads(answer).values()
        right = f"{year}-{month:02}-{day:02}"
        wrong = f"{year}-{day:02}-{month:02}" if day != month else f"{month:02}-{day:02}-{year}"
        made.append(notes.Note(asked, right, wrong, instruction=None))
    return made


REAL_RECIPE = {
    "epochs": 20,
    "batch_tokens": 512,
    "micro_batch_tokens": 1024,
    "max_length": 128,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "orpo_nll": "answer",
}
QUICK = Scale(
    base=lambda: cached_base(default_cache(), quick=True),
    make_notes=demo_notes,
    num_notes=600,
    num_cases=100,
    max_new_tokens=16,
    metrics=(LOSS, GREEDY, SAMPLED),
    recipe={**REAL_RECIPE, "batch_tokens": 1024, "train_embeddings": True},
    steps={"sft": 80, "orpo": 80, SHORT_SFT: 20, "dpo": 20, "kto": 20},
    lr={"sft": 5e-3, "orpo": 5e-3, "dpo": 1e-3, "kto": 1e-3},
)
FULL = Scale(
    base=lambda: cached_smollm2(default_cache()),
    make_notes=notes.make_notes,
    num_notes=450,
    num_cases=120,
    max_new_tokens=20,
    metrics=(LOSS, GREEDY, SAMPLED),
    recipe=REAL_RECIPE,
    steps={"sft": 24, "orpo": 24, SHORT_SFT: 6, "dpo": 16, "kto": 16},
    lr={"sft": 1e-3, "orpo": 1e-3, "dpo": 2e-4, "kto": 2e-4},
)
SMALL = replace(
    FULL,
    num_notes=360,
    num_cases=100,
    metrics=(LOSS, GREEDY),
    steps={"sft": 14, "orpo": 14, SHORT_SFT: 6, "dpo": 8, "kto": 8},
)


if __name__ == "__main__":
    main()
