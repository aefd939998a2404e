"""Who computes on a machine's device: serving, or training. Decisions only; serving always comes back.

A worker asks for the device (`requested`), the server steps aside and gives it (`given`), and takes it back by itself
when nobody needs it any more (`over`). No rule here waits for a message that a dead process would have to send.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, assert_never

from tunesmith.core.states import Transitions
from tunesmith.runs.rules.task import TaskKind, TaskState


class ServerState(StrEnum):
    """What a server is doing with its device."""

    SERVING = "serving"
    STEPPING_ASIDE = "stepping_aside"  # no new answers; those under way are written to their end
    ASIDE = "aside"  # the device is free for training
    RETURNING = "returning"


class HandOverState(StrEnum):
    """A device is asked for, given, and given back; it is never forgotten in between."""

    REQUESTED = "requested"
    GIVEN = "given"
    OVER = "over"


HAND_OVER = Transitions(
    "hand-over",
    {
        HandOverState.REQUESTED: frozenset({HandOverState.GIVEN, HandOverState.OVER}),
        HandOverState.GIVEN: frozenset({HandOverState.OVER}),
        HandOverState.OVER: frozenset(),
    },
)

DEVICE_KINDS = frozenset({TaskKind.TRAIN, TaskKind.EVALUATE, TaskKind.CURRICULUM})
"""Tasks that may compute on the device, so that serving has to step aside for them."""
HELD = "device held by serving; asked it to step aside"
_NO_TORCH = frozenset({"sim", "dry-run"})
_RETRY_S = (1.0, 10.0)


def shares_device(rule: Literal["auto", "always", "never"], server_device: str, program: str) -> bool:
    """Whether a task computes on what a server of the same machine serves on. Every program that computes takes the
    GPU where it finds one, whatever tier its run was submitted for."""
    match rule:
        case "always":
            return True
        case "never":
            return False
        case "auto":
            return server_device == "cuda" and program not in _NO_TORCH
        case _:
            assert_never(rule)


# --- what a worker may do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerSeen:
    """A server of this machine that computes on the device a task needs."""

    id: str
    state: ServerState
    reports: bool
    """It told the store about itself in time, so that `state` is what it is doing."""
    runs: bool
    """Its process lives."""


@dataclass(frozen=True)
class Start:
    may_start: bool
    reason: str


def may_start(servers: Sequence[ServerSeen], is_given: bool) -> Start:
    """Whether a task may take the device now. One that is silent but lives may hold it: its word is awaited.

    `is_given`: a hand-over of this machine is open and given. A server ends them all in the transaction in which it
    returns, so that what it last said about itself need not be the newest word.
    """
    there = [server for server in servers if server.runs or server.reports]
    silent = [server.id for server in there if not server.reports]
    if silent:
        return Start(False, f"server {silent[0]} may hold the device and does not report; end it, or start it again")
    if there and not (is_given and all(server.state is ServerState.ASIDE for server in there)):
        return Start(False, HELD)
    return Start(True, "serving is aside" if there else "no server of this machine holds the device")


def ask_again_s(drain_s: float) -> float:
    """When to look again if nothing is heard; a device that is given makes its task due at once."""
    return min(max(drain_s, _RETRY_S[0]), _RETRY_S[1])


# --- what a server does -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskSeen:
    """What is known about the task of a hand-over."""

    state: TaskState
    is_held_here: bool
    """A worker of this machine has leased it, lives, and the lease has not run out."""
    program_runs: bool
    """The process of its last attempt lives on this machine."""
    somebody_here: bool
    """A worker of this machine is alive and takes such tasks."""
    is_followed: bool = False
    """A task of the same run that needs the device too is open: evaluation follows training."""

    @property
    def is_awaited(self) -> bool:
        is_open = self.state in (TaskState.WAITING, TaskState.LEASED)
        return self.somebody_here and (is_open or self.is_followed)


@dataclass(frozen=True)
class Wanted:
    """An open hand-over, and what is known about who asked."""

    id: str
    state: HandOverState
    task: TaskSeen
    unused_s: float = 0.0
    """How long the server has seen nobody hold the task, on a clock that no one can set."""


@dataclass(frozen=True)
class ServerNow:
    """What a server is doing, and its patience."""

    state: ServerState
    is_free: bool
    """Whether the device is: no answer is under way any more, and the process of every engine is gone."""
    unused_timeout_s: float


class Action(StrEnum):
    KEEP = "keep"
    STEP_ASIDE = "step_aside"  # no new answers on the device; those under way may end
    GIVE = "give"  # mark what was asked for as given
    RETURN = "return"


@dataclass(frozen=True)
class Step:
    """What a server does now, why, and which hand-overs are over, each with its reason."""

    action: Action
    reason: str
    ended: tuple[tuple[str, str], ...] = ()


def decide(now: ServerNow, rows: Sequence[Wanted]) -> Step:
    """Keep on, step aside, give the device, or return. Not wanted by anybody is enough to return."""
    judged = [(row, _need(row, now.unused_timeout_s)) for row in rows]
    ended = tuple((row.id, need.reason) for row, need in judged if not need.is_needed)
    wanted = [row for row, need in judged if need.is_needed]
    reason = next((need.reason for _, need in judged if need.is_needed), ended[0][1] if ended else "nobody asked")
    return Step(_action(now, wanted), reason, ended)


def _action(now: ServerNow, wanted: Sequence[Wanted]) -> Action:
    match now.state:
        case ServerState.SERVING:
            return Action.STEP_ASIDE if wanted else Action.KEEP
        case ServerState.STEPPING_ASIDE:
            if not now.is_free:
                return Action.KEEP  # the drain has its own limit; what is half ended is not started again
            return Action.GIVE if wanted else Action.RETURN
        case ServerState.ASIDE:
            if not wanted:
                return Action.RETURN
            is_asked = any(row.state is HandOverState.REQUESTED for row in wanted)
            return Action.GIVE if is_asked else Action.KEEP
        case ServerState.RETURNING:
            return Action.KEEP  # it is on its way; who asks meanwhile is heard once it serves
        case _:
            assert_never(now.state)


@dataclass(frozen=True)
class _Need:
    is_needed: bool
    reason: str


def _need(row: Wanted, unused_timeout_s: float) -> _Need:
    task = row.task
    if row.state is HandOverState.REQUESTED:  # giving takes no longer than the drain: there is nothing to run out
        return _Need(task.is_awaited, "asked for" if task.is_awaited else _nobody(task))
    if task.is_held_here:
        return _Need(True, "its task is under way")
    if task.program_runs:
        is_needed = row.unused_s < unused_timeout_s
        return _Need(is_needed, "its program still runs" if is_needed else "its program outlived its lease")
    if not task.is_awaited:
        return _Need(False, _nobody(task))
    if row.unused_s >= unused_timeout_s:
        return _Need(False, f"nobody took it within {unused_timeout_s:g} s")
    return _Need(True, "another task of the same run follows" if task.is_followed else "its task is about to start")


def _nobody(task: TaskSeen) -> str:
    if task.state is TaskState.LEASED:
        return "the lease of its task is over, and no worker of this machine is left"
    if task.state is TaskState.WAITING:
        return "no worker of this machine takes its task"
    return f"its task is {task.state}"


# --- what a server does that cannot reach the store -------------------------------------------------------------------


@dataclass(frozen=True)
class Remembered:
    """A hand-over as it was when the store last answered."""

    wanted: Wanted
    lease_left_s: float
    """How long its task's lease ran then; 0 without one."""
    has_program: bool
    """Whether it is known which process computes for it."""


