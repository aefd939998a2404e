"""What a person may wish, in every state a run can be in: done at once, asked of the worker, or refused."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import combinations

import pytest

from support import tables
from support.rows import (
    ACTOR,
    WORKER,
    a_claimed_run,
    a_comparison,
    a_judgement,
    a_run,
    an_adapter,
    an_evaluation,
    claim_of,
    dump,
    force,
    moves,
)
from tunesmith.core import clock
from tunesmith.core.errors import Refused
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.rules.forced import Forced, forced_by
from tunesmith.evaluation import queries as evaluations
from tunesmith.evaluation.rules.comparison import Report
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import control, lifecycle
from tunesmith.programs.stage import DeviceBusy, Looked, NotFlipped, StageEnd, Trained
from tunesmith.runs.queries import queue, requests, runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.runs.rules.run import RUN, RunState
from tunesmith.runs.rules.task import AttemptState, ErrorClass, TaskKind, TaskState
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

# DESIGN: "On unleased work the wish moves the state at once; on leased work it becomes a request. Pause: checkpoint,
# give the worker back. Stop: end training now, evaluate the best so far. Cancel: end without a result. Skip: only
# while queued." — by state of the run and whether a worker holds its task. What is not in here is refused.
EXPECTED = """
    queued      free    cancel=cancelled skip=skipped
    training    leased  cancel=request stop=request pause=request
    paused      none    cancel=cancelled
    evaluating  free    cancel=cancelled
    evaluating  leased  cancel=request
    shadowing   none    cancel=cancelled
    held        none    cancel=cancelled
    deploying   free    cancel=cancelled
    deploying   leased  cancel=request
    watching    free
    watching    leased
    deployed    none
    completed   none
    validated   none
    rejected    none
    rolled_back none
    failed      none
    cancelled   none
    skipped     none
