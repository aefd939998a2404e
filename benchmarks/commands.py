"""How long the commands take that people type all day, in a workspace with many runs.

    python benchmarks/commands.py [--quick] [--runs N] [--rounds N]

Builds a workspace with N runs (10,000; a thousand with --quick), each with its dataset, task, attempt, version,
evaluation and events, and times every command as a process of its own. CPU is user and system time, which a busy
neighbour disturbs least; both figures are medians. Modules are compiled before, as an installed package is. Output goes
to a pipe; `import typer` is the parser alone, `import sqlalchemy` what a listing does without.
"""

from __future__ import annotations

import sys

if sys.path[0].endswith("benchmarks"):
    del sys.path[0]  # queue.py beside this script would hide the standard library's

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import sqlalchemy as sa

from support import tables
from support.rows import PROFILE, WORKER, a_run, an_adapter, an_evaluation, claim_of
from tunesmith.client import Client
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import AttemptState, TaskKind
from tunesmith.store.database import Tx

NUM_RUNS, NUM_QUICK = 10_000, 1_000
BLOCK = 1_000
ENDS = (RunState.REJECTED, RunState.COMPLETED, RunState.ROLLED_BACK, RunState.FAILED, RunState.CANCELLED)
NUM_QUEUED, NUM_HELD, NUM_FAILED_NOW = 200, 20, 20
ID = re.compile(r'"(ds|run|task|att|ad|ev)-[0-9a-z]{10,}"')
COMMANDS = (
    ("--help",),
    ("run", "list"),
    ("run", "list", "--json"),
    ("run", "list", "--limit", "10000", "--json"),
    ("run", "show", "RUN"),
    ("adapter", "list"),
    ("inbox",),
    ("inbox", "--json"),
    ("dataset", "list"),
    ("campaign", "list"),
    ("experience", "list"),
    ("profile", "list"),
)


def build(client: Client, num: int) -> str:
    """Fill the store with copies of one run that the real queries made; the id of the newest."""
    database = client._session.database
    with database.write() as tx:
        template = rows_of_one_run(tx)
        for table in reversed(tables.metadata.sorted_tables):
            if table.name in template:
                tx.run(table.delete())
        for start in range(0, num, BLOCK):
            numbers = range(start, min(num, start + BLOCK))
            for table in tables.metadata.sorted_tables:
                if table.name in template:
                    rows = [row for number in numbers for row in copies(template, table.name, number, num, tx)]
                    tx.conn.execute(table.insert(), rows)
        tx.run(tables.profiles.update().values(num_versions=num))
    return f"run-{num - 1:012d}"


def rows_of_one_run(tx: Tx) -> dict[str, list[dict[str, Any]]]:
    run = a_run(tx, RunState.COMPLETED)
    task_id = tasks.add(tx, TaskKind.TRAIN, actor=WORKER, run_id=run.id, profile=PROFILE)
    claim = claim_of(tx, task_id)
    tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=WORKER, result={"train_s": 12.0})
    an_evaluation(tx, run, an_adapter(tx, run_id=run.id), Decision.HOLD)
    names = ("datasets", "runs", "tasks", "attempts", "adapters", "evaluations", "events")
    return {name: [dict(row) for row in tx.all(sa.select(tables.metadata.tables[name]))] for name in names}


def copies(
    template: dict[str, list[dict[str, Any]]], name: str, number: int, num: int, tx: Tx
) -> Iterator[dict[str, Any]]:
    """The rows of one table for one more run: its own ids, its own state, an hour after the one before."""
    state = state_of(number, num)
    age = timedelta(hours=num - number)
    for row in template[name]:
        text = json.dumps({key: value for key, value in row.items() if isinstance(value, str | dict | list)})
        made: dict[str, Any] = {**row, **json.loads(ID.sub(rf'"\g<1>-{number:012d}"', text))}
        made.pop("seq", None)
        made |= {
            key: tx.now - age for key in ("created_at", "moved_at", "at", "started_at", "ended_at") if made.get(key)
        }
        if name == "datasets":
            made["fingerprint"] = f"fingerprint-{number}"
        if name == "adapters":
            made |= {"version": number + 1, "state": "live" if number == num - NUM_QUEUED - 1 else "candidate"}
        if name == "runs":
            made |= {"state": state, "finished_at": tx.now - age if state in RUN.finished else None}
        if name == "tasks" and state is RunState.QUEUED:
            made["state"] = "waiting"
        yield made


def state_of(number: int, num: int) -> RunState:
    """Finished ones, and among the newest those that are held, failed or wait."""
    if number >= num - NUM_QUEUED:
        return RunState.QUEUED
    if number >= num - NUM_QUEUED - NUM_HELD:
        return RunState.HELD
    if number >= num - NUM_QUEUED - NUM_HELD - NUM_FAILED_NOW:
        return RunState.FAILED
    return ENDS[number % len(ENDS)]


def measure(words: list[str], folder: Path, environ: dict[str, str], rounds: int) -> dict[str, float]:
    cpu, wall = [], []
    for number in range(rounds + 1):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=folder, env=environ, check=True, capture_output=True)
        took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if number:  # the first compiles what it imports
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            wall.append(took)
    return {"cpu_ms": 1000 * statistics.median(cpu), "wall_ms": 1000 * statistics.median(wall)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} runs, three rounds")
    parser.add_argument("--runs", type=int, default=None, help=f"how many runs; {NUM_RUNS} unless told")
    parser.add_argument("--rounds", type=int, default=None, help="how often each command is timed; 10 unless told")
    given = parser.parse_args()
    num, rounds = given.runs or (NUM_QUICK if given.quick else NUM_RUNS), given.rounds or (3 if given.quick else 10)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("TUNESMITH", "PYTHON"))}
        environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        with Client.init(folder / "workspace") as client:
            newest = build(client, num)
        print(f"{num} runs, {rounds} rounds; Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}\n")
        print(f"{'':40} {'CPU':>8} {'wall':>8}")
        calls = [(f"import {name}", ["-c", f"import {name}"]) for name in ("typer", "sqlalchemy")]
        calls += [(" ".join(words), ["-m", "tunesmith", *words]) for words in COMMANDS]
        for name, words in calls:
            found = measure(
                [newest if word == "RUN" else word for word in words], folder / "workspace", environ, rounds
            )
            figures[name] = found
            print(f"{name:40} {found['cpu_ms']:5.0f} ms {found['wall_ms']:5.0f} ms", flush=True)
    print(json.dumps({"runs": num, "rounds": rounds, "figures": figures}))


if __name__ == "__main__":
    main()
