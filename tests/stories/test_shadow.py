"""A candidate shadows live traffic of a real server before it goes live; one that cannot answer never does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from openai.types.chat import ChatCompletion

from support.engine import a_lively_base, an_adapter
from support.fleet import Fleet
from support.gateway import PROFILE, ServerProcess, a_served_workspace, a_server
from support.rows import WORKER, a_claimed_run, a_judgement, claim_of
from support.workspaces import wait_for
from tunesmith.evaluation.evaluate import Measured
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.experience.tables import shadow_answers
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.orchestration import lifecycle
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.sections.shadow import ShadowSettings
from tunesmith.programs.stage import StageEnd
from tunesmith.runs.queries import runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.queries.tasks import Claim
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store import events

pytestmark = pytest.mark.extra  # minutes of starting programs; see make test-extra

POLICY = ShadowSettings(enabled=True, min_count=4, min_s=0.1, max_s=120.0, interval_s=0.2)
PEOPLE = [f"question {number}" for number in range(6)]


class World:
    """A served workspace; evaluations are settled here, the watch is a worker's."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.base = base
        self.fleet = Fleet(a_served_workspace(folder / "ws", base, num_versions=1))

    def promote_a_candidate(self, seed: int) -> tuple[Run, Adapter]:
        name = f"{PROFILE}-{seed}"
        made = an_adapter(self.base, self.fleet.client.workspace.adapters_dir / name, seed=seed)
        with self.fleet.database.write() as tx:
            run, claim = a_claimed_run(tx, RunState.EVALUATING, TaskKind.EVALUATE, shadow=POLICY)
            adapter = adapters.register(
                tx, PROFILE, run_id=run.id, path=f"adapters/{name}", digest=made.digest,
                base_digest=base_digest(self.base), metrics={}, actor=WORKER,
            )  # fmt: skip
        self.promote(run, adapter, claim)
        return run, adapter

    def promote(self, run: Run, adapter: Adapter, claim: Claim) -> None:
        measured = Measured(a_judgement(run, adapter.digest, Decision.PROMOTE), adapter.id, None, "scores.json")
        with self.fleet.database.write() as tx:
            lifecycle.settle(tx, claim, StageEnd.succeeded(measured), actor=WORKER)

    def states(self, run: Run) -> list[str | None]:
        with self.fleet.database.read() as tx:
            return [event.new_state for event in events.of_entity(tx, "run", run.id) if event.action == "moved"]

    def mirrored(self, run: Run) -> list[Any]:
        with self.fleet.database.read() as tx:
            return tx.all(sa.select(shadow_answers).where(shadow_answers.c.run_id == run.id))

    def state(self, run: Run) -> RunState:
        with self.fleet.database.read() as tx:
            return runs.get(tx, run.id).state


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("shadow")
    made = World(folder, a_lively_base(folder / "base"))
    yield made
    made.fleet.end()


@pytest.fixture(scope="module")
def server(shared: World) -> Iterator[ServerProcess]:
    with a_server(shared.fleet.root) as process:
        yield process


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The same for every story; its workers end with the story."""
    yield shared
    for worker in shared.fleet.processes:
        worker.kill()
        worker.wait()


def talk(server: ServerProcess, world: World, run: Run) -> list[ChatCompletion]:
    """Live requests, some of them once the mirror knows the candidate."""
    with server.openai(timeout=60.0) as api:

        def ask(text: str) -> ChatCompletion:
            said: list[Any] = [{"role": "user", "content": text}]
            answers.append(api.chat.completions.create(model=PROFILE, messages=said, max_tokens=4))
            return answers[-1]

        answers: list[ChatCompletion] = []
        deadline = time.monotonic() + 60.0
        while not world.mirrored(run):
            assert time.monotonic() < deadline
            ask("are you there?")
            time.sleep(1.5)  # a candidate is asked in the pauses
        for text in PEOPLE:
            ask(text)
        return answers


def test_good_candidate_shadows_is_measured_again_and_then_deployed(world: World, server: ServerProcess) -> None:
    run, adapter = world.promote_a_candidate(seed=7)
    assert world.state(run) is RunState.SHADOWING
    answers = talk(server, world, run)
    assert {answer.model for answer in answers} == {"support@v1"}, "a candidate's answer was shown"
    wait_for(lambda: len(world.mirrored(run)) >= POLICY.min_count, 40.0, "for mirrored answers")
    world.fleet.start("watch")
    wait_for(lambda: world.state(run) is RunState.EVALUATING, 30.0, "for the watch")
    with world.fleet.database.write() as tx:
        task = tasks.open_of_run(tx, run.id)
        assert task is not None
        claim = claim_of(tx, task.id)
        progress = shadows.progress(tx, run.id)
    assert task.kind is TaskKind.EVALUATE
    world.promote(run, adapter, claim)
    assert world.states(run) == ["shadowing", "evaluating", "deploying"]
    assert progress is not None
    assert (progress.num_failed, progress.num_timed_out) == (0, 0)
    rows = world.mirrored(run)
    assert {(row["adapter_id"], row["outcome"], row["live_version"]) for row in rows} == {
        (adapter.id, "answered", "support@v1")
    }
    assert all(row["answer"] for row in rows)
    assert server.health()["counts"]["shadow_stored"] >= len(rows)


def test_candidate_that_cannot_answer_is_rejected_and_nobody_notices(world: World, server: ServerProcess) -> None:
    run, adapter = world.promote_a_candidate(seed=8)
    shutil.rmtree(world.fleet.client.workspace.data_dir / adapter.path)
    answers = talk(server, world, run)
    assert {answer.model for answer in answers} == {"support@v1"}
    wait_for(lambda: len(world.mirrored(run)) >= POLICY.min_count, 40.0, "for mirrored requests")
    world.fleet.start("watch")
    wait_for(lambda: world.state(run) is RunState.REJECTED, 30.0, "for the watch")
    with world.fleet.database.read() as tx:
        assert "failed or timed out" in runs.get(tx, run.id).reason
    assert {row["outcome"] for row in world.mirrored(run)} == {"failed"}


def test_request_that_must_not_be_kept_is_never_mirrored(world: World, server: ServerProcess) -> None:
    run, _ = world.promote_a_candidate(seed=9)
    talk(server, world, run)
    with server.openai(default_headers={"X-Tunesmith-Consent": "no"}) as api:
        said: list[Any] = [{"role": "user", "content": "keep nothing of this"}]
        private = api.chat.completions.create(model=PROFILE, messages=said, max_tokens=4).id
    with server.openai() as api:
        exact = api.chat.completions.create(model="support@v1", messages=said, max_tokens=4).id
    last = talk(server, world, run)[-1].id

    def mirrored() -> set[str]:
        return {row["response_id"] for row in world.mirrored(run)}

    wait_for(lambda: last in mirrored(), 40.0, "for what was asked later")
    assert not {private, exact} & mirrored()