def decide_cut_off(now: ServerNow, rows: Sequence[Remembered], cut_off_s: float, reported_s: float) -> Step:
    """As `decide`, from what was known, what can still be seen (`program_runs`), and the time that has passed.

    `reported_s`: for so long after the last answer a worker may still trust what we said there, and start.
    """
    if now.state in (ServerState.SERVING, ServerState.RETURNING) or cut_off_s < reported_s:
        return Step(Action.KEEP, "the store does not answer")
    if now.state is ServerState.STEPPING_ASIDE:
        action = Action.RETURN if now.is_free else Action.KEEP
        return Step(action, "the store does not answer, so the device cannot be given")
    used = [row for row in rows if _is_used(row, cut_off_s, now.unused_timeout_s)]
    if used:
        return Step(Action.KEEP, "the store does not answer, and the device is in use")
    return Step(Action.RETURN, "the store does not answer, and nothing computes on the device")


def _is_used(row: Remembered, cut_off_s: float, unused_timeout_s: float) -> bool:
    if row.wanted.state is not HandOverState.GIVEN:
        return False
    if row.has_program:
        return row.wanted.task.program_runs
    return cut_off_s < max(row.lease_left_s, unused_timeout_s - row.wanted.unused_s)


def with_program(row: Remembered, runs: bool) -> Remembered:
    """The same memory, after a new look at its process."""
    return replace(row, wanted=replace(row.wanted, task=replace(row.wanted.task, program_runs=runs)))


def follows(kinds: Collection[TaskKind]) -> bool:
    """Whether one of a run's open tasks needs the device too, so that going back and forth would only cost time."""
    return not DEVICE_KINDS.isdisjoint(kinds)
