"""What the watch reads of the store, what comes of a drop, and that a look stays cheap."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, PROFILE, WORKER, a_campaign, a_claimed_run, an_adapter, an_experience, force, moves
from tunesmith.core.ids import new_id
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.watch import look_at_answers
from tunesmith.evaluation.rules.gate import BARE_BASE
from tunesmith.experience.queries import experiences, served_answers, traffic
from tunesmith.experience.rules.classes import UNJUDGED, assess
from tunesmith.experience.rules.experience import Context, ExperienceState
from tunesmith.experience.rules.feedback import Feedback
from tunesmith.experience.rules.traffic import FAILED, KEPT, range_of, seconds_up_to, step_of
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import control, lifecycle
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.sections.experience import Thresholds
from tunesmith.profiles.sections.watch import QualityWatch
from tunesmith.programs.stage import Looked, StageEnd
from tunesmith.runs.queries import requests, runs
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store.database import Database, Tx
from tunesmith.verifiers.base import UNFINISHED, Finding

POLICY = QualityWatch(min_answers=20, answers=40, min_s=0.0, max_s=100.0)
OLD, NEW, BASE = f"{PROFILE}@v1", f"{PROFILE}@v2", f"{PROFILE}@base"


def answer(
    tx: Tx, version: str | None, score: float | None = 1.0, *, rating: float | None = None, is_finished: bool = True,
    days_ago: float = 0.0, state: ExperienceState | None = None,
) -> None:  # fmt: skip
    """One answer of a version, as `tunesmith serve` captures it."""
    findings = {"json_schema": Finding(score), "fabrication": Finding(0.0)}
    if not is_finished:
        findings[UNFINISHED] = Finding(None, True, "the answer was cut short")
    said = Feedback() if rating is None else Feedback(rating, 1)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    experience_id, _ = experiences.add(
        tx, PROFILE, new_id("key"), messages, actor=ACTOR, context=Context(served_by=version),
        assessment=assess(findings, (), said, Thresholds(), monitors=("fabrication",)),
    )  # fmt: skip
    if days_ago:
        force(tx, tables.experiences, experience_id, created_at=tx.now - timedelta(days=days_ago))
    if state is not None:
        force(tx, tables.experiences, experience_id, state=state)


def flipped(tx: Tx, number: int) -> Adapter:
    """The next version goes live as a deployment does it."""
    adapter = an_adapter(tx)
    assert adapter.version == number
    baseline = deployments.live_digest(tx, PROFILE)
    deployments.flip(tx, adapter, baseline=baseline, targets=[], actor=ACTOR, reason="drill")
    return adapters.get(tx, adapter.id)


def look(tx: Tx, adapter: Adapter, policy: QualityWatch = POLICY, watched_s: float = 1.0) -> Any:
    deployment = deployments.get(tx, PROFILE)
    assert deployment is not None
    return look_at_answers(tx, adapter, deployment, watched_s, policy)


def test_answers_since_the_flip_are_compared_with_those_of_the_version_before(database: Database) -> None:
    with database.write() as tx:
        flipped(tx, 1)
    with database.write() as tx:
        for number in range(30):
            answer(tx, OLD, rating=1.0 if number < 25 else None, is_finished=number > 0)
            answer(tx, OLD, 0.0, days_ago=0.0, state=ExperienceState.FORGOTTEN)
            answer(tx, BASE, 0.0)
            answer(tx, None, 0.0)
            answer(tx, NEW, 0.0)  # asked for by its name before it was live
    with database.write() as tx:
        new = flipped(tx, 2)
    with database.write() as tx:
        for _ in range(12):
            answer(tx, NEW, 0.5, rating=0.5)
            answer(tx, OLD, 0.0)  # asked for by its name
            answer(tx, NEW, None)
    with database.read() as tx:
        verdict = look(tx, new)
    seen = {e.signal: (e.baseline_mean, e.baseline_n, e.live_mean, e.live_n) for e in verdict.evidence}
    assert seen == {
        "json_schema": (1.0, 30, 0.5, 12),
        "finished": (29 / 30, 30, 1.0, 24),
        "feedback": (1.0, 25, 0.5, 12),
    }, "fabrication only monitors; nothing was counted as a request"
    assert verdict.decision == "roll_back", "30 perfect answers before, and none of 12 since"


def test_version_before_may_be_the_bare_base_and_old_answers_do_not_count(database: Database) -> None:
    with database.write() as tx:
        candidate = an_adapter(tx)  # the profile exists
        for _ in range(25):
            answer(tx, BASE, days_ago=8.0)
        for _ in range(19):
            answer(tx, BASE)
    with database.write() as tx:
        deployments.flip(
            tx, candidate, baseline=deployments.live_digest(tx, PROFILE), targets=[], actor=ACTOR, reason="x"
        )
    with database.read() as tx:
        live = adapters.live(tx, PROFILE)
        assert live is not None
        verdict = look(tx, live)
    assert verdict.decision == "healthy"
    assert verdict.reason == f"not enough answers to compare with: 19 of 20 by {BASE} before the flip"


def test_requests_that_failed_and_slow_answers_are_compared_too(database: Database) -> None:
    with database.write() as tx:
        flipped(tx, 1)
    with database.write() as tx:
        traffic.add(tx, {(PROFILE, OLD, range_of(0.5)): 100, (PROFILE, OLD, FAILED): 1})
        traffic.add(tx, {(PROFILE, OLD, range_of(0.5)): 50, ("other", OLD, FAILED): 1000})
    with database.write() as tx:
        new = flipped(tx, 2)
    with database.write() as tx:
        traffic.add(tx, {(PROFILE, NEW, range_of(8.0)): 30, (PROFILE, NEW, FAILED): 20})
    with database.read() as tx:
        verdict = look(tx, new)
    assert verdict.decision == "roll_back"
    found = {e.signal: e for e in verdict.evidence}
    assert (found["errors"].baseline_n, found["errors"].live_mean, found["errors"].live_n) == (151, 0.6, 50)
    assert found["latency"].baseline_mean == pytest.approx(0.5, rel=0.2)
    assert found["latency"].live_mean == pytest.approx(8.0, rel=0.2)
    assert all(e.rolls_back for e in verdict.evidence)
    assert "the share of requests that were answered fell from 0.993 (151 requests of support@v1 b" in verdict.reason
    assert verdict.reason.endswith("; also worse: latency")


def test_old_counts_of_requests_are_deleted(database: Database) -> None:
    with database.write() as tx:
        traffic.add(tx, {(PROFILE, OLD, 0): 2, (PROFILE, NEW, 0): 1})
        old = tables.traffic.c.version == OLD
        tx.run(tables.traffic.update().where(old).values(begins_at=step_of(tx.now - KEPT) - timedelta(minutes=5)))
        assert traffic.delete_old(tx) == 1
        assert [row["version"] for row in tx.all(sa.select(tables.traffic))] == [NEW]


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.001, 0.0123, 1.0, 59.0, 3600.0])
def test_ranges_hold_what_lies_in_them(seconds: float) -> None:
    number = range_of(seconds)
    assert seconds <= seconds_up_to(number) * (1 + 1e-6)
    assert number == 0 or seconds > seconds_up_to(number - 1)
    assert range_of(seconds_up_to(number)) == number


def test_rollback_by_quality_releases_the_data_and_is_counted_as_a_rejection(database: Database) -> None:
    with database.write() as tx:
        campaign = a_campaign(tx)
        first = flipped(tx, 1)
        run, claim = a_claimed_run(tx, RunState.DEPLOYING, TaskKind.WATCH, campaign_id=campaign.id)
        learnt = an_experience(tx, ExperienceState.RESERVED, dataset_id=run.dataset_id)
        bad = an_adapter(tx, run_id=run.id)
        deployments.flip(tx, bad, baseline=first.digest, targets=[], actor=ACTOR, reason="drill")
        force(tx, tables.runs, run.id, state=RunState.WATCHING)
    evidence = ({"signal": "json_schema", "text": "worse"},)
    with database.write() as tx:
        end = StageEnd.succeeded(Looked("roll_back", "worse", evidence=evidence))
        lifecycle.settle(tx, claim, end, actor=WORKER)
    with database.read() as tx:
        assert runs.get(tx, run.id).state is RunState.ROLLED_BACK
        assert adapters.get(tx, bad.id).state is AdapterState.ROLLED_BACK
        live = adapters.live(tx, PROFILE)
        assert live is not None
        assert live.id == first.id
        freed = experiences.get(tx, learnt)
        assert (freed.state, freed.num_rejections) == (ExperienceState.COLLECTED, 1)
        assert campaigns.get(tx, campaign.id).counters.num_rejections == 1
        assert moves(tx, "run", run.id)[-1].detail == {"watch": [{"signal": "json_schema", "text": "worse"}]}


@pytest.mark.parametrize("is_leased", [False, True])
def test_person_ends_a_watch_and_the_next_flip_need_not_wait(database: Database, is_leased: bool) -> None:
    with database.write() as tx:
        run, claim = a_claimed_run(tx, RunState.DEPLOYING, TaskKind.WATCH)
        bad = an_adapter(tx, run_id=run.id)
        deployments.flip(tx, bad, baseline=BARE_BASE, targets=[], actor=ACTOR, reason="drill")
        force(tx, tables.runs, run.id, state=RunState.WATCHING)
        if not is_leased:
            lifecycle.settle(tx, claim, StageEnd.succeeded(Looked("again", "no drop shown yet")), actor=WORKER)
    with database.write() as tx:
        answered = control.request_action(tx, run.id, RequestKind.STOP, actor=ACTOR)
        assert answered.state is (RunState.WATCHING if is_leased else RunState.DEPLOYED)
    with database.write() as tx:
        if is_leased:  # as `watch` answers it
            assert [each.kind for each in requests.unanswered(tx, run.id)] == [RequestKind.STOP]
            lifecycle.settle(tx, claim, StageEnd.succeeded(Looked("healthy", "ended on request")), actor=WORKER)
        assert runs.get(tx, run.id).state is RunState.DEPLOYED
        assert requests.unanswered(tx, run.id) == []
        deployments.check_flip(tx, PROFILE, bad.digest)
        live = adapters.live(tx, PROFILE)
        assert live is not None
        assert live.id == bad.id


def test_look_finds_its_rows_by_indexes(database: Database) -> None:
    """As it must with a million experiences; 20,000 of other versions are enough to see the difference."""
    with database.write() as tx:
        new = flipped(tx, 1)
        for version in (BASE, NEW):
            for _ in range(30):
                answer(tx, version)
        row = dict(tx.all(sa.select(tables.experiences).limit(1))[0])
        judged = dict(tx.all(sa.select(tables.assessments).limit(1))[0])
        many = [f"xp-{number}" for number in range(20_000)]
        copies = [{**row, "seq": None, "id": name, "natural_key": name, "served_by": f"{PROFILE}@v9"} for name in many]
        for copy in copies:
            del copy["seq"]
        tx.conn.execute(tables.experiences.insert(), copies)
        tx.conn.execute(
            tables.assessments.insert(),
            [{k: v for k, v in {**judged, "experience_id": name}.items() if k != "seq"} for name in many],
        )
        tx.conn.execute(sa.text("ANALYZE"))
    with database.read() as tx:
        begin = time.process_time()
        look(tx, new)
        assert time.process_time() - begin < 1.0
        chosen = served_answers._of_version(PROFILE, NEW).where(tables.experiences.c.seq >= 1)
        query = chosen.order_by(tables.experiences.c.seq).limit(10)
        text = str(query.compile(tx.conn, compile_kwargs={"literal_binds": True}))
        explain = "EXPLAIN QUERY PLAN" if not tx.is_postgres else "EXPLAIN"
        plan = "\n".join(str(tuple(each)) for each in tx.conn.execute(sa.text(f"{explain} {text}")))
    assert "ix_experiences_served_by" in plan, plan
    assert "SCAN experiences" not in plan
    assert "Seq Scan on experiences" not in plan


def test_experience_that_nobody_judged_counts_for_no_score(database: Database) -> None:
    with database.write() as tx:
        flipped(tx, 1)
        messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        experiences.add(tx, PROFILE, "k", messages, actor=ACTOR, context=Context(served_by=OLD), assessment=UNJUDGED)
    with database.read() as tx:
        (found,) = served_answers.newest_before(
            tx, PROFILE, OLD, tx.now + timedelta(seconds=1), since=tx.now - timedelta(days=1), limit=10
        )
    assert (found.scores, found.rating, found.is_finished) == ({}, None, True)