"""
TASK_OF = {
    "queued": TaskKind.TRAIN,
    "training": TaskKind.TRAIN,
    "evaluating": TaskKind.EVALUATE,
    "deploying": TaskKind.DEPLOY,
    "watching": TaskKind.WATCH,
}
KINDS = [RequestKind.CANCEL, RequestKind.STOP, RequestKind.PAUSE, RequestKind.SKIP]


LINES = [line.split(maxsplit=2) for line in EXPECTED.strip().splitlines()]


def test_table_covers_every_state() -> None:
    assert {line[0] for line in LINES} == {state.value for state in RunState}


def _prepare(tx: Tx, state: str, task: str) -> Run:
    run = a_run(tx, RunState(state))
    if task != "none":
        task_id = tasks.add(tx, TASK_OF[state], actor=ACTOR, run_id=run.id, profile=run.profile)
        if task == "leased":
            claim_of(tx, task_id)
    return run


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(line[:2]))
def test_wish_does_what_the_design_says(database: Database, line: list[str]) -> None:
    state, task, *rest = line
    granted = dict(pair.split("=") for pair in " ".join(rest).split())
    for kind in KINDS:
        with database.write() as tx:
            run = _prepare(tx, state, task)
        match granted.get(kind):
            case None:
                _is_refused(database, run, kind)
            case "request":
                _is_asked_of_the_worker(database, run, kind)
            case end:
                _is_done_at_once(database, run, kind, RunState(end))


def _is_refused(database: Database, run: Run, kind: RequestKind) -> None:
    before = dump(database)
    with pytest.raises(Refused, match=run.id) as refusal, database.write() as tx:
        control.request_action(tx, run.id, kind, actor=ACTOR)
    assert dump(database) == before
    assert "`" in str(refusal.value)  # it names what can be done instead


def _is_asked_of_the_worker(database: Database, run: Run, kind: RequestKind) -> None:
    with database.write() as tx:
        answer = control.request_action(tx, run.id, kind, actor=ACTOR)
    with database.read() as tx:
        wished = requests.unanswered(tx, run.id)
        assert [(wish.id, wish.kind, wish.actor) for wish in wished] == [(answer.request_id, kind, ACTOR)]
        task = tasks.open_of_run(tx, run.id)
        assert task is not None
        assert (runs.get(tx, run.id).state, task.state) == (run.state, TaskState.LEASED)


def _is_done_at_once(database: Database, run: Run, kind: RequestKind, end: RunState) -> None:
    with database.write() as tx:
        answer = control.request_action(tx, run.id, kind, actor=ACTOR)
    with database.read() as tx:
        assert (runs.get(tx, run.id).state, answer.state, answer.request_id) == (end, end, None)
        assert (requests.unanswered(tx, run.id), tasks.open_of_run(tx, run.id)) == ([], None)
        assert moves(tx, "run", run.id)[-1].actor == ACTOR
        assert {ended.state for ended in queue.of_run(tx, run.id)} <= {TaskState.CANCELLED}
        assert queue.attempts_of_run(tx, run.id) == []


@pytest.mark.parametrize("kind", [RequestKind.PAUSE, RequestKind.STOP, RequestKind.CHECKPOINT])
def test_wish_on_training_that_nobody_holds_never_cancels_it(database: Database, kind: RequestKind) -> None:
    """Cannot happen by the setters; if it ever does, pause must not mean cancel."""
    with database.write() as tx:
        run = _prepare(tx, "training", "free")
    before = dump(database)
    with pytest.raises(Refused), database.write() as tx:
        control.request_action(tx, run.id, kind, actor=ACTOR)
    assert dump(database) == before


def test_same_wish_twice_is_one_request(database: Database) -> None:
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        ids = {control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR).request_id for _ in range(3)}
    assert len(ids) == 1


def test_wish_can_be_repeated_after_it_expired(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real = clock.utc_now
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        first = control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
    monkeypatch.setattr(clock, "utc_now", lambda: real() + timedelta(hours=25))
    with database.write() as tx:
        assert requests.unanswered(tx, run.id) == []
        second = control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
        assert second.request_id != first.request_id
        assert [wish.id for wish in requests.unanswered(tx, run.id)] == [second.request_id]
        assert first.request_id is not None
        assert requests.get(tx, first.request_id).answer == "expired"


TRAINED = Trained(path="adapters/x", digest="d", metrics={}, stopped_early=True)


@pytest.mark.parametrize("wishes", [c for n in (1, 2, 3) for c in combinations(KINDS[:3], n)], ids=str)
def test_strongest_wish_decides_cancel_over_stop_over_pause(
    database: Database, wishes: tuple[RequestKind, ...]
) -> None:
    """The attempt ended resumably (TERM, or the pause itself) while these wishes were open."""
    decisive = wishes[0]  # KINDS is in order of strength
    assert strongest(list(reversed(wishes))) is decisive
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        for kind in reversed(wishes):
            control.request_action(tx, run.id, kind, actor=ACTOR)
    with database.write() as tx:
        lifecycle.settle(tx, claim, StageEnd(AttemptState.INTERRUPTED, error="TERM"), actor=WORKER)
    expected = {
        RequestKind.CANCEL: RunState.CANCELLED,
        RequestKind.STOP: RunState.QUEUED,  # resumed, then stopped with a result
        RequestKind.PAUSE: RunState.PAUSED,
    }
    with database.read() as tx:
        assert runs.get(tx, run.id).state is expected[decisive]
        left = [wish.kind for wish in requests.unanswered(tx, run.id)]
        assert (RequestKind.STOP in left) == (decisive is RequestKind.STOP)
        assert tasks.get(tx, claim.task.id).counts.num_crashes == 0  # nothing is burnt


def test_stop_that_comes_while_a_pause_is_carried_out_still_wins(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
    with database.write() as tx:  # the program is ending for the pause when a stop comes in
        control.request_action(tx, run.id, RequestKind.STOP, actor=ACTOR)
    with database.write() as tx:
        end = StageEnd(AttemptState.INTERRUPTED, decided_by=RequestKind.PAUSE)
        lifecycle.settle(tx, claim, end, actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.QUEUED
        again = claim_of(tx, claim.task.id)
        lifecycle.begin(tx, again, actor=WORKER)
        assert strongest([wish.kind for wish in requests.unanswered(tx, run.id)]) is RequestKind.STOP
        lifecycle.settle(tx, again, StageEnd.succeeded(TRAINED), actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.EVALUATING
        assert requests.unanswered(tx, run.id) == []


def test_training_that_ended_before_a_stop_reached_it_goes_on(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        control.request_action(tx, run.id, RequestKind.STOP, actor=ACTOR)
        lifecycle.settle(tx, claim, StageEnd.succeeded(TRAINED), actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.EVALUATING
        assert requests.unanswered(tx, run.id) == []


def test_training_that_ended_before_a_pause_reached_it_is_paused_before_it_is_judged(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        asked = control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
        lifecycle.settle(tx, claim, StageEnd.succeeded(TRAINED), actor=WORKER)
        assert (runs.get(tx, run.id).state, tasks.open_of_run(tx, run.id)) == (RunState.PAUSED, None)
        assert asked.request_id is not None
        assert requests.get(tx, asked.request_id).answer == "paused; training had ended"
        assert control.resume(tx, run.id, actor=ACTOR).state is RunState.EVALUATING
        following = tasks.open_of_run(tx, run.id)
        assert following is not None
        assert following.kind is TaskKind.EVALUATE


ENDS = {
    "trained": (RunState.TRAINING, TaskKind.TRAIN, StageEnd.succeeded(TRAINED)),
    "stopped with a result": (
        RunState.TRAINING,
        TaskKind.TRAIN,
        StageEnd(AttemptState.SUCCEEDED, fact=TRAINED, decided_by=RequestKind.STOP),
    ),
    "paused": (RunState.TRAINING, TaskKind.TRAIN, StageEnd(AttemptState.INTERRUPTED, decided_by=RequestKind.PAUSE)),
    "failed for good": (RunState.TRAINING, TaskKind.TRAIN, StageEnd.failed(ErrorClass.DATA, "bad rows")),
    "failed for now": (RunState.TRAINING, TaskKind.TRAIN, StageEnd.failed(ErrorClass.CRASH, "killed")),
    "lost": (RunState.TRAINING, TaskKind.TRAIN, StageEnd(AttemptState.LOST, error="the lease ran out")),
    "device held": (RunState.TRAINING, TaskKind.TRAIN, StageEnd.device_busy(DeviceBusy("serving computes", 5.0))),
    "stopped by a live check": (RunState.TRAINING, TaskKind.TRAIN, StageEnd(AttemptState.STOPPED, error="NaN")),
    "evaluation failed": (RunState.EVALUATING, TaskKind.EVALUATE, StageEnd.failed(ErrorClass.TRANSIENT, "disk")),
    "evaluation lost": (RunState.EVALUATING, TaskKind.EVALUATE, StageEnd(AttemptState.LOST, error="gone")),
    "target refused": (
        RunState.DEPLOYING,
        TaskKind.DEPLOY,
        StageEnd.succeeded(NotFlipped("cannot load it", "refused")),
    ),
    "verdict stale": (RunState.DEPLOYING, TaskKind.DEPLOY, StageEnd.succeeded(NotFlipped("moved", "stale"))),
    "flip later": (RunState.DEPLOYING, TaskKind.DEPLOY, StageEnd.succeeded(NotFlipped("a watch", "later"))),
    "target down": (RunState.DEPLOYING, TaskKind.DEPLOY, StageEnd.failed(ErrorClass.TRANSIENT, "down")),
    "shadowed well": (RunState.SHADOWING, TaskKind.WATCH, StageEnd.succeeded(Looked("passed", "good"))),
    "shadows on": (RunState.SHADOWING, TaskKind.WATCH, StageEnd.succeeded(Looked("again", "more to come"))),
}


@pytest.mark.parametrize("end", ENDS)
def test_whoever_was_told_that_a_run_is_asked_to_cancel_sees_it_cancelled(database: Database, end: str) -> None:
    """However the attempt ended that was under way: the wish was accepted before the end was recorded."""
    state, kind, ended = ENDS[end]
    with database.write() as tx:
        run, claim = a_claimed_run(tx, state, kind)
        if state is not RunState.TRAINING:
            an_adapter(tx, run_id=run.id)
        answer = control.request_action(tx, run.id, RequestKind.CANCEL, actor=ACTOR)
        assert answer.message == "asked its worker to cancel"
    with database.write() as tx:
        lifecycle.settle(tx, claim, ended, actor=WORKER)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is RunState.CANCELLED
        assert (requests.unanswered(tx, run.id), tasks.open_of_run(tx, run.id)) == ([], None)
        assert answer.request_id is not None
        assert requests.get(tx, answer.request_id).answer == "the run is cancelled"
        assert adapters.live(tx, run.profile) is None


def test_cancel_of_what_has_just_gone_live_is_told_that_it_is_too_late(database: Database) -> None:
    for leased in (True, False):
        with database.write() as tx:
            run = a_run(tx, RunState.DEPLOYING)
            task_id = tasks.add(tx, TaskKind.DEPLOY, actor=ACTOR, run_id=run.id, profile=run.profile)
            adapter = an_adapter(tx, AdapterState.LIVE, run_id=run.id)
            if leased:
                claim_of(tx, task_id)
        before = dump(database)
        with pytest.raises(Refused, match=r"too late.*is live.*`adapter rollback"), database.write() as tx:
            control.request_action(tx, run.id, RequestKind.CANCEL, actor=ACTOR)
        assert dump(database) == before
        with database.write() as tx:
            force(tx, tables.adapters, adapter.id, state=AdapterState.SUPERSEDED)


@pytest.mark.parametrize(
    ("first", "second"),
    [("stop", "pause"), ("stop", "checkpoint"), ("cancel", "pause"), ("cancel", "stop"), ("cancel", "checkpoint")],
)
def test_wish_that_could_change_nothing_any_more_is_refused_not_lost(
    database: Database, first: str, second: str
) -> None:
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        control.request_action(tx, run.id, RequestKind(first), actor=ACTOR)
    with pytest.raises(Refused, match=f"asked to {first} already, so it cannot {second}"), database.write() as tx:
        control.request_action(tx, run.id, RequestKind(second), actor=ACTOR)
    with database.read() as tx:
        assert [wish.kind for wish in requests.unanswered(tx, run.id)] == [first]


@pytest.mark.parametrize(("first", "second"), [("pause", "stop"), ("pause", "cancel"), ("stop", "cancel")])
def test_stronger_wish_says_that_it_takes_the_place_of_a_weaker_one(
    database: Database, first: str, second: str
) -> None:
    with database.write() as tx:
        run, _ = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        weaker = control.request_action(tx, run.id, RequestKind(first), actor=ACTOR)
        answer = control.request_action(tx, run.id, RequestKind(second), actor="user:other")
        assert answer.message == f"asked its worker to {second}, not to {first}"
        assert weaker.request_id is not None
        assert requests.get(tx, weaker.request_id).answer == f"replaced: user:other asked to {second}"
        assert [wish.kind for wish in requests.unanswered(tx, run.id)] == [second]


def test_resume_right_after_pause_takes_the_pause_back(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
        assert control.resume(tx, run.id, actor=ACTOR).state is RunState.TRAINING
        assert requests.unanswered(tx, run.id) == []
        # the program had been told, and ends with a checkpoint: the next attempt goes on from it
        end = StageEnd(AttemptState.INTERRUPTED, decided_by=RequestKind.PAUSE)
        lifecycle.settle(tx, claim, end, actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.QUEUED
        assert tasks.get(tx, claim.task.id).counts.num_crashes == 0


def test_pause_and_resume_burn_no_attempt_and_keep_the_queue_place_by_priority(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
        control.request_action(tx, run.id, RequestKind.PAUSE, actor=ACTOR)
        end = StageEnd(AttemptState.INTERRUPTED, decided_by=RequestKind.PAUSE)
        lifecycle.settle(tx, claim, end, actor=WORKER)
        paused = runs.get(tx, run.id)
        assert (paused.state, tasks.open_of_run(tx, run.id)) == (RunState.PAUSED, None)
        control.resume(tx, run.id, actor=ACTOR)
        resumed = tasks.open_of_run(tx, run.id)
        assert resumed is not None
        assert (runs.get(tx, run.id).state, resumed.state) == (RunState.QUEUED, TaskState.WAITING)
        assert (resumed.counts.num_crashes, resumed.counts.num_errors) == (0, 0)
        assert resumed.priority == run.priority


@pytest.mark.parametrize("state", [state for state in RunState if state is not RunState.PAUSED])
def test_resume_of_what_is_not_paused_is_refused(database: Database, state: RunState) -> None:
    with database.write() as tx:
        run = a_run(tx, state)
    before = dump(database)
    with pytest.raises(Refused, match="not paused"), database.write() as tx:
        control.resume(tx, run.id, actor=ACTOR)
    assert dump(database) == before


# --- what waits for a person ---


def _held(tx: Tx, decision: Decision = Decision.HOLD) -> tuple[Run, adapters.Adapter]:
    run = a_run(tx, RunState.HELD)
    adapter = an_adapter(tx, run_id=run.id)
    an_evaluation(tx, run, adapter, decision)
    return run, adapter


def test_approve_sends_fresh_evidence_to_deploy_and_stale_evidence_to_evaluate(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = clock.utc_now
    with database.write() as tx:
        (fresh, first), (stale, second) = _held(tx), _held(tx)
        control.approve(tx, first, actor=ACTOR)
        deploying = tasks.open_of_run(tx, fresh.id)
        assert deploying is not None
        assert (runs.get(tx, fresh.id).state, deploying.kind) == (RunState.DEPLOYING, TaskKind.DEPLOY)
    monkeypatch.setattr(clock, "utc_now", lambda: real() + timedelta(hours=25))
    with database.write() as tx:
        control.approve(tx, second, actor=ACTOR)
        evaluating = tasks.open_of_run(tx, stale.id)
        assert evaluating is not None
        assert (runs.get(tx, stale.id).state, evaluating.kind) == (RunState.EVALUATING, TaskKind.EVALUATE)


@pytest.mark.parametrize(
    ("report", "missing"),
    [
        (Report(num_cases=0, confidence=0.95, comparisons=()), "not measured: heldout_loss"),
        (Report(num_cases=60, confidence=0.95, comparisons=(a_comparison(problem="an error"),)), "an error"),
        (Report(num_cases=60, confidence=0.95, comparisons=(a_comparison(difference=None),)), "numbers are missing"),
        (Report(num_cases=60, confidence=0.95, comparisons=(a_comparison(n=30),)), "a part of the cases"),
        (Report(num_cases=60, confidence=0.5, comparisons=(a_comparison(),)), "50% confidence"),
        (Report(num_cases=5, confidence=0.95, comparisons=(a_comparison(n=5, low=None),)), "numbers are missing"),
    ],
)
def test_missing_evidence_is_approved_by_nobody_and_overridden_only_with_a_reason(
    database: Database, report: Report, missing: str
) -> None:
    with database.write() as tx:
        run, adapter = _held(tx)
        judged = a_judgement(run, adapter.digest, Decision.HOLD).model_copy(update={"report": report})
        evaluations.add(
            tx, judged, run_id=run.id, adapter_id=adapter.id, baseline_adapter_id=None, scores_path="s", actor=ACTOR
        )
    before = dump(database)
    told = rf"no evidence to approve it by: .*{missing}.*--force --reason"
    with pytest.raises(Refused, match=told), database.write() as tx:
        control.approve(tx, adapter, actor=ACTOR)
    assert dump(database) == before
    with database.write() as tx:
        control.force(tx, adapter, actor=ACTOR, reason="the demo is today")
        opened = tasks.open_of_run(tx, run.id)
        assert opened is not None
        assert (runs.get(tx, run.id).state, opened.kind) == (RunState.DEPLOYING, TaskKind.DEPLOY)
        assert forced_by(opened.payload) == Forced(ACTOR, "the demo is today", "base")
        [said] = [event for event in events.of_entity(tx, "adapter", adapter.id) if event.action == "forced"]
        assert (said.actor, said.reason) == (ACTOR, "the demo is today")


def test_too_few_cases_have_numbers_that_a_person_may_approve(database: Database) -> None:
    with database.write() as tx:
        run, adapter = _held(tx)
        report = Report(num_cases=5, confidence=0.95, comparisons=(a_comparison(n=5),))
        judged = a_judgement(run, adapter.digest, Decision.HOLD).model_copy(update={"report": report})
        evaluations.add(
            tx, judged, run_id=run.id, adapter_id=adapter.id, baseline_adapter_id=None, scores_path="s", actor=ACTOR
        )
        assert control.approve(tx, adapter, actor=ACTOR).state is RunState.DEPLOYING
        with pytest.raises(Refused, match="is not held"):  # twice is once
            control.approve(tx, adapter, actor=ACTOR)


def test_version_that_was_refused_or_rolled_back_is_called_so(database: Database) -> None:
    with database.write() as tx:
        run, adapter = _held(tx)
        control.reject(tx, adapter, actor=ACTOR, reason="it rambles")
        assert adapters.get(tx, adapter.id).state is AdapterState.REJECTED
        live_run = a_run(tx, RunState.DEPLOYED)
        an_adapter(tx, AdapterState.LIVE, run_id=live_run.id)
        lifecycle.roll_back(tx, run.profile, actor=ACTOR, reason="people complain")
        told = runs.get(tx, live_run.id)
        assert (told.state, told.reason) == (RunState.ROLLED_BACK, "people complain")


def test_reject_and_evaluate_again_move_a_held_run_and_only_a_held_one(database: Database) -> None:
    with database.write() as tx:
        (refused, first), (asked, second) = _held(tx), _held(tx)
        control.reject(tx, first, actor=ACTOR, reason="")
        control.evaluate_again(tx, second, actor=ACTOR)
        assert runs.get(tx, refused.id).state is RunState.REJECTED
        assert runs.get(tx, asked.id).state is RunState.EVALUATING
    before = dump(database)
    for wish in (control.approve, control.evaluate_again):
        with pytest.raises(Refused, match="is not held"), database.write() as tx:
            wish(tx, adapters.get(tx, first.id), actor=ACTOR)
    assert dump(database) == before


def test_held_run_that_nobody_decides_on_expires_after_seven_days(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = clock.utc_now
    with database.write() as tx:
        run, _ = _held(tx)
        assert control.expire_held(tx, actor=WORKER) == []
    monkeypatch.setattr(clock, "utc_now", lambda: real() + timedelta(days=7, minutes=1))
    with database.write() as tx:
        assert control.expire_held(tx, actor=WORKER) == [run.id]
        assert runs.get(tx, run.id).state is RunState.REJECTED


def test_revoking_the_live_adapter_of_a_watched_run_ends_everything(database: Database) -> None:
    with database.write() as tx:
        run = a_run(tx, RunState.WATCHING)
        adapter = an_adapter(tx, AdapterState.LIVE, run_id=run.id)
        tasks.add(tx, TaskKind.WATCH, actor=ACTOR, run_id=run.id, profile=run.profile)
        control.revoke(tx, adapter, actor=ACTOR, reason="leaks secrets")
    with database.read() as tx:
        assert adapters.get(tx, adapter.id).state is AdapterState.REVOKED
        assert adapters.live(tx, run.profile) is None
        assert runs.get(tx, run.id).state is RunState.ROLLED_BACK
        assert tasks.open_of_run(tx, run.id) is None


def test_rollback_during_a_look_leaves_the_end_of_the_run_to_that_look(database: Database) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.WATCHING, TaskKind.WATCH)
        an_adapter(tx, AdapterState.LIVE, run_id=run.id)
        lifecycle.roll_back(tx, run.profile, actor=ACTOR, reason="by hand")
        assert runs.get(tx, run.id).state is RunState.WATCHING
        lifecycle.settle(tx, claim, StageEnd.succeeded(Looked("moved_on", "rolled back")), actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.ROLLED_BACK
        assert deployments.live_digest(tx, run.profile) == "base"


# --- a wish and a worker at the same moment ---


def test_finished_run_never_leaves_an_open_task_behind(database: Database) -> None:
    """Whoever ends a run has ended its task first; the setter refuses anything else."""
    with database.write() as tx:
        run = _prepare(tx, "evaluating", "free")
    for end in RUN.finished & RUN.table[RunState.EVALUATING]:
        with pytest.raises(Refused), database.write() as tx:
            runs.move(tx, run.id, end, actor=ACTOR, reason="forgot the task")


def test_cancel_racing_with_settle_on_postgres_leaves_no_orphan(postgres_database: Database) -> None:
    """The worker moves the run on while the person waits for the task's row: the wish must see the next task."""
    database = postgres_database
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.TRAINING, TaskKind.TRAIN)
    settled, outcome = threading.Event(), []

    def person() -> None:
        with database.write() as tx:
            outcome.append(control.request_action(tx, run.id, RequestKind.CANCEL, actor=ACTOR))
        settled.set()

    thread = threading.Thread(target=person)
    with database.write() as tx:
        lifecycle.settle(tx, claim, StageEnd.succeeded(TRAINED), actor=WORKER)
        thread.start()
        assert not settled.wait(0.5)  # it waits for us
    thread.join(10)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is RunState.CANCELLED
        assert tasks.open_of_run(tx, run.id) is None
        assert [task.state for task in queue.of_run(tx, run.id)] == [TaskState.DONE, TaskState.CANCELLED]
    assert [answer.state for answer in outcome] == [RunState.CANCELLED]


def test_cancel_racing_with_claim_becomes_a_request_on_postgres(postgres_database: Database) -> None:
    database = postgres_database
    with database.write() as tx:
        run = _prepare(tx, "queued", "free")
    outcome = []

    def person() -> None:
        with database.write() as tx:
            outcome.append(control.request_action(tx, run.id, RequestKind.CANCEL, actor=ACTOR))

    thread = threading.Thread(target=person)
    with database.write() as tx:
        task = tasks.open_of_run(tx, run.id)
        assert task is not None
        lifecycle.begin(tx, claim_of(tx, task.id), actor=WORKER)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join(10)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is RunState.TRAINING
        assert [wish.kind for wish in requests.unanswered(tx, run.id)] == [RequestKind.CANCEL]
    assert [answer.state for answer in outcome] == [RunState.TRAINING]


def test_forced_states_of_the_builders_are_what_the_tables_allow(database: Database) -> None:
    """The builders force states; this makes sure they do not invent rows that the database would refuse."""
    with database.write() as tx:
        for state in RunState:
            run = a_run(tx, state)
            force(tx, tables.runs, run.id, reason="same")
            assert (runs.get(tx, run.id).finished_at is not None) == (state in RUN.finished)
