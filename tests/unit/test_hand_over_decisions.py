"""Who has the device: every row of the decision, and that no order of events leaves serving aside, or two on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tunesmith.programs.device.rules import (
    HELD,
    Action,
    HandOverState,
    Remembered,
    ServerNow,
    ServerSeen,
    ServerState,
    TaskSeen,
    Wanted,
    ask_again_s,
    decide,
    decide_cut_off,
    follows,
    may_start,
    shares_device,
    with_program,
)
from tunesmith.runs.rules.task import TaskKind, TaskState

PATIENCE_S = 100.0
S, H, T = ServerState, HandOverState, TaskState


def a_task(state: TaskState = T.WAITING, **changes: bool) -> TaskSeen:
    given = TaskSeen(state, is_held_here=False, program_runs=False, somebody_here=True)
    return replace(given, **changes)


def a_row(state: HandOverState, task: TaskSeen, unused_s: float = 0.0) -> Wanted:
    return Wanted("ho-1", state, task, unused_s)


def now(state: ServerState, is_free: bool = True) -> ServerNow:
    return ServerNow(state, is_free, PATIENCE_S)


UNDER_WAY = a_task(T.LEASED, is_held_here=True, program_runs=True)
NEEDS = {
    "asked by a waiting task": (a_row(H.REQUESTED, a_task()), True),
    "asked, and no worker is left": (a_row(H.REQUESTED, a_task(somebody_here=False)), False),
    "asked for a task that was cancelled": (a_row(H.REQUESTED, a_task(T.CANCELLED)), False),
    "given, not taken yet": (a_row(H.GIVEN, a_task(), PATIENCE_S - 1), True),
    "given, never taken": (a_row(H.GIVEN, a_task(), PATIENCE_S), False),
    "given, and its worker was killed before it came": (a_row(H.GIVEN, a_task(somebody_here=False)), False),
    "training": (a_row(H.GIVEN, UNDER_WAY, PATIENCE_S), True),
    "training, worker not seen alive": (a_row(H.GIVEN, replace(UNDER_WAY, somebody_here=False)), True),
    "trained, nothing follows": (a_row(H.GIVEN, a_task(T.DONE)), False),
    "trained, evaluation follows": (a_row(H.GIVEN, a_task(T.DONE, is_followed=True), 1.0), True),
    "trained, evaluation follows and nobody takes it": (a_row(H.GIVEN, a_task(T.DONE, is_followed=True), 100.0), False),
    "trained, evaluation follows elsewhere": (
        a_row(H.GIVEN, a_task(T.DONE, is_followed=True, somebody_here=False)), False,
    ),
    "parked": (a_row(H.GIVEN, a_task(T.PARKED)), False),
    "lease over, its trainer still runs": (
        a_row(H.GIVEN, a_task(T.LEASED, program_runs=True, somebody_here=False), 5.0), True,
    ),
    "lease over, its trainer never ends": (
        a_row(H.GIVEN, a_task(T.LEASED, program_runs=True, somebody_here=False), PATIENCE_S), False,
    ),
    "lease over, everything killed": (a_row(H.GIVEN, a_task(T.LEASED, somebody_here=False)), False),
    "lease over, another worker will try again": (a_row(H.GIVEN, a_task(T.LEASED), 3.0), True),
}  # fmt: skip


@pytest.mark.parametrize("case", NEEDS)
def test_aside_server_stays_only_while_the_device_is_needed(case: str) -> None:
    row, is_needed = NEEDS[case]
    step = decide(now(S.ASIDE), [row])
    wanted = Action.GIVE if row.state is H.REQUESTED else Action.KEEP
    assert step.action is (wanted if is_needed else Action.RETURN)
    assert [hand_over for hand_over, _ in step.ended] == ([] if is_needed else ["ho-1"])
    assert step.reason
    assert all(reason for _, reason in step.ended)


@pytest.mark.parametrize("case", NEEDS)
def test_serving_server_steps_aside_only_where_the_device_is_needed(case: str) -> None:
    row, is_needed = NEEDS[case]
    step = decide(now(S.SERVING, is_free=False), [row])
    assert step.action is (Action.STEP_ASIDE if is_needed else Action.KEEP)


@pytest.mark.parametrize(
    ("state", "is_free", "is_wanted", "action"),
    [
        (S.SERVING, False, False, Action.KEEP),
        (S.SERVING, False, True, Action.STEP_ASIDE),
        (S.SERVING, True, True, Action.STEP_ASIDE),
        (S.STEPPING_ASIDE, False, True, Action.KEEP),  # answers under way
        (S.STEPPING_ASIDE, False, False, Action.KEEP),  # half ended: to its end first
        (S.STEPPING_ASIDE, True, True, Action.GIVE),
        (S.STEPPING_ASIDE, True, False, Action.RETURN),  # who asked has gone meanwhile
        (S.ASIDE, True, True, Action.GIVE),
        (S.ASIDE, True, False, Action.RETURN),
        (S.RETURNING, False, True, Action.KEEP),
        (S.RETURNING, False, False, Action.KEEP),
    ],
)
def test_server_in_each_state_does_one_thing(
    state: ServerState, is_free: bool, is_wanted: bool, action: Action
) -> None:
    rows = [a_row(H.REQUESTED, a_task())] if is_wanted else []
    assert decide(now(state, is_free), rows).action is action


def test_one_needed_hand_over_among_ended_ones_keeps_the_server_aside() -> None:
    over, needed = a_row(H.GIVEN, a_task(T.DONE)), replace(a_row(H.GIVEN, UNDER_WAY), id="ho-2")
    step = decide(now(S.ASIDE), [over, needed])
    assert (step.action, [each for each, _ in step.ended]) == (Action.KEEP, ["ho-1"])


@pytest.mark.parametrize(
    ("servers", "is_given", "starts"),
    [
        ([], False, True),
        ([ServerSeen("a", S.SERVING, True, True)], False, False),
        ([ServerSeen("a", S.SERVING, True, True)], True, False),
        ([ServerSeen("a", S.STEPPING_ASIDE, True, True)], True, False),
        ([ServerSeen("a", S.RETURNING, True, True)], True, False),
        ([ServerSeen("a", S.ASIDE, True, True)], True, True),
        ([ServerSeen("a", S.ASIDE, True, True)], False, False),  # it has returned since it said so
        ([ServerSeen("a", S.ASIDE, False, True)], True, False),  # silent, but it lives
        ([ServerSeen("a", S.SERVING, False, False)], False, True),  # dead
        ([ServerSeen("a", S.ASIDE, True, True), ServerSeen("b", S.SERVING, True, True)], True, False),
        ([ServerSeen("a", S.ASIDE, True, True), ServerSeen("b", S.ASIDE, True, True)], True, True),
    ],
)
def test_task_starts_only_where_every_living_server_is_aside(
    servers: list[ServerSeen], is_given: bool, starts: bool
) -> None:
    start = may_start(servers, is_given)
    assert start.may_start is starts
    assert start.reason


def test_task_that_waits_says_that_serving_was_asked() -> None:
    assert may_start([ServerSeen("a", S.SERVING, True, True)], False).reason == HELD
    assert "does not report" in may_start([ServerSeen("a", S.ASIDE, False, True)], True).reason


@pytest.mark.parametrize(
    ("rule", "device", "trainer", "shared"),
    [
        ("auto", "cuda", "native", True),
        ("auto", "cpu", "native", False),
        ("auto", "cuda", "sim", False),
        ("always", "cpu", "sim", True),
        ("never", "cuda", "native", False),
    ],
)
def test_device_is_shared_by_rule(rule: str, device: str, trainer: str, shared: bool) -> None:
    assert shares_device(rule, device, trainer) is shared  # type: ignore[arg-type]


def test_evaluation_follows_training_on_the_device_and_deployment_does_not() -> None:
    assert follows({TaskKind.EVALUATE})
    assert not follows({TaskKind.DEPLOY, TaskKind.WATCH})
    assert not follows(())


def test_asking_again_is_neither_hasty_nor_slow() -> None:
    assert [ask_again_s(drain_s) for drain_s in (0.0, 5.0, 3600.0)] == [1.0, 5.0, 10.0]


TRAINING = Remembered(a_row(H.GIVEN, UNDER_WAY), lease_left_s=30.0, has_program=True)
NOT_STARTED = Remembered(a_row(H.GIVEN, a_task(), 40.0), lease_left_s=0.0, has_program=False)


@pytest.mark.parametrize(
    ("state", "row", "cut_off_s", "action"),
    [
        (S.SERVING, TRAINING, 1e9, Action.KEEP),
        (S.STEPPING_ASIDE, TRAINING, 1.0, Action.KEEP),
        (S.STEPPING_ASIDE, TRAINING, 10.0, Action.RETURN),  # nobody could be told that the device is free
        (S.ASIDE, TRAINING, 1e6, Action.KEEP),  # it computes: no clock of ours ends that
        (S.ASIDE, with_program(TRAINING, False), 9.0, Action.KEEP),  # a worker may just take over
        (S.ASIDE, with_program(TRAINING, False), 10.0, Action.RETURN),
        (S.ASIDE, NOT_STARTED, 59.0, Action.KEEP),
        (S.ASIDE, NOT_STARTED, 60.0, Action.RETURN),
        (S.ASIDE, replace(NOT_STARTED, lease_left_s=80.0), 79.0, Action.KEEP),
        (S.ASIDE, replace(NOT_STARTED, lease_left_s=80.0), 80.0, Action.RETURN),
    ],
)
def test_server_without_its_store_decides_by_process_and_time(
    state: ServerState, row: Remembered, cut_off_s: float, action: Action
) -> None:
    assert decide_cut_off(now(state), [row], cut_off_s, reported_s=10.0).action is action


tasks_seen = st.builds(TaskSeen, st.sampled_from(TaskState), st.booleans(), st.booleans(), st.booleans(), st.booleans())
rows = st.lists(
    st.builds(
        Wanted, st.uuids().map(str), st.sampled_from([H.REQUESTED, H.GIVEN]), tasks_seen, st.floats(0, 2 * PATIENCE_S)
    ),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=500)
@given(rows)
def test_serving_always_returns_once_nobody_holds_a_lease(open_rows: list[Wanted]) -> None:
    """Whatever was asked for and given: with no lease left, patience and one look bring serving back."""
    state, left = S.ASIDE, list(open_rows)
    for _ in range(6):
        step = decide(now(state), left)
        ended = {each for each, _ in step.ended}
        left = [replace(row, state=H.GIVEN) if step.action is Action.GIVE else row for row in left]
        left = [row for row in left if row.id not in ended]
        state = {Action.RETURN: S.SERVING, Action.STEP_ASIDE: S.STEPPING_ASIDE, Action.GIVE: S.ASIDE}.get(
            step.action, state
        )
        left = [
            replace(row, unused_s=row.unused_s + PATIENCE_S, task=replace(row.task, is_held_here=False)) for row in left
        ]
    assert (state, left) == (S.SERVING, [])


@pytest.mark.slow
@settings(max_examples=500)
@given(rows, st.sampled_from(ServerState), st.booleans())
def test_a_device_under_a_living_lease_is_never_taken_back(
    open_rows: list[Wanted], state: ServerState, is_free: bool
) -> None:
    held = Wanted("held", H.GIVEN, UNDER_WAY)
    step = decide(now(state, is_free), [*open_rows, held])
    assert step.action is not Action.RETURN
    assert "held" not in {each for each, _ in step.ended}
    if state is S.SERVING:
        assert step.action is Action.STEP_ASIDE


@settings(max_examples=300)
@given(rows, st.sampled_from(ServerState), st.booleans())
def test_device_is_given_only_when_it_is_free(open_rows: list[Wanted], state: ServerState, is_free: bool) -> None:
    step = decide(now(state, is_free), open_rows)
    if step.action is Action.GIVE:
        assert is_free or state is S.ASIDE


class OneMachine(RuleBasedStateMachine):
    """Tasks, a worker, a server and its engine in any order of events: never two on the device, and serving returns."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = {"task-0": T.WAITING, "task-1": T.WAITING}
        self.computing: set[str] = set()
        self.worker_lives = True
        self.server: ServerState | None = S.SERVING
        self.engine_runs = self.is_free = False
        self.rows: dict[str, HandOverState] = {}
        self.unused_s: dict[str, float] = {}

    # what happens to tasks

    @rule(number=st.integers(0, 1))
    def worker_tries(self, number: int) -> None:
        task = f"task-{number}"
        if not self.worker_lives or self.tasks[task] is not T.WAITING:
            return
        servers = [] if self.server is None else [ServerSeen("server", self.server, True, True)]
        if may_start(servers, H.GIVEN in self.rows.values()).may_start:
            self.rows[task] = H.GIVEN
            self.tasks[task] = T.LEASED
            self.computing.add(task)
        else:
            self.rows.setdefault(task, H.REQUESTED)

    @rule(number=st.integers(0, 1), then=st.sampled_from([T.DONE, T.WAITING, T.PARKED]))
    def task_ends(self, number: int, then: TaskState) -> None:
        task = f"task-{number}"
        if self.worker_lives and self.tasks[task] is T.LEASED:
            self.tasks[task] = then
            self.computing.discard(task)

    @rule()
    def worker_is_killed(self) -> None:
        self.worker_lives = False

    @rule()
    def orphans_end_themselves(self) -> None:
        if not self.worker_lives:
            self.computing.clear()

    @rule()
    def worker_starts(self) -> None:
        """It takes over what another has left, and ends its programs first."""
        if not self.worker_lives:
            self.orphans_end_themselves()
            self.tasks = {task: T.WAITING if state is T.LEASED else state for task, state in self.tasks.items()}
            self.worker_lives = True

    # what happens to the server

    @rule()
    def somebody_asks(self) -> None:
        self.engine_runs = self.engine_runs or self.server is S.SERVING

    @rule()
    def answers_end(self) -> None:
        if self.server is S.STEPPING_ASIDE:
            self.engine_runs, self.is_free = False, True

    @rule()
    def server_is_killed(self) -> None:
        self.server, self.engine_runs = None, False

    @rule()
    def server_starts(self) -> None:
        if self.server is None:
            self.unused_s = {}
            step = decide(ServerNow(S.ASIDE, True, PATIENCE_S), self._seen())
            self.server = S.SERVING if step.action is Action.RETURN else S.STEPPING_ASIDE
            self.is_free = True

    @rule()
    def server_looks(self) -> None:
        if self.server is None:
            return
        step = decide(ServerNow(self.server, self.is_free, PATIENCE_S), self._seen())
        for ended, _ in step.ended:
            del self.rows[ended]
        match step.action:
            case Action.STEP_ASIDE:
                self.server, self.is_free = S.STEPPING_ASIDE, False
            case Action.GIVE:
                self.server = S.ASIDE
                self.rows = dict.fromkeys(self.rows, H.GIVEN)
            case Action.RETURN:
                self.server = S.SERVING
            case Action.KEEP:
                pass

    @rule()
    def time_passes(self) -> None:
        """More than anybody's patience; no orphan lives that long."""
        self.orphans_end_themselves()
        for task, state in self.rows.items():
            in_use = self.worker_lives and self.tasks[task] is T.LEASED
            if state is H.GIVEN and not in_use:
                self.unused_s[task] = PATIENCE_S

    def _seen(self) -> list[Wanted]:
        seen = []
        for task, state in self.rows.items():
            is_held = self.worker_lives and self.tasks[task] is T.LEASED
            if is_held or state is H.REQUESTED:
                self.unused_s[task] = 0.0
            facts = TaskSeen(self.tasks[task], is_held, task in self.computing, self.worker_lives)
            seen.append(Wanted(task, state, facts, self.unused_s.get(task, 0.0)))
        return seen

    @invariant()
    def never_two_on_the_device(self) -> None:
        assert not (self.engine_runs and self.computing)

    def teardown(self) -> None:
        """Whatever has happened: with everybody else dead, the server comes back, and nothing is left open."""
        self.worker_is_killed()
        self.orphans_end_themselves()
        self.server_starts()
        for _ in range(4):
            self.answers_end()
            self.server_looks()
            self.time_passes()
        assert (self.server, self.rows) == (S.SERVING, {})


TestOneMachine = OneMachine.TestCase
TestOneMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
