"""What the store drills run in processes of their own, and the invariants that must hold whatever happened to them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, ALL_KINDS
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind
from tunesmith.store.database import Database
from tunesmith.store.schema import open_store

FORKED = get_context("forkserver")
"""Processes that are forked from a small one. It has what is imported below, and no store open."""
# installed modules alone: the process that forks does not have our import path (it is given one, and ignores it)
FORKED.set_forkserver_preload(
    ["alembic.command", "tunesmith.client.runs", "tunesmith.orchestration.submit", "tunesmith.orchestration.worker"]
)


def start(action: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = FORKED.Process(target=action, args=arguments, daemon=True)
    process.start()
    return process


def end_all(processes: list[BaseProcess], timeout_s: float) -> list[int | None]:
    """Exit codes; a process that does not end in time is killed."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def write_transactions(url: str, num: int, acknowledged: str) -> None:
    """`num` writing transactions: tasks are added, claimed and ended; every id is noted after its commit."""
    database = open_store(url)
    worker = f"wk-{os.getpid()}"
    with Path(acknowledged).open("a", buffering=1) as sink:
        while num > 0:
            with database.write() as tx:
                task_id = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, payload={"pid": os.getpid()})
            sink.write(f"{task_id}\n")
            with database.write(durable=False) as tx:
                claim = tasks.claim(tx, worker, ALL_KINDS, 30.0)
            with database.write() as tx:
                if claim is not None:
                    tasks.end_attempt(tx, claim.lease, AttemptState.SUCCEEDED, actor=worker)
            num -= 3
    database.close()


def write_for_ever(url: str, acknowledged: str) -> None:
    write_transactions(url, 1_000_000_000, acknowledged)


def create_store(url: str) -> None:
    open_store(url, create=True).close()


def kill_amid(process: BaseProcess, acknowledged: Path, rng: random.Random, within_s: float = 0.02) -> None:
    """kill -9 once the process is under way, at a random moment within so many seconds."""
    deadline = time.monotonic() + 30
    lines = acknowledged.read_bytes().count(b"\n") if acknowledged.exists() else 0
    while not acknowledged.exists() or acknowledged.read_bytes().count(b"\n") <= lines:
        assert process.is_alive(), process.exitcode
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(rng.random() * within_s)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def broken_invariants(database: Database) -> list[str]:
    """What is wrong between the rows; each transaction is all or nothing, so nothing may be."""
    broken = []
    with database.read() as tx:
        last: dict[tuple[str, str], str] = {}
        for event in tx.all(sa.select(tables.events).order_by(tables.events.c.seq)):
            if event["new_state"] is not None:
                last[event["entity"], event["entity_id"]] = event["new_state"]
        attempts_of: dict[str, list[str]] = {}
        for attempt in tx.all(sa.select(tables.attempts)):
            attempts_of.setdefault(attempt["task_id"], []).append(attempt["state"])
        for task in tx.all(sa.select(tables.tasks)):
            task_id, state, states = task["id"], task["state"], attempts_of.get(task["id"], [])
            if last.get(("task", task_id)) != state:
                broken.append(f"{task_id} is {state}, its last event says {last.get(('task', task_id))}")
            if states.count("open") != (1 if state == "leased" else 0):
                broken.append(f"{task_id} is {state} with attempts {states}")
            if len(states) != task["num_attempts"]:
                broken.append(f"{task_id} counts {task['num_attempts']} attempts and has {len(states)}")
    return broken


def fail_then_add(database: Database) -> str:
    """One more task, with a failed attempt: a sign that the store is fully usable."""
    with database.write() as tx:
        task_id = tasks.add(tx, TaskKind.EXPORT, actor=ACTOR, priority=-1)
        claim = tasks.claim(tx, "wk-after", ALL_KINDS, 30.0)
        assert claim is not None
        assert claim.task.id == task_id
        tasks.end_attempt(tx, claim.lease, AttemptState.FAILED, actor=ACTOR, error_class=ErrorClass.BUG)
    return task_id
