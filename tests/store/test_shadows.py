"""Shadows on both databases: a run that shadows before it deploys, the observations, and forgetting them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import (
    ACTOR,
    PROFILE,
    WORKER,
    Unreachable,
    a_claimed_run,
    a_judgement,
    a_run,
    an_adapter,
    claim_of,
    force,
)
from support.workspaces import a_workspace
from tunesmith.client import Client
from tunesmith.core.clock import boot_seconds
from tunesmith.deployment.watch import watch
from tunesmith.evaluation.evaluate import Measured
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.queries import experiences
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.experience.queries.shadow_answers import ShadowAnswer
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.rules.shadow import ShadowOutcome
from tunesmith.experience.tables import shadow_answers
from tunesmith.models import queries as adapters
from tunesmith.orchestration import control, lifecycle
from tunesmith.profiles.profile import Deploy
from tunesmith.profiles.sections.shadow import ShadowSettings
from tunesmith.profiles.settings import ServeSettings, Settings
from tunesmith.profiles.workspace import init_workspace
from tunesmith.programs.device.rules import ServerState
from tunesmith.programs.stage import Pulse, StageContext, StageEnd
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind, TaskState
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.interfaces import Exchange
from tunesmith.serving.gateway.shadow import ShadowMirror
from tunesmith.serving.generation import GenerationRequest
from tunesmith.store import events
from tunesmith.store.database import Database, Tx

ENABLED = ShadowSettings(enabled=True, min_count=3, min_s=0.0, max_s=60.0)


def a_shadowing_run(tx: Tx, policy: ShadowSettings = ENABLED) -> tuple[runs.Run, adapters.Adapter, Claim]:
    run, claim = a_claimed_run(tx, RunState.SHADOWING, TaskKind.WATCH, shadow=policy)
    return run, an_adapter(tx, run_id=run.id), claim


def an_asker(tx: Tx, number: int, profile: str = PROFILE) -> str:
    """The experience of a live answer."""
    talk = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "a live answer"}]
    return experiences.add(tx, profile, f"chatcmpl-{number}", talk, actor=ACTOR)[0]


def stored(tx: Tx, answers: list[ShadowAnswer]) -> int:
    """With the experiences by which they can be forgotten."""
    for answer in answers:
        an_asker(tx, int(answer.response_id.removeprefix("chatcmpl-")))
    return shadows.add(tx, answers).num


def an_answer(run: runs.Run, adapter: adapters.Adapter, number: int, **changes: Any) -> ShadowAnswer:
    fields: dict[str, Any] = {
        "run_id": run.id,
        "adapter_id": adapter.id,
        "response_id": f"chatcmpl-{number}",
        "live_version": f"{PROFILE}@v1",
        "outcome": ShadowOutcome.ANSWERED,
        "answer": f"shadow answer {number}",
        "error": None,
        "seconds": 0.2,
        "live_seconds": 0.1,
        "flags": (),
        "live_flags": (),
    }
    return ShadowAnswer(**{**fields, **changes})


def look(database: Database, claim: Claim, tmp_path: Path) -> StageEnd:
    return watch(StageContext(database, init_workspace(tmp_path / "ws"), Settings(), claim, WORKER, Pulse()))


# --- the run ----------------------------------------------------------------------------------------------------------


def promoted(tx: Tx, run: runs.Run, adapter: adapters.Adapter, claim: Claim) -> RunState:
    judged = a_judgement(run, adapter.digest, Decision.PROMOTE)
    end = StageEnd.succeeded(Measured(judged, adapter.id, None, "scores.json"))
    lifecycle.settle(tx, claim, end, actor=WORKER)
    return runs.get(tx, run.id).state


@pytest.mark.parametrize(
    ("policy", "when", "then"),
    [
        (ENABLED, "promoted", RunState.SHADOWING),
        (ENABLED, "approved", RunState.SHADOWING),
        (ENABLED, "never", RunState.COMPLETED),
        (ShadowSettings(), "promoted", RunState.DEPLOYING),
    ],
)
def test_promoted_candidate_shadows_first_where_the_profile_says_so(
    database: Database, policy: ShadowSettings, when: Literal["promoted", "approved", "never"], then: RunState
) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(
            tx, RunState.EVALUATING, TaskKind.EVALUATE, shadow=policy, deploy=Deploy.model_validate({"when": when})
        )
        assert promoted(tx, run, an_adapter(tx, run_id=run.id), claim) is then
        task = tasks.open_of_run(tx, run.id)
        if then is RunState.SHADOWING:
            assert task is not None
            assert task.kind is TaskKind.WATCH


def test_good_shadow_is_measured_again_and_then_deployed(database: Database, tmp_path: Path) -> None:
    with database.write() as tx:
        run, adapter, claim = a_shadowing_run(tx)
        assert stored(tx, [an_answer(run, adapter, number) for number in range(3)]) == 3
    end = look(database, claim, tmp_path)
    with database.write() as tx:
        lifecycle.settle(tx, claim, end, actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.EVALUATING
        task = tasks.open_of_run(tx, run.id)
        assert task is not None
        assert task.kind is TaskKind.EVALUATE
        assert promoted(tx, run, adapter, claim_of(tx, task.id)) is RunState.DEPLOYING


def test_shadow_with_too_few_answers_looks_again_and_holds_no_worker(database: Database, tmp_path: Path) -> None:
    with database.write() as tx:
        run, adapter, claim = a_shadowing_run(tx)
        stored(tx, [an_answer(run, adapter, 1)])
    end = look(database, claim, tmp_path)
    with database.write() as tx:
        lifecycle.settle(tx, claim, end, actor=WORKER)
        task = tasks.get(tx, claim.task.id)
        assert (task.state, task.reason[:27]) == (TaskState.WAITING, "1 of 3 mirrored answers, 0 ")
        assert runs.get(tx, run.id).state is RunState.SHADOWING


@pytest.mark.parametrize("why", ["failures", "flags", "time", "revoked"])
def test_bad_shadow_is_rejected_with_its_reason(database: Database, tmp_path: Path, why: str) -> None:
    with database.write() as tx:
        run, adapter, claim = a_shadowing_run(tx)
        changes: dict[str, Any] = {}
        if why == "failures":
            changes = {"outcome": ShadowOutcome.FAILED, "answer": None, "error": "the adapter is gone"}
        if why == "flags":
            changes = {"flags": ("length",)}
        if why in ("failures", "flags"):
            stored(tx, [an_answer(run, adapter, number, **changes) for number in range(3)])
        if why == "time":
            force(tx, tables.runs, run.id, moved_at=tx.now - timedelta(seconds=61))
        if why == "revoked":
            control.revoke(tx, adapter, actor=ACTOR, reason="no")
    end = look(database, claim, tmp_path)
    with database.write() as tx:
        lifecycle.settle(tx, claim, end, actor=WORKER)
        now = runs.get(tx, run.id)
    said = {"failures": "failed or timed out", "flags": "without a flag", "time": "max_s", "revoked": "revoked"}[why]
    assert now.state is RunState.REJECTED
    assert said in now.reason


@pytest.mark.parametrize("is_leased", [True, False])
def test_shadowing_run_is_cancelled_on_request(database: Database, tmp_path: Path, is_leased: bool) -> None:
    with database.write() as tx:
        if is_leased:
            run, _, claim = a_shadowing_run(tx)
        else:
            run = a_run(tx, RunState.SHADOWING, shadow=ENABLED)
            tasks.add(tx, TaskKind.WATCH, actor=ACTOR, run_id=run.id, profile=run.profile)
        control.request_action(tx, run.id, RequestKind.CANCEL, actor=ACTOR)
    if is_leased:
        end = look(database, claim, tmp_path)
        with database.write() as tx:
            lifecycle.settle(tx, claim, end, actor=WORKER)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is RunState.CANCELLED


# --- the observations -------------------------------------------------------------------------------------------------


def test_observation_is_stored_once_and_only_while_its_run_shadows(database: Database) -> None:
    with database.write() as tx:
        run, adapter, _ = a_shadowing_run(tx)
        assert [candidate.name for candidate in shadows.candidates(tx)] == [adapter.name]
        assert stored(tx, [an_answer(run, adapter, 1), an_answer(run, adapter, 1)]) == 1
        force(tx, tables.runs, run.id, state=RunState.EVALUATING)
        assert stored(tx, [an_answer(run, adapter, 2)]) == 0
        assert shadows.candidates(tx) == []
        progress = shadows.progress(tx, run.id)
    assert progress is not None
    assert (progress.num, progress.seconds, progress.live_seconds) == (1, pytest.approx(0.2), pytest.approx(0.1))


def test_forgotten_experience_takes_its_shadow_answers_along_and_none_comes_later(database: Database) -> None:
    with database.write() as tx:
        run, adapter, _ = a_shadowing_run(tx)
        experience_id = an_asker(tx, 1)
        assert stored(tx, [an_answer(run, adapter, 1, answer="good day Ada"), an_answer(run, adapter, 2)]) == 2
        assert erasures.forget(tx, experience_id, actor=ACTOR, reason="asked")
        assert experiences.get(tx, experience_id).state is ExperienceState.FORGOTTEN
        late = shadows.add(tx, [an_answer(run, adapter, 1, answer="good day Ada")])
        assert (late.num, late.too_early) == (0, ()), "it came back"
        left = [row["response_id"] for row in tx.all(sa.select(shadow_answers))]
    assert left == ["chatcmpl-2"]


def test_answer_without_an_experience_is_not_stored_because_nobody_could_have_it_forgotten(database: Database) -> None:
    with database.write() as tx:
        run, adapter, _ = a_shadowing_run(tx)
        early = an_answer(run, adapter, 1)
        assert shadows.add(tx, [early]) == shadows.Added(0, (early,))
        assert shadows.progress(tx, run.id) is None
        assert stored(tx, [early]) == 1


def test_passed_shadow_is_known_by_the_history_of_its_run(database: Database) -> None:
    with database.write() as tx:
        run = a_run(tx, RunState.SHADOWING)
        assert not shadows.has_passed(tx, run.id)
        runs.move(tx, run.id, RunState.EVALUATING, actor=WORKER, reason="shadowed well")
        assert shadows.has_passed(tx, run.id)
        assert [e.new_state for e in events.of_entity(tx, "run", run.id)][-1] == RunState.EVALUATING


# --- the mirror -------------------------------------------------------------------------------------------------------


class Engines:
    """Answers as it is told, and notes how many live answers were under way when it was asked."""

    def __init__(self) -> None:
        self.num_active = 0
        self.asked: list[tuple[str, GenerationRequest, int]] = []
        self.says: str | Exception = "a shadow answer"
        self.takes_s = 0.0
        self.num_cancelled = 0

    async def release_device(self, mode: Literal["unload", "cpu"], drain_s: float) -> None:
        raise NotImplementedError

    async def reclaim_device(self) -> None:
        raise NotImplementedError

    async def answer(self, name: str, asked: GenerationRequest) -> str:
        self.asked.append((name, asked, self.num_active))
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Ours:
    state = ServerState.SERVING

    async def admit(self) -> None: ...

    async def run(self) -> None: ...


def an_exchange(number: int, *, is_live: bool = True, answer: str = "a live answer") -> Exchange:
    messages = [{"role": "user", "content": f"question {number}"}]
    asked = GenerationRequest(
        f"row-{number}", f"{PROFILE}@v1", messages=messages, temperature=0.3, seed=number, max_tokens=9
    )
    return Exchange(
        f"chatcmpl-{number}", PROFILE, f"{PROFILE}@v1", "d", is_live, asked, messages, answer, "stop", seconds=0.1
    )  # fmt: skip


class Played:
    """A mirror over a workspace whose run shadows."""

    def __init__(self, client: Client, timeout_s: float = 1.0) -> None:
        self.client = client
        self.database = client._session.database
        with self.database.write() as tx:
            self.run, self.adapter, _ = a_shadowing_run(tx)
            for number in range(5):
                an_asker(tx, number)
        self.engines, self.hand_over, self.counts = Engines(), Ours(), Counter[str]()
        settings = ServeSettings(timeout_s=timeout_s)
        self.mirror = ShadowMirror(client._session, settings, self.engines, self.hand_over, self.counts)

    def play(self, story: Callable[[], Awaitable[None]]) -> None:
        async def both() -> None:
            running = asyncio.create_task(self.mirror.run())
            try:
                await self.until(lambda: bool(self.mirror._wanted))
                await story()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(both())

    async def until(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        end_at = boot_seconds() + timeout_s
        while not holds():
            assert boot_seconds() < end_at
            await asyncio.sleep(0.01)

    def rows(self) -> list[sa.RowMapping]:
        with self.database.read() as tx:
            return tx.all(sa.select(shadow_answers).order_by(shadow_answers.c.seq))


@pytest.fixture
def played(tmp_path: Path, store_url: str) -> Iterator[Played]:
    client = a_workspace(
        tmp_path / "one",
        settings={"store": {"url": store_url}},
        profile={"experience": {"verifiers": {"length": {"max_chars": 20}}}},
    )
    yield Played(client)
    client.close()


def test_live_answer_is_mirrored_with_the_same_prompt_and_sampling(played: Played) -> None:
    async def story() -> None:
        played.engines.says = "a shadow answer of too many characters"
        played.mirror.answered(an_exchange(1))
        played.mirror.answered(an_exchange(2, is_live=False))  # an exact version was asked for
        await played.until(lambda: len(played.rows()) == 1)

    played.play(story)
    [(name, asked, _)] = played.engines.asked
    live = an_exchange(1).request
    assert name == asked.adapter == played.adapter.name
    assert (asked.messages, asked.temperature, asked.seed, asked.max_tokens) == (live.messages, 0.3, 1, 9)
    [row] = played.rows()
    assert (row["outcome"], row["response_id"], row["live_version"]) == ("answered", "chatcmpl-1", f"{PROFILE}@v1")
    assert (row["flags"], row["live_flags"]) == (["length"], [])
    shown = played.client.runs.show(played.run.id).shadow
    assert shown is not None
    assert (shown.num, shown.min_count, shown.num_flagged, shown.num_live_flagged) == (1, 3, 1, 0)


def test_mirror_waits_while_live_answers_are_under_way_and_drops_what_is_too_much(played: Played) -> None:
    async def story() -> None:
        played.engines.num_active = 1
        for number in range(70):
            played.mirror.answered(an_exchange(number))
        await asyncio.sleep(0.2)
        assert played.engines.asked == []
        played.engines.num_active = 0
        await played.until(lambda: len(played.engines.asked) == 64)

    played.play(story)
    assert {num for _, _, num in played.engines.asked} == {0}
    assert played.counts["shadow_dropped"] == 6


def test_mirrored_answer_gives_way_to_a_live_request_and_is_given_up_in_the_end(played: Played) -> None:
    async def story() -> None:
        played.engines.takes_s = 10.0
        played.mirror.answered(an_exchange(1))
        for number in range(1, 4):
            await played.until(lambda number=number: len(played.engines.asked) == number)  # type: ignore[misc]
            played.engines.num_active = 2  # itself, and a live one
            await played.until(lambda number=number: played.engines.num_cancelled == number)  # type: ignore[misc]
            played.engines.num_active = 0
        await played.until(lambda: played.counts["shadow_dropped"] == 1)
        played.engines.takes_s = 0.0
        played.mirror.answered(an_exchange(2))
        await played.until(lambda: [row["response_id"] for row in played.rows()] == ["chatcmpl-2"])

    played.play(story)


def test_mirror_waits_for_a_pause_after_the_last_live_answer(played: Played) -> None:
    async def story() -> None:
        for number in range(8):  # one request after the other, with hardly a pause
            played.mirror.answered(an_exchange(number))
            await asyncio.sleep(0.05)
        assert played.engines.asked == []
        await played.until(lambda: len(played.engines.asked) == 8)

    played.play(story)


def test_mirror_that_may_share_the_engine_waits_for_no_pause(played: Played) -> None:
    with played.database.write() as tx:
        spec = {**played.run.spec.model_dump(mode="json"), "shadow": {**ENABLED.model_dump(), "beside_live": True}}
        force(tx, tables.runs, played.run.id, spec=spec)

    async def story() -> None:
        played.engines.num_active, played.engines.takes_s = 2, 0.1
        for number in range(3):
            played.mirror.answered(an_exchange(number))
        await played.until(lambda: len(played.rows()) == 3)

    played.play(story)


def test_candidate_that_shadows_no_more_is_asked_nothing_more(played: Played) -> None:
    async def story() -> None:
        played.engines.num_active = 1
        for number in range(4):
            played.mirror.answered(an_exchange(number))
        with played.database.write() as tx:
            force(tx, tables.runs, played.run.id, state=RunState.CANCELLED, finished_at=tx.now)
        await played.until(lambda: played.counts["shadow_dropped"] == 4)
        played.engines.num_active = 0
        played.mirror.answered(an_exchange(9))
        await asyncio.sleep(0.4)

    played.play(story)
    assert played.engines.asked == []


def test_mirror_waits_while_serving_is_aside(played: Played) -> None:
    async def story() -> None:
        played.hand_over.state = ServerState.ASIDE
        played.mirror.answered(an_exchange(1))
        await asyncio.sleep(0.2)
        assert played.engines.asked == []
        played.hand_over.state = ServerState.SERVING
        await played.until(lambda: len(played.engines.asked) == 1)

    played.play(story)


def test_candidate_that_fails_or_takes_too_long_is_observed_so(played: Played) -> None:
    async def story() -> None:
        played.engines.says = EngineError("its adapter is gone", code="adapter", http_status=500)
        played.mirror.answered(an_exchange(1))
        await played.until(lambda: len(played.rows()) == 1)
        played.engines.says, played.engines.takes_s = "late", 3.0
        played.mirror.answered(an_exchange(2))
        await played.until(lambda: len(played.rows()) == 2)

    played.play(story)
    first, second = played.rows()
    assert (first["outcome"], first["error"], first["answer"]) == ("failed", "its adapter is gone", None)
    assert (second["outcome"], second["answer"]) == ("timed_out", None)


def test_engine_that_is_busy_or_lent_says_nothing_about_the_candidate(played: Played) -> None:
    async def story() -> None:
        played.engines.says = EngineError("lent", code="device_in_use", http_status=503)
        played.mirror.answered(an_exchange(1))
        await played.until(lambda: played.counts["shadow_dropped"] == 1)
        await asyncio.sleep(0.6)

    played.play(story)
    assert played.rows() == []


def test_store_that_is_down_keeps_nobody_waiting_and_loses_nothing_that_has_room(played: Played) -> None:
    store = Unreachable(played.database)
    played.client._session._database = store  # type: ignore[assignment]

    async def story() -> None:
        store.is_down = True
        began = boot_seconds()
        for number in range(5):
            played.mirror.answered(an_exchange(number))
        assert boot_seconds() - began < 0.05
        await played.until(lambda: len(played.engines.asked) == 5)
        await asyncio.sleep(0.7)
        assert played.rows() == []
        store.is_down = False
        await played.until(lambda: len(played.rows()) == 5)

    played.play(story)


def test_mirrored_answer_waits_for_the_experience_of_the_live_one(played: Played) -> None:
    async def story() -> None:
        played.mirror.answered(an_exchange(9))
        await asyncio.sleep(1.2)
        assert played.rows() == []
        with played.database.write() as tx:
            an_asker(tx, 9)
        await played.until(lambda: played.counts["shadow_stored"] == 1)

    played.play(story)
    assert [row["response_id"] for row in played.rows()] == ["chatcmpl-9"]
    assert played.counts["shadow_lost"] == 0
