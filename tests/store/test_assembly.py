"""Assembly on both databases: what is chosen, what it reserves, how that ends, and what is never trained."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.experience_processes import assemble_for_ever
from support.rows import ACTOR, a_run, an_adapter, force
from support.store_processes import kill_amid, start
from support.workspaces import PROFILE, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import DataError, Refused, UsageError
from tunesmith.core.ids import new_id
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.listings import newest
from tunesmith.datasets.prepare import remove_unrecorded
from tunesmith.datasets.reading import iter_examples
from tunesmith.deployment import queries as deployments
from tunesmith.experience.assemble import refuse_other_than_chosen
from tunesmith.experience.queries import candidates, experiences, feedback, members
from tunesmith.experience.queries.experiences import NotReservable
from tunesmith.experience.rules.experience import CorrectionState, ExperienceState
from tunesmith.experience.rules.feedback import Rating
from tunesmith.experience.rules.mix import FIRST_ROUND, MixCandidate
from tunesmith.experience.rules.serving_history import BASE_BESIDE_LIVE, BASE_UNRATED, NEVER_LIVE, TAKEN_BACK
from tunesmith.models import queries as adapters
from tunesmith.orchestration import lifecycle
from tunesmith.runs.rules.run import RUN, DataEffect, RunState, effect_of_end
from tunesmith.store import events
from tunesmith.store.database import Database

SMALL = {"min_new": 5, "max_examples": 40}
SHARES = {"heldout_share": 0.3, "screens": "none"}


def _client(folder: Path, store_url: str, *, data: dict[str, Any] | None = None, **mix: Any) -> Client:
    profile = {"experience": {"mix": {**SMALL, **mix}}, "data": {**SHARES, **(data or {})}}
    return a_workspace(folder, profile=profile, settings={"store": {"url": store_url}})


def _talk(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _gold(client: Client, num: int, first: int = 0, **about: Any) -> list[str]:
    """Clean answers that nobody has said anything about."""
    talks = [_talk(f"Tell me about the town {n}", f"The town {n} is old.") for n in range(first, first + num)]
    return [client.experiences.add(PROFILE, talk, **about).id for talk in talks]


def _corrected(client: Client, num: int, first: int = 0) -> list[str]:
    ids = []
    for n in range(first, first + num):
        added = client.experiences.add(PROFILE, _talk(f"Where is the river {n}", f"wrong {n}"))
        client.feedback.add(added.id, "down", rater="ann", correction=f"The river {n} is in the north.")
        ids.append(added.id)
    return ids


def _examples(client: Client, dataset_id: str) -> list[tuple[Split, Example]]:
    folder = client.workspace.data_dir / client.datasets.show(dataset_id)[0].path
    return [(split, example) for split in Split for example in iter_examples(folder, split)]


def _states(database: Database) -> Counter[str]:
    with database.read() as tx:
        return Counter(tx.conn.execute(sa.select(tables.experiences.c.state)).scalars())


def _end(database: Database, dataset_id: str, end: RunState) -> str:
    """A run on the dataset, queued as `run submit` does it, that ends like this."""
    before = next(state for state in RUN.unfinished if end in RUN.table[state])
    with database.write() as tx:
        members.reserve_for_run(tx, dataset_id, actor=ACTOR)
        run = a_run(tx, before, dataset_id=dataset_id)
    with database.write() as tx:
        lifecycle.finish(tx, run, end, actor=ACTOR, reason="as the test wants")
    return run.id


# --- the failures of earlier systems ---


@pytest.mark.slow
def test_failure_1_assembly_marks_nothing_as_used_and_failed_runs_burn_nothing(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 40)
        seen = []
        for _ in range(5):
            dataset, _ = client.datasets.assemble(PROFILE)
            assert set(_states(database)) == {"reserved"}
            _end(database, dataset.id, RunState.FAILED)
            assert set(_states(database)) == {"collected"}
            seen.append(dataset.fingerprint)
        assert len(set(seen)) == 1  # what the first one had, all later ones have
        _end(database, client.datasets.assemble(PROFILE)[0].id, RunState.COMPLETED)
        assert set(_states(database)) == {"consumed"}


@pytest.mark.slow
def test_failure_2_corrections_of_people_and_teachers_reach_the_batch(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 10)
        said = _corrected(client, 20)
        taught = _taught(client, database, 20)
        dataset, report = client.datasets.assemble(PROFILE, max_examples=100)
        answers = {example.chosen[-1]["content"] for _, example in _examples(client, dataset.id)}
        assert answers >= {f"The river {n} is in the north." for n in range(20)}
        assert answers >= {f"The lake {n} is deep." for n in range(20)}
        assert not any("wrong" in answer for answer in answers)
        assert report.mix is not None
        assert report.mix.roles["corrected"] > 0
        with database.read() as tx:
            roles = {member.experience_id: member.role for member in members.of_dataset(tx, dataset.id)}
        assert {roles[each] for each in said + taught} == {"corrected"}


def _taught(client: Client, database: Database, num: int) -> list[str]:
    """Poor answers that a teacher has corrected; one attempt was refused before."""
    ids = []
    for n in range(num):
        added = client.experiences.add(PROFILE, _talk(f"How is the lake {n}", f"wrong {n}"))
        client.feedback.add(added.id, "down", rater="ann")
        ids.append(added.id)
        for number, state, answer in ((1, "refused", "wrong too"), (2, "accepted", f"The lake {n} is deep.")):
            with database.write() as tx:
                tx.run(
                    tables.corrections.insert().values(
                        id=new_id("co"), experience_id=added.id, profile=PROFILE, number=number, teacher="big",
                        state=CorrectionState(state), reason="", answer=answer, findings={}, created_at=tx.now,
                        counts=True,
                    )
                )  # fmt: skip
    return ids


def test_last_word_of_a_person_counts_before_a_teacher(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        (first, *_) = _taught(client, database, 3)
        client.feedback.add(first, correction="The lake is salt.", rater="bob")
        client.feedback.add(first, correction="The lake is dry.", rater="ann")
        with database.read() as tx:
            found = candidates.by_ids(tx, [first])[first]
        assert (found.correction, found.corrected_by) == ("The lake is dry.", "ann")


def test_failure_3_clean_answer_without_feedback_is_gold_and_in(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        ids = _gold(client, 20)
        dataset, _ = client.datasets.assemble(PROFILE)
        for each in ids:
            shown = client.experiences.show(each)
            assert (shown.experience.class_name, shown.experience.feedback.mean) == ("gold", None)
            assert shown.dataset_id == dataset.id


def _live(database: Database, adapter: adapters.Adapter) -> None:
    with database.write() as tx:
        deployments.flip(
            tx,
            adapter,
            baseline=deployments.live_digest(tx, PROFILE),
            targets=[],
            actor=ACTOR,
            reason="as the test wants",
        )


def _by(client: Client, num: int, served_by: str | None, first: int) -> list[str]:
    return _gold(client, num, first, served_by=served_by)


def _assembled(client: Client, database: Database) -> tuple[set[str], dict[str, int]]:
    """Which experiences are in, and why others are not; the dataset lets go of them again."""
    dataset, report = client.datasets.assemble(PROFILE, max_examples=400, min_new=1)
    assert report.mix is not None
    with database.read() as tx:
        found = {member.experience_id for member in members.of_dataset(tx, dataset.id)}
    _end(database, dataset.id, RunState.FAILED)
    return found, report.mix.left_out


def test_silence_about_an_answer_counts_only_where_who_gave_it_has_been_live(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        before = _by(client, 20, f"{PROFILE}@base", 0)
        unnamed = [*_gold(client, 20, 100), *_by(client, 20, "some-other-model", 200)]
        with database.write() as tx:
            first, second, third = (an_adapter(tx) for _ in range(3))
        assert _assembled(client, database)[0] == {*before, *unnamed}  # added by hand: their own data
        _live(database, first)
        beside = _by(client, 20, f"{PROFILE}@base", 300)
        ones, twos, threes = (_by(client, 20, each.name, 400 + 100 * each.version) for each in (first, second, third))
        found, left_out = _assembled(client, database)
        assert found == {*before, *unnamed, *ones}
        assert (left_out[NEVER_LIVE], left_out[BASE_BESIDE_LIVE]) == (40, 20)
        _live(database, second)
        assert _assembled(client, database)[0] == {*before, *unnamed, *ones, *twos}
        with database.write() as tx:
            deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="it disappoints")
        found, left_out = _assembled(client, database)
        assert found == {*before, *unnamed, *ones}
        assert (left_out[NEVER_LIVE], left_out[TAKEN_BACK], left_out[BASE_BESIDE_LIVE]) == (20, 20, 20)
        client.feedback.add(threes[0], "helpful", rater="ann")
        client.feedback.add(twos[0], "down", rater="ann", correction="The town is new.")
        client.feedback.add(beside[0], "up", rater="ann")
        client.feedback.add(threes[1], rater="ann", comment="read it")
        assert _assembled(client, database)[0] == {*before, *unnamed, *ones, threes[0], twos[0], beside[0]}


@pytest.mark.parametrize("served_by", [f"{PROFILE}@base", None])
def test_silence_about_what_the_bare_base_served_is_no_praise(
    tmp_path: Path, store_url: str, database: Database, served_by: str | None
) -> None:
    with _client(tmp_path, store_url) as client:
        served = _by(client, 30, served_by, 0)
        with database.write() as tx:
            mine = tables.experiences.c.id.in_(served)
            tx.run(tables.experiences.update().where(mine).values(key_label="(no key)"))
        by_hand = _by(client, 20, served_by, 100)
        found, left_out = _assembled(client, database)
        assert (found, left_out[BASE_UNRATED]) == (set(by_hand), 30)
        client.feedback.add(served[0], "up", rater="ann")
        client.feedback.add(served[1], "down", rater="ann", correction="The town is new.")
        found, left_out = _assembled(client, database)
        assert (found, left_out[BASE_UNRATED]) == ({*by_hand, *served[:2]}, 28)
        trusting = {"experience.mix.unrated_base": True}
        assert client.datasets.preview_assembly(PROFILE).left_out[BASE_UNRATED] == 28
        dataset, _ = client.datasets.assemble(PROFILE, max_examples=400, overrides=trusting)
        with database.read() as tx:
            members_now = {member.experience_id for member in members.of_dataset(tx, dataset.id)}
        assert members_now == {*by_hand, *served}


def test_answer_of_a_version_that_is_taken_back_is_not_replayed(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 1, 900)  # the profile is known from now on
        with database.write() as tx:
            first = an_adapter(tx)
        _live(database, first)
        learnt = set(_by(client, 40, first.name, 0))
        _end(database, client.datasets.assemble(PROFILE, max_examples=400)[0].id, RunState.COMPLETED)
        _gold(client, 100, 100)
        assert _assembled(client, database)[0] & learnt
        with database.write() as tx:
            deployments.roll_back(tx, PROFILE, actor=ACTOR, reason="it disappoints")
        found, left_out = _assembled(client, database)
        assert not found & learnt
        assert left_out[TAKEN_BACK] == 40


@pytest.mark.slow
def test_failure_6_no_prompt_that_was_held_out_is_ever_trained(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    """Rounds with overlapping prompts, other answers, conversations that go on, and pairs among them."""
    with _client(tmp_path, store_url, min_new=1, data={"validation_share": 0.1}) as client:
        held: dict[str, int] = {}
        for number in range(5):
            for n in range(8 * number, 8 * number + 16):  # the half of them was there before
                begin = _talk(f"Tell me about the town {n}", f"It is old, {number}.")
                long = [*begin, *_talk(f"And its river, {number}?", "It is wide.")]
                for talk in (begin, long):
                    added = client.experiences.add(PROFILE, talk, session=f"{number}-{n}")
                    if n % 3 == 0:
                        client.feedback.add(added.id, 0.5, rater="ann", correction=f"Better, {number}.")
            kind: Any = "preference" if number == 2 else "sft"
            dataset, _ = client.datasets.assemble(PROFILE, kind=kind, max_examples=60)
            found = _examples(client, dataset.id)
            trained = {_opening(example) for split, example in found if split is not Split.HELDOUT}
            assert not trained & held.keys(), f"round {number}"
            for split, example in found:
                if split is Split.HELDOUT:
                    held.setdefault(_opening(example), number)
            assert not trained & held.keys(), f"round {number}"
            _end(database, dataset.id, RunState.COMPLETED if number % 2 else RunState.REJECTED)
        assert len(set(held.values())) > 2
        with database.read() as tx:
            judged_on = {case.messages[0]["content"].casefold() for case in datasets.pool(tx, PROFILE, "", 1000)}
        assert judged_on
        assert judged_on <= held.keys()


def _opening(example: Example) -> str:
    return example.prompt[0]["content"].casefold()


# --- what is chosen ---


def test_pairs_are_made_of_correction_and_answer_and_gold_waits(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        gold = _gold(client, 5)
        _corrected(client, 20)
        dataset, report = client.datasets.assemble(PROFILE, kind="preference")
        pairs = _examples(client, dataset.id)
        assert (dataset.kind, len(pairs)) == ("preference", 20)
        for _, pair in pairs:
            assert pair.chosen[-1]["content"].startswith("The river")
            assert pair.rejected is not None
            assert pair.rejected[-1]["content"].startswith("wrong")
        assert report.mix is not None
        assert report.mix.left_out == {"without a correction to make a pair of": 5}
        assert client.experiences.show(gold[0]).experience.state == "collected"


@pytest.mark.parametrize(("method", "kind"), [("sft", "supervised"), ("orpo", "preference"), ("kto", "preference")])
def test_auto_makes_what_the_method_learns_from(tmp_path: Path, store_url: str, method: str, kind: str) -> None:
    with _client(tmp_path, store_url) as client:
        _corrected(client, 16)
        assert client.datasets.assemble(PROFILE, overrides=[f"recipe.method={method}"])[0].kind == kind


def test_nothing_suspect_uncorrected_reviewed_or_complained_about_is_in(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        good = _gold(client, 20)
        bad = _gold(client, 5, 100)
        client.feedback.add(bad[0], "down", rater="ann")
        client.experiences.add(PROFILE, _talk("So?", "So."), next_turn="No, that is wrong.")
        with database.write() as tx:
            force(tx, tables.experiences, bad[1], in_review=True)
            table = tables.assessments
            tx.run(table.update().where(table.c.experience_id == bad[2]).values(class_name="quarantined"))
            tx.run(table.update().where(table.c.experience_id == bad[3]).values(review="reject"))
            experiences.move(tx, bad[4], ExperienceState.FORGOTTEN, actor=ACTOR, reason="asked to")
        dataset, report = client.datasets.assemble(PROFILE)
        with database.read() as tx:
            assert {member.experience_id for member in members.of_dataset(tx, dataset.id)} == set(good)
        assert report.mix is not None
        assert report.mix.left_out == {
            "ambiguous and not corrected": 2,
            "waiting for a review": 1,
            "quarantined": 1,
            "rejected by a reviewer": 1,
            "forgotten": 1,
        }


def test_second_round_replays_what_was_learnt_and_does_not_reserve_it(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        first = _gold(client, 40)
        one, report = client.datasets.assemble(PROFILE)
        assert report.mix is not None
        assert FIRST_ROUND in report.mix.shortages
        _end(database, one.id, RunState.DEPLOYED)
        new = _gold(client, 30, 100)
        two, report = client.datasets.assemble(PROFILE)
        assert report.mix is not None
        assert FIRST_ROUND not in report.mix.shortages
        assert report.mix.roles["replay"] > 0
        with database.read() as tx:
            found = members.of_dataset(tx, two.id)
            replayed = {member.experience_id for member in found if not member.is_new}
            assert replayed < set(first)
            assert {experiences.get(tx, each).dataset_id for each in replayed} == {one.id}
            assert {member.experience_id for member in found if member.is_new} == set(new)
        _end(database, two.id, RunState.REJECTED)
        with database.read() as tx:
            assert {experiences.get(tx, each).state for each in replayed} == {ExperienceState.CONSUMED}
            assert {experiences.get(tx, each).num_rejections for each in replayed} == {0}
            assert {experiences.get(tx, each).num_rejections for each in new} == {1}
        shown = client.experiences.show(next(iter(replayed)))
        assert [(each.dataset_id, each.role) for each in shown.datasets] == [(one.id, "gold"), (two.id, "replay")]


def test_too_few_new_ones_are_refused_with_numbers_and_leave_nothing(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url, min_new=25) as client:
        _gold(client, 20)
        with pytest.raises(Refused, match=r"only \d+ new experiences of support .* wants 25 .*--min-new"):
            client.datasets.assemble(PROFILE)
        assert (client.datasets.list(), set(_states(database))) == ([], {"collected"})
        assert list(client.workspace.datasets_dir.glob("*")) == []
        preview = client.datasets.preview_assembly(PROFILE)
        assert 5 <= preview.num_new < 20
        assert set(_states(database)) == {"collected"}
        with pytest.raises(UsageError, match="no kind 'pairs'"):
            client.datasets.assemble(PROFILE, kind="pairs")  # type: ignore[arg-type]


def test_task_type_size_and_seed_are_honoured_and_told(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        orders, others = _gold(client, 40, task_type="order"), _gold(client, 20, 100, task_type="greeting")
        wishes: Any = {"task_types": ["order"], "max_examples": 12, "min_new": 3}
        one, report = client.datasets.assemble(PROFILE, seed=1, **wishes)
        assert report.mix is not None
        assert (report.mix.policy.task_types, report.mix.num_new) == (("order",), 12)
        assert report.mix.left_out["of another task type"] == 20
        assert all(client.experiences.show(each).dataset_id is None for each in others)
        told = client.workspace.data_dir / one.path / "members.jsonl"
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        assert {line["experience"] for line in lines} <= set(orders)
        assert {line["example"] for line in lines} == {example.id for _, example in _examples(client, one.id)}
        assert all(line["reason"] and line["task_type"] == "order" for line in lines)
        assert client.datasets.verify(one.id).id == one.id
        with told.open("a") as sink:
            sink.write("{}\n")
        with pytest.raises(Exception, match=r"members.jsonl is not what the manifest says"):
            client.datasets.verify(one.id)


def test_what_preparing_refuses_goes_back_with_a_reason_and_others_take_its_place(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url, data={"screens": ["secret"]}, max_examples=10, min_new=5) as client:
        twins = [client.experiences.add(PROFILE, _talk("Hello?", "Hi."), session=name).id for name in "ab"]
        leaked = _corrected(client, 4)
        for each in leaked:
            secret = "The key is ghp_" + "q7Zk2Lw9Xc4Vb1Nm8Rt5Yp3Ds6Fg0HjKaUe2"
            with database.write() as tx:  # as it was stored before the profile asked for the screen
                feedback.add(tx, each, Rating("ann", correction=secret), actor=ACTOR)
        _gold(client, 60)
        dataset, report = client.datasets.assemble(PROFILE, overrides=["experience.mix.replay=0"])
        assert report.mix is not None
        assert report.mix.num_new == 10
        with database.read() as tx:
            inside = {member.experience_id for member in members.of_dataset(tx, dataset.id)}
        assert not inside & set(leaked)
        assert len(inside & set(twins)) < 2
        chosen = [each for each in leaked if "left_out" in {e.action for e in client.experiences.show(each).events}]
        assert chosen
        for each in chosen:
            shown = client.experiences.show(each)
            assert shown.experience.state == "collected"
            (event,) = [event for event in shown.events if event.action == "left_out"]
            assert event.reason == f"not in dataset {dataset.id}: suspect by screen secret"


# --- how a reservation ends ---


@pytest.mark.slow
def test_every_end_of_a_run_does_to_the_reservation_what_the_table_says(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url, min_new=2) as client:
        for number, (end, last) in enumerate(product(sorted(RUN.finished), (True, False))):
            _gold(client, 8, 100 * number, task_type=str(number))
            dataset, _ = client.datasets.assemble(PROFILE, task_types=[str(number)])
            if not last:
                with database.write() as tx:
                    members.reserve_for_run(tx, dataset.id, actor=ACTOR)
                    a_run(tx, RunState.QUEUED, dataset_id=dataset.id)
            _end(database, dataset.id, end)
            effect = effect_of_end(end).data
            expected = "consumed" if effect is DataEffect.CONSUME else "collected" if last else "reserved"
            with database.read() as tx:
                found = [experiences.get(tx, member.experience_id) for member in members.of_dataset(tx, dataset.id)]
            assert {each.state for each in found} == {expected}, (end, last)
            assert {each.dataset_id for each in found} == {None if expected == "collected" else dataset.id}
            assert {each.num_rejections for each in found} == {1 if effect is DataEffect.RELEASE_AND_COUNT else 0}


def test_two_rejections_send_the_batch_to_review_and_no_run_takes_it_again(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 16)
        dataset, _ = client.datasets.assemble(PROFILE)
        for _ in range(2):
            _end(database, dataset.id, RunState.REJECTED)
        with pytest.raises(Refused, match="waits for a review"):
            client.runs.submit(PROFILE, dataset.id)
        with pytest.raises(Refused, match=r"only 0 new .* 16 waiting for a review"):
            client.datasets.assemble(PROFILE)


def test_reservation_without_a_run_ends_after_a_day_and_one_with_a_run_does_not(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 16)
        unused, _ = client.datasets.assemble(PROFILE)
        _gold(client, 16, 100)
        used, _ = client.datasets.assemble(PROFILE)
        run = client.runs.submit(PROFILE, used.id)
        with database.write() as tx:
            assert members.release_unused(tx, actor=ACTOR) == []
            until = datasets.get(tx, unused.id).reserved_until
            assert until is not None
            assert timedelta(hours=23) < until - tx.now <= timedelta(hours=24)
            assert datasets.get(tx, used.id).reserved_until is None
            for each in (unused.id, used.id):
                force(tx, tables.datasets, each, reserved_until=tx.now - timedelta(seconds=1))
        client.system.worker().sweep()
        assert _states(database) == {"collected": 16, "reserved": 16}
        client.runs.cancel(run.id)
        assert _states(database) == {"collected": 32}


def test_run_on_a_released_dataset_reserves_it_again_unless_others_have_it(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 16)
        one, _ = client.datasets.assemble(PROFILE)
        client.runs.cancel(client.runs.submit(PROFILE, one.id).id)
        assert set(_states(database)) == {"collected"}
        again = client.runs.submit(PROFILE, one.id)
        assert set(_states(database)) == {"reserved"}
        client.runs.cancel(again.id)
        two, _ = client.datasets.assemble(PROFILE)
        with pytest.raises(Refused, match=f"are in {two.id} by now"):
            client.runs.retry(again.id)
        with database.read() as tx:
            assert {experiences.get(tx, m.experience_id).dataset_id for m in members.of_dataset(tx, two.id)} == {two.id}


def test_run_without_data_assembles_once_per_key(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 16)
        first = client.runs.submit(PROFILE, idempotency_key="k")
        again = client.runs.submit(PROFILE, idempotency_key="k")
        assert (again.id, again.dataset_id, again.is_new) == (first.id, first.dataset_id, False)
        assert _states(database) == {"reserved": 16}


@pytest.mark.slow
def test_assemblers_at_once_never_share_an_experience(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url, replay=0.0, max_examples=8, min_eval_examples=2) as client:
        _gold(client, 60)
        num = 4
        begin = threading.Barrier(num)

        def assemble(number: int) -> str | None:
            begin.wait()
            try:
                return client.datasets.assemble(PROFILE)[0].id
            except Refused:
                return None

        with ThreadPoolExecutor(num) as pool:
            made = [each for each in pool.map(assemble, range(num)) if each is not None]
        assert len(made) >= 2
        with database.read() as tx:
            found = [member for each in made for member in members.of_dataset(tx, each)]
            assert len({member.experience_id for member in found}) == len(found)
            for member in found:
                assert experiences.get(tx, member.experience_id).dataset_id == member.dataset_id
        assert _states(database)["reserved"] == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_killed_assembler_leaves_no_reservation_without_a_dataset_and_no_folder_for_ever(
    tmp_path: Path, store_url: str, database: Database, num: int
) -> None:
    client = _client(tmp_path, store_url)
    _gold(client, 30)
    acknowledged, rng = tmp_path / "acknowledged", random.Random(7)
    for _ in range(num):
        process = start(assemble_for_ever, str(client.workspace.root), str(acknowledged))
        kill_amid(process, acknowledged, rng, within_s=0.4)
        process.join()
        _check_reservations(client, database)
        with database.write() as tx:  # the day after
            reserved = sa.select(tables.experiences.c.dataset_id).where(tables.experiences.c.state == "reserved")
            for dataset_id in set(tx.conn.execute(reserved).scalars()):
                force(tx, tables.datasets, dataset_id, reserved_until=tx.now)
        for run in client.runs.list(limit=100):
            if run.finished_at is None:
                client.runs.cancel(run.id)
        with database.write() as tx:
            members.release_unused(tx, actor=ACTOR)
        assert set(_states(database)) == {"collected"}
    client.close()


def _check_reservations(client: Client, database: Database) -> None:
    """Every reservation has its dataset, members and folder; a folder without a row goes with the next sweep."""
    folder = client.workspace.datasets_dir
    for mark in folder.glob(".*.unrecorded"):
        os.utime(mark, (0, 0))
    remove_unrecorded(database, client.workspace)
    with database.read() as tx:
        known = {dataset.id for dataset in newest(tx, limit=10_000)}
        table = tables.experiences
        for row in tx.all(sa.select(table).where(table.c.state == "reserved")):
            assert row["dataset_id"] in {member.dataset_id for member in members.of_experience(tx, row["id"])}
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == known
    client.datasets.verify(client.datasets.list()[0].id)
    assert list(folder.glob(".*.unrecorded")) == []


@pytest.mark.slow
def test_what_is_rated_down_while_a_dataset_is_assembled_is_in_only_if_it_was_reserved_before(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url, min_new=1) as client:
        ids = _gold(client, 40)
        is_over = threading.Event()

        def rate() -> None:
            for each in ids:
                client.feedback.add(each, "down", rater="ann")
            is_over.set()

        rater = threading.Thread(target=rate)
        rater.start()
        made = []
        while not is_over.is_set():
            with contextlib.suppress(Refused, DataError):  # too much has changed, or too little is left
                made.append(client.datasets.assemble(PROFILE)[0].id)
                with database.write() as tx:
                    members.release_reservation(tx, made[-1], actor=ACTOR, reason="next")
        rater.join()
        with database.read() as tx:
            found = [member for each in made for member in members.of_dataset(tx, each)]
            for member in found:
                history = events.of_entity(tx, "experience", member.experience_id)
                reserved = next(e.seq for e in history if e.reason == f"dataset {member.dataset_id}")
                assert reserved < next(e.seq for e in history if e.action == "classified")


def test_what_is_rated_down_between_its_choice_and_the_reading_of_its_text_is_not_trained_as_gold(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url, min_new=1) as client:
        [rated, silent] = _gold(client, 2)
        with database.read() as tx:
            chosen = [
                MixCandidate(each.id, each.seq, each.class_name, each.correction is not None, False, Split.TRAIN)
                for each in candidates.page(tx, PROFILE, 0, 10)
            ]
        client.feedback.add(rated, "down", rater="ann")
        with database.read() as tx:
            stored = candidates.by_ids(tx, [rated, silent])
        refuse_other_than_chosen([each for each in chosen if each.id == silent], stored)
        with pytest.raises(NotReservable, match=f"experience {rated} changed"):
            refuse_other_than_chosen(chosen, stored)


def test_preview_says_what_the_real_thing_refuses(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        _gold(client, 5)
        told = client.datasets.preview_assembly(PROFILE, min_new=20).refusal
        assert told is not None
        assert "experience.mix.min_new" in told
        with pytest.raises(Refused) as refused:
            client.datasets.assemble(PROFILE, min_new=20)
        assert refused.value.message == told
        _gold(client, 40, first=5)
        assert client.datasets.preview_assembly(PROFILE).refusal is None


@pytest.mark.slow
def test_held_out_ones_that_others_have_reserved_are_named_as_the_reason(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, max_examples=10, min_eval_examples=50) as client:
        _gold(client, 100)
        client.datasets.assemble(PROFILE)  # takes every held-out one beside ten to train on
        told = client.datasets.preview_assembly(PROFILE).refusal
        with pytest.raises(Refused, match="held out is free") as refused:
            client.datasets.assemble(PROFILE)
        assert refused.value.message == told
        assert "reserved by another dataset" in refused.value.message
        assert "heldout_share" not in refused.value.message
