"""Before a task computes: take the device, or ask the server of this machine to step aside and wait."""

from __future__ import annotations

import socket
from pathlib import Path

from tunesmith.programs.device.queries import hand_overs
from tunesmith.programs.device.queries.hand_overs import Server
from tunesmith.programs.device.rules import HELD, HandOverState, ServerSeen, ask_again_s, may_start, shares_device
from tunesmith.programs.process_identity import ProcessIdentity, is_alive
from tunesmith.programs.stage import DeviceBusy, StageContext
from tunesmith.runs.queries import tasks
from tunesmith.store.database import Tx

LOCAL_TEACHER = "local teacher"
"""A program that computes, beside the trainers by their names."""


def take_device(context: StageContext, program: str) -> DeviceBusy | None:
    """None: the device is this task's, and stays so while its lease lives. Else why it has to wait.

    Who starts leaves a word in the store even where no server runs: one that starts meanwhile begins aside.
    """
    rule = context.settings.serve.hand_over.shares_device
    if rule == "never" or (rule == "auto" and not shares_device(rule, "cuda", program)):
        return None
    host = socket.gethostname()
    known = context.read(lambda tx: hand_overs.servers_on(tx, host))
    # who is gone is gone for good, so that this needs no transaction; who is new is looked at inside of it
    gone = {server.id for server in known if not _runs(server)}
    return context.write(lambda tx: _take(tx, context, program, host, gone))


def _take(tx: Tx, context: StageContext, program: str, host: str, gone: set[str]) -> DeviceBusy | None:
    hand_overs.lock(tx, host)
    tasks.require_lease(tx, context.claim.lease)
    rule, actor, task_id = context.settings.serve.hand_over.shares_device, context.worker_id, context.claim.task.id
    servers = [each for each in hand_overs.servers_on(tx, host) if shares_device(rule, each.device, program)]
    there = [server for server in servers if server.id not in gone]
    seen = [ServerSeen(server.id, server.state, server.reports, runs=True) for server in there]
    is_given = any(each.state is HandOverState.GIVEN for each in hand_overs.open_on(tx, host))
    start = may_start(seen, is_given)
    if not there:
        hand_overs.end_left_behind(tx, host, actor=actor)
        if rule == "auto" and not _has_gpu():
            return None
    asked = hand_overs.request(tx, task_id, host, actor=actor, reason=start.reason if start.may_start else HELD)
    if not start.may_start:
        return DeviceBusy(start.reason, ask_again_s(context.settings.serve.hand_over.drain_s))
    if asked.state is HandOverState.REQUESTED:
        server_id = there[0].id if there else None
        hand_overs.give(tx, asked.id, server_id=server_id, actor=actor, reason=start.reason)
    return None


def _has_gpu() -> bool:
    """Whether a server that starts now would compute on a GPU that this task uses too."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _runs(server: Server) -> bool:
    return is_alive(ProcessIdentity.from_json(server.process))
