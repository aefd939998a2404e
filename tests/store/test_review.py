"""Review through the real client, on both databases: suspects are accepted or rejected, by whom and why is kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.rows import ACTOR, a_dataset, a_run
from support.workspaces import PROFILE, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import NotFound, Refused, UsageError
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.tables import reviews as reviews_table
from tunesmith.orchestration import lifecycle
from tunesmith.runs.rules.run import DataEffect, RunState
from tunesmith.store.database import Database

KEY = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"


def _client(folder: Path, store_url: str) -> Client:
    return a_workspace(folder, settings={"store": {"url": store_url}})


def _add(client: Client, question: str = "Send order 17 to Rome", **about: Any) -> str:
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "Order 17 goes to Rome."}]
    return client.experiences.add(PROFILE, talk, **about).id


def _class(client: Client, experience_id: str) -> str:
    return client.experiences.show(experience_id).experience.class_name


def _reject_twice(database: Database, experience_id: str) -> None:
    """Two runs on datasets that held it are rejected."""
    for _ in range(2):
        with database.write() as tx:
            dataset = a_dataset(tx, PROFILE)
            experiences.reserve(tx, [experience_id], dataset, actor=ACTOR)
            run = a_run(tx, RunState.EVALUATING, dataset_id=dataset)
            lifecycle.finish(tx, run, RunState.REJECTED, actor=ACTOR, reason="worse")


def test_accepted_suspect_gets_the_class_it_deserves_and_leaves_the_inbox(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        suspect = _add(client, f"My key is {KEY}")
        assert [each.id for each in client.experiences.in_review(PROFILE)] == [suspect]
        (decided,) = client.experiences.review([suspect[:14]], "accept", reason="a sample key")
        assert (decided.is_new, decided.class_name) == (True, "gold")
        assert client.experiences.in_review() == []
        shown = client.experiences.show(suspect)
        (told,) = [event for event in shown.events if event.action == "reviewed"]
        assert (told.actor, told.reason) == (ACTOR, "a sample key")
        assert shown.suspicions  # still known
        assert client.feedback.add(suspect, "down").class_name == "ambiguous"
        assert client.feedback.add(suspect, "up").class_name == "gold"  # late feedback keeps the decision


def test_rejected_suspect_stays_out_until_somebody_accepts_it(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        suspect = _add(client, f"My key is {KEY}")
        assert client.experiences.review([suspect], "reject", reason="a real key")[0].class_name == "quarantined"
        assert client.experiences.in_review() == []
        assert client.feedback.add(suspect, "helpful").class_name == "quarantined"
        with database.write() as tx, pytest.raises(Refused, match="quarantined"):
            experiences.reserve(tx, [suspect], a_dataset(tx), actor=ACTOR)
        assert client.experiences.review([suspect], "accept", reason="it was revoked")[0].class_name == "gold"
        with database.read() as tx:
            decisions = sa.select(reviews_table.c.decision).where(reviews_table.c.experience_id == suspect)
            assert [row["decision"] for row in tx.all(decisions.order_by(reviews_table.c.seq))] == ["reject", "accept"]


def test_same_decision_again_changes_nothing(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        suspect = _add(client, f"My key is {KEY}")
        told = [client.experiences.review([suspect], "accept", reason="fine")[0].is_new for _ in range(3)]
        assert told == [True, False, False]
    with database.read() as tx:
        assert tx.conn.execute(sa.select(sa.func.count()).select_from(reviews_table)).scalar_one() == 1


def test_experience_of_two_rejected_runs_waits_and_acceptance_counts_anew(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        innocent = _add(client)
        _reject_twice(database, innocent)
        (waiting,) = client.experiences.in_review()
        assert (waiting.id, waiting.class_name, waiting.why) == (
            innocent, "gold", ("rejected_runs: was in 2 rejected runs",)
        )  # fmt: skip
        client.experiences.review([innocent], "accept", reason="the base was broken")
        shown = client.experiences.show(innocent)
        assert (shown.in_review, shown.num_rejections, shown.experience.class_name) == (False, 0, "gold")
        _reject_twice(database, innocent)  # the counter started anew, and what was accepted once waits again
        assert [each.id for each in client.experiences.in_review()] == [innocent]
        assert client.experiences.review([innocent], "accept", reason="again")[0].is_new
        _reject_twice(database, innocent)
        rejected = client.experiences.review([innocent], "reject", reason="no more")[0]
        assert (rejected.class_name, client.experiences.in_review()) == ("quarantined", [])


def test_what_cannot_be_decided_is_refused_with_what_to_do(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        plain, held, gone = _add(client), _add(client, "Send order 17 to Oslo"), _add(client, "Send it")
        with database.write() as tx:
            experiences.reserve(tx, [held], a_dataset(tx, PROFILE), actor=ACTOR)
            experiences.move(tx, gone, ExperienceState.FORGOTTEN, actor=ACTOR, reason="test")
        for ids, decision, reason, error, says in [
            ([plain], "accept", "x", Refused, "nothing to accept"),
            ([held], "reject", "x", Refused, "cancel that run"),
            ([gone], "accept", "x", Refused, "was forgotten"),
            ([plain], "reject", " ", UsageError, "say why"),
            ([plain], "perhaps", "x", UsageError, "is no decision"),
            (["xp-zzzz"], "accept", "x", NotFound, "no experience"),
            ([], "accept", "x", UsageError, "name the experiences"),
        ]:
            with pytest.raises(error, match=says):
                client.experiences.review(ids, decision, reason=reason)
        assert client.experiences.review([plain], "reject", reason="by hand")[0].class_name == "quarantined"


def test_one_that_is_refused_leaves_the_others_undecided(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        suspect, plain = _add(client, f"My key is {KEY}"), _add(client)
        with pytest.raises(Refused):
            client.experiences.review([suspect, plain], "accept", reason="both")
        assert [each.id for each in client.experiences.in_review()] == [suspect]


def test_all_of_one_screen_are_accepted_only_where_nothing_else_is_suspected(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        keys = [_add(client, f"Key {number}: {KEY}") for number in range(3)]
        both = _add(client, f"{KEY} <|im_start|>system")
        with pytest.raises(UsageError, match="did you mean 'secret'"):
            client.experiences.review_all_with("secrt", "accept", reason="x")
        accepted = client.experiences.review_all_with("secret", "accept", reason="samples", profile=PROFILE)
        assert {each.id for each in accepted} == set(keys)
        assert [each.id for each in client.experiences.in_review()] == [both]
        assert [each.id for each in client.experiences.review_all_with("secret", "reject", reason="no")] == [both]


def test_what_a_reviewer_sees_repeats_no_secret_and_steers_nothing(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        _add(client, f"\x1b[2J\u202e my key {KEY} \u200b mail ann.lee@gmail.com", source="a\x1b[31mb")
        (seen,) = client.experiences.in_review()
        told = repr((seen.question, seen.answer, seen.why, seen.source)).replace("\\\\", "")
        for hostile in (KEY, KEY[:10], "ann.lee", "\x1b", "\u202e", "\u200b"):
            assert hostile not in told
        assert "\\x1b" not in told


@pytest.mark.parametrize("num", [2000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_listing_and_inbox_stay_quick_with_many_suspects(
    tmp_path: Path, store_url: str, database: Database, num: int
) -> None:
    with _client(tmp_path, store_url) as client:
        _add(client, f"My key is {KEY}")
        with database.write() as tx:
            _many_suspects(tx, num)
        began = time.monotonic()
        assert len(client.experiences.in_review(PROFILE, limit=20)) == 20
        (item,) = client.system.inbox()
        assert (item.kind, item.num, len(item.newest)) == ("suspects", min(num + 1, 10_000), 3)
        assert time.monotonic() - began < 1.0


def _many_suspects(tx: Any, num: int) -> None:
    row = dict(tx.first(sa.select(tables.experiences)))
    judged = dict(tx.first(sa.select(tables.assessments)))
    ids = [f"xp-many{number:012d}" for number in range(num)]
    same = {name: value for name, value in row.items() if name != "seq"}
    tx.conn.execute(tables.experiences.insert(), [{**same, "id": each, "natural_key": each} for each in ids])
    same = {name: value for name, value in judged.items() if name != "seq"}
    tx.conn.execute(tables.assessments.insert(), [{**same, "experience_id": each} for each in ids])


def test_settling_effects_know_nothing_of_reviews(tmp_path: Path, store_url: str, database: Database) -> None:
    """A rejection in review keeps an experience out by its class alone; a run that ends does not bring it back."""
    with _client(tmp_path, store_url) as client:
        known = _add(client)
        with database.write() as tx:
            dataset = a_dataset(tx, PROFILE)
            experiences.reserve(tx, [known], dataset, actor=ACTOR)
            run = a_run(tx, RunState.EVALUATING, dataset_id=dataset)
            experiences.settle(tx, dataset, DataEffect.RELEASE, actor=ACTOR, run_id=run.id, adapter_id=None, last=True)
        client.experiences.review([known], "reject", reason="no")
        assert _class(client, known) == "quarantined"
