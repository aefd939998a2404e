"""`tunesmith demo`: the whole loop for real on this machine: train, judge, deploy; then refuse a bad candidate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tunesmith.client import Client
from tunesmith.client.views import RunDetail
from tunesmith.core.errors import Refused
from tunesmith.demo import dates
from tunesmith.demo.base_model import cached_base
from tunesmith.demo.outcome import DemoScores, TaskScore, read_outcome
from tunesmith.demo.report import write_report
from tunesmith.runs.rules.run import RunState

PROFILE = "dates"
_MARKER = ".demo"


@dataclass(frozen=True)
class _Scale:
    """How much of everything; quick shows the same story with a smaller base and less data."""

    num_rows: int
    steps: int
    bad_steps: int
    min_cases: int


_FULL = _Scale(num_rows=2000, steps=200, bad_steps=30, min_cases=100)
_QUICK = _Scale(num_rows=1000, steps=160, bad_steps=30, min_cases=40)


def run_demo(folder: Path, *, quick: bool, console: Console) -> int:
    """Returns 0 only if the better adapter is live at the end and the bad one is not."""
    began = time.monotonic()
    scale = _QUICK if quick else _FULL
    console.print("[bold]tunesmith demo[/]: one round of the loop, on this machine, nothing simulated\n")
    base = _build_base(quick, console)
    client = _new_workspace(folder, base, scale)
    with client:
        _say(console, 1, "learn numeric dates, as JSON, and forget nothing")
        good = _run(client, console, "examples.jsonl", scale.steps, "better candidate")
        _show_verdict(console, good)
        outcome = read_outcome(client, good)
        _show_scores(console, outcome)
        _say(console, 2, "the same prompts with shuffled answers must never go live")
        bad = _run(client, console, "shuffled.jsonl", scale.bad_steps, "bad candidate")
        _show_verdict(console, bad)
        live = client.adapters.live(PROFILE)
        report = write_report(client, [good, bad], outcome, folder / "report.html")
        served = client.workspace.data_dir / "live" / PROFILE / "current"
    succeeded = good.run.state == RunState.DEPLOYED and bad.run.state == RunState.REJECTED and live is not None
    console.print()
    if succeeded and live is not None:
        console.print(f"[bold green]live:[/] {live.name}, made by {live.run_id}, served from {_short(served)}")
    else:
        console.print(f"[bold red]not as expected:[/] {good.run.state} / {bad.run.state}; see `tunesmith run show`")
    console.print(f"report: {_short(report)}   took {time.monotonic() - began:.0f} s")
    command = _short(Path(sys.executable).with_name("tunesmith"))
    console.print(f"look around: {command} --workspace {_short(folder)} run list", soft_wrap=True)
    if live is not None:
        told = f"{command} --workspace {_short(folder)} lineage {live.name}"
        console.print(f"where it came from: {told}", soft_wrap=True)
    return 0 if succeeded else 1


def _build_base(quick: bool, console: Console) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith"
    with _progress(console) as progress:
        bar = progress.add_task("base model: training once, then cached", total=None)
        base = cached_base(cache, quick, lambda done, total: progress.update(bar, completed=done, total=total))
        if progress.tasks[bar].total is None:
            progress.update(bar, description="base model: cached", completed=1, total=1)
    return base


def _new_workspace(folder: Path, base: Path, scale: _Scale) -> Client:
    """A fresh workspace; only a folder that an earlier demo made is replaced."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists():
            raise Refused(f"{folder} is not empty and not an earlier demo's; name another folder")
        shutil.rmtree(folder)
    client = Client.init(folder)
    (folder / _MARKER).write_text("made by `tunesmith demo`, replaced by the next one\n")
    (folder / "profiles" / f"{PROFILE}.yaml").write_text(
        _PROFILE.format(base=base, steps=scale.steps, min_cases=scale.min_cases)
    )
    rows = dates.mixed_rows(scale.num_rows, seed=7)
    _write_jsonl(folder / "examples.jsonl", rows)
    _write_jsonl(folder / "shuffled.jsonl", dates.shuffled_answers(rows, seed=8))
    return client


def _write_jsonl(path: Path, rows: list[dates.Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


_PROFILE = """\
# The demo's profile. Every key is explained in profiles/example.yaml.sample.
name: dates
description: dates in words to ISO (known), numeric dates to JSON (new)
role: extractor
base:
  path: {base}
  family: llama
recipe:
  max_steps: {steps}
  epochs: 100
  lr: 5e-3
  lora_rank: 16
  lora_dropout: 0.0
  batch_tokens: 2048
  max_length: 256
  train_embeddings: true
validation:
  every_steps: 40
  max_cases: 64
evaluation:
  metrics: [heldout_loss, exact_match_greedy, exact_match_sampled]
  max_new_tokens: 40
  batch_size: 64
gate:
  min_cases: {min_cases}
watch:
  for_s: 2
  interval_s: 1
"""


def _run(client: Client, console: Console, data: str, steps: int, label: str) -> RunDetail:
    """Submit, let a real worker process do the work, and show how far it is."""
    submitted = client.runs.submit(
        PROFILE, client.workspace.root / data, overrides=[f"recipe.max_steps={steps}"], start="base"
    )
    command = [sys.executable, "-m", "tunesmith.cli.main", "--workspace", str(client.workspace.root)]
    with (client.workspace.root / "worker.log").open("ab") as log, _progress(console) as progress:
        worker = subprocess.Popen([*command, "worker", "--until-idle"], stdout=log, stderr=log)
        try:
            bar = progress.add_task(label, total=None)
            for now in client.runs.watch(submitted.id, interval_s=0.2):
                what = f"{label}: {now.state}" + (f", {now.phase}" if now.phase else "")
                progress.update(bar, description=what, completed=now.done, total=now.total or None)
                if worker.poll() not in (None, 0):
                    break
            progress.update(bar, description=f"{label}: {client.runs.get(submitted.id).state}", completed=1, total=1)
        finally:
            worker.terminate()
            worker.wait()
    return client.runs.show(submitted.id)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:<44}"), BarColumn(24), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def _say(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]Round {number}:[/] {text}")


def _show_verdict(console: Console, detail: RunDetail) -> None:
    if detail.evaluation is None:
        console.print(f"[red]{detail.run.state}[/]: {detail.run.reason}")
        return
    colour = "green" if detail.evaluation.decision == "promote" else "yellow"
    console.print(f"gate: [bold {colour}]{detail.evaluation.decision}[/] — {'; '.join(detail.evaluation.reasons)}")


def _show_scores(console: Console, outcome: DemoScores) -> None:
    table = Table(title="Held-out cases, never trained on", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("task", "n", "score", "before", "after", "gain, 95 %"):
        table.add_column(column, justify="left" if column in ("task", "score") else "right")
    for score in outcome.scores:
        table.add_row(*_row(score))
    console.print(table)
    console.print("[dim]new: 7.3.1990 → JSON; old: march seventh nineteen ninety → 1990-03-07[/]\n")
    for example in outcome.examples:
        console.print(f"  [dim]{example.prompt}[/]  before [red]{example.before}[/]  after [green]{example.after}[/]")


def _row(score: TaskScore) -> tuple[str, ...]:
    gain = f"[{score.low:+.2f}, {score.high:+.2f}]".replace("[", "\\[")
    return (score.task, str(score.n), score.name, f"{score.before:.2f}", f"{score.after:.2f}", gain)


def _short(path: Path) -> str:
    try:
        return (
            str(path.resolve().relative_to(Path.cwd())) if not path.is_symlink() else str(path.relative_to(Path.cwd()))
        )
    except ValueError:
        return str(path)
