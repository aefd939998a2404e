"""Forgetting through the real client, on both databases: no text is left anywhere, and nothing brings it back."""

from __future__ import annotations

import json
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from support import tables
from support.forgotten import PARTED, SECRET, a_dataset_of, add, as_member, everything_on_disk, everything_stored
from support.rows import ACTOR, a_claimed_run, a_run, an_adapter, force
from support.workspaces import PROFILE, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import InvalidTransition, NotFound, Refused, UsageError
from tunesmith.core.files import json_lines, read_manifest
from tunesmith.datasets.example import Split
from tunesmith.deployment import queries as deployments
from tunesmith.experience.forgetting import forget
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.queries import experiences, members
from tunesmith.models import queries as adapters
from tunesmith.models.rules import AdapterState
from tunesmith.orchestration import lifecycle
from tunesmith.programs.stage import Looked, NotFlipped, StageEnd, Trained
from tunesmith.runs.queries import requests, runs, tasks
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.request import RequestKind
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import ErrorClass, TaskKind
from tunesmith.runs.spec import AdapterRef
from tunesmith.store import events
from tunesmith.store.database import Database


def _client(folder: Path, store_url: str) -> Client:
    return a_workspace(folder, profile=PARTED, settings={"store": {"url": store_url}})


def _full(client: Client, database: Database, **about: Any) -> str:
    """An experience with text in every place that can hold some."""
    known = add(client, f"my {SECRET} question", f"my {SECRET} answer", reference=f"{SECRET} reference",
                session=f"{SECRET}-session", source=f"{SECRET}-source", key=f"{SECRET}-key",
                task_type=f"{SECRET}-type", template=f"{SECRET}-template", **about)  # fmt: skip
    client.feedback.add(known, "down", comment=f"{SECRET} comment", correction=f"{SECRET} correction")
    client.feedback.add(known, rater="bob", comment=f"only a {SECRET} comment")
    with database.write() as tx:
        tx.run(
            tables.corrections.insert().values(
                id="co-1", experience_id=known, profile=PROFILE, number=1, teacher="t", state="accepted",
                reason=f"{SECRET} reason", answer=f"{SECRET} teacher", findings={"length": {"reason": SECRET}},
                created_at=tx.now, **_also(tables.corrections),
            )
        )  # fmt: skip
    client.experiences.review([known], "reject", reason=f"{SECRET} review")
    client.experiences.review([known], "accept", reason=f"{SECRET} review again")
    return known


def _also(table: sa.Table) -> dict[str, Any]:
    return {"counts": True} if "counts" in table.c else {}


def test_nothing_of_it_is_left_in_the_store(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        known, other = _full(client, database), add(client, "another question", "another answer")
        assert SECRET in everything_stored(database)
        told = client.experiences.forget([known], reason="asked by the person")
        assert (told.num_new, told.states, told.datasets) == (1, {"collected": 1}, ())
        assert SECRET not in everything_stored(database)
        shown = client.experiences.show(known)
        assert (shown.experience.state, shown.messages, shown.experience.class_name) == ("forgotten", [], "forgotten")
        assert [(e.action, e.actor, e.reason) for e in shown.events if e.new_state == "forgotten"] == [
            ("moved", ACTOR, "asked by the person")
        ]
        assert client.experiences.in_review() == []
        assert [each.id for each in client.experiences.list(state="collected")] == [other]
        assert client.experiences.stats()[0].classes == {"gold": 1}
        assert client.experiences.forget([known], reason="again").num_new == 0


def test_sqlite_file_holds_no_byte_of_it_afterwards(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        known = add(client, f"my {SECRET} question " * 400, f"my {SECRET} answer " * 400, session=f"{SECRET}-s")
        for number in range(20):
            client.feedback.add(known, "up", rater=f"r{number}", comment=f"{SECRET} {number}")  # rows that move about
        files = [path for path in client.workspace.data_dir.glob("store.db*") if path.is_file()]
        assert any(SECRET.encode() in path.read_bytes() for path in files)
        client.experiences.forget([known], reason="asked")
        files = [path for path in client.workspace.data_dir.glob("store.db*") if path.is_file()]
        assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_sqlite_file_is_rewritten_so_that_no_page_keeps_a_copy(tmp_path: Path) -> None:
    """Rows that move to other pages leave copies in these, which no deletion turns into zeros."""
    with a_workspace(tmp_path) as client:
        database, file = client._session.database, client.workspace.data_dir / "store.db"
        add(client, "the first question", "Yes.")
        talks = [[{"role": "user", "content": f"{SECRET}-{n:03} " + "q" * (n * 13 % 700)}] for n in range(400)]
        with database.write() as tx:
            ids = [experiences.add(tx, PROFILE, f"{n}", talk, actor=ACTOR)[0] for n, talk in enumerate(talks)]
        for number in range(3):  # rows that grow and part their pages, as when they are reserved
            with database.write() as tx:
                for known in ids[number::4]:
                    force(tx, tables.experiences, known, task_type="t" * (20 + 40 * number))
        gone = [n for n in range(400) if n // 20 % 2]
        client.experiences.forget([ids[n] for n in gone], reason="asked")
        stored = b"".join(path.read_bytes() for path in client.workspace.data_dir.glob("store.db*") if path.is_file())
        assert [n for n in gone if f"{SECRET}-{n:03}".encode() in stored] == []
        assert f"{SECRET}-000".encode() in stored
        with closing(sqlite3.connect(file)) as reader:
            assert reader.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_sqlite_file_that_somebody_reads_is_rewritten_by_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "_TIMEOUT_S", 0.05)
    with a_workspace(tmp_path) as client:
        database = client._session.database
        known = add(client, f"{SECRET} question " * 400, "Yes.")
        with database.read() as tx:
            experiences.get(tx, known)
            assert client.experiences.forget([known], reason="asked").store_waits
        with database.read() as tx:
            assert erasures.needs_vacuum(tx)
        client.system.worker().sweep()
        with database.read() as tx:
            assert not erasures.needs_vacuum(tx)
        stored = b"".join(path.read_bytes() for path in client.workspace.data_dir.glob("store.db*") if path.is_file())
        assert SECRET.encode() not in stored
        assert client.experiences.forget([known], reason="again").store_waits == ""


def test_sqlite_file_that_is_too_large_is_not_rewritten_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "_REWRITTEN_BYTES", 1000)
    with a_workspace(tmp_path) as client:
        known = add(client, "a question", "Yes.")
        assert "GiB" in client.experiences.forget([known], reason="asked").store_waits


def test_forgotten_experience_is_found_by_the_key_it_had(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        known = add(client, "a question", "Yes.", key="call 17")
        client.experiences.forget([f"{PROFILE}:call 17"], reason="asked")
        assert client.experiences.show(f"{PROFILE}:call 17").experience.id == known
        assert client.experiences.forget([f"{PROFILE}:call 17"], reason="again").num_new == 0
        with pytest.raises(NotFound, match="no experience with the key"):
            client.experiences.show(f"{PROFILE}:call 18")


def test_same_interaction_added_imported_or_captured_again_stays_forgotten(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    file = tmp_path / "talk.jsonl"
    row = {"prompt": f"{SECRET}?", "completion": "Yes.", "label": True}
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "prompt": "Other?"}) + "\n")
    with _client(tmp_path, store_url) as client:
        client.experiences.import_files(PROFILE, [file])
        imported = next(each.id for each in client.experiences.list() if SECRET in each.question)
        named, unnamed = add(client, f"{SECRET} named", "Yes.", key="call 17"), add(client, f"{SECRET} plain", "Yes.")
        client.experiences.forget([imported, named, unnamed], reason="asked")
        again = client.experiences.import_files(PROFILE, [file])
        assert (again.num_new, again.num_known, again.num_refused) == (0, 2, 0)
        assert add(client, f"{SECRET} named", "Yes.", key="call 17") == named
        assert add(client, f"{SECRET} plain", "Yes.") == unnamed
        talk = [{"role": "user", "content": f"{SECRET} named"}, {"role": "assistant", "content": "Yes."}]
        client.capture(PROFILE, talk, key="call 17")
        assert client.capture.flush().num_dropped == 0
        assert SECRET not in everything_stored(database)
        assert "call 17" not in everything_stored(database)
        with pytest.raises(Refused, match="was forgotten"):
            client.feedback.add(named, "up")


def test_complaint_that_became_a_comment_on_the_answer_before_goes_too(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        first = add(client, "Send it", "Sent.", session="s")
        second = add(client, f"No, that's wrong, {SECRET}", "Sorry.", session="s")
        assert SECRET in (client.experiences.show(first).feedback[0].comment or "")
        told = client.experiences.forget([second], reason="asked")
        assert told.num_going_on == 1  # the other one of the session is named to the person
        assert SECRET not in everything_stored(database)
        assert client.experiences.show(first).feedback[0].value == 0.0  # the hint stays


def test_by_session_source_and_key(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        ids = [add(client, f"question {n}", "Yes.", session="s" if n < 2 else "t", key=f"key {n}") for n in range(4)]
        assert client.experiences.preview_forget(profile=PROFILE, session="s").ids == tuple(ids[:2])
        assert client.experiences.forget(profile=PROFILE, session="s", reason="x").num_new == 2
        assert client.experiences.forget(profile=PROFILE, key="key 2", reason="x").ids == (ids[2],)
        assert client.experiences.forget(profile=PROFILE, key="key 2", reason="x").num_new == 0
        assert len(client.experiences.preview_forget(profile=PROFILE, source="api").ids) == 1
        for call, error in [
            ({"profile": PROFILE, "session": "nobody's"}, NotFound), ({"session": "s"}, UsageError), ({}, UsageError),
            ({"profile": PROFILE, "session": "s", "key": "k"}, UsageError), ({"profile": PROFILE, "x": ""}, UsageError),
        ]:  # fmt: skip
            with pytest.raises(error):
                client.experiences.preview_forget(**call)
        with pytest.raises(UsageError, match="say why"):
            client.experiences.forget([ids[3]], reason="")


@pytest.mark.parametrize("split", list(Split))
def test_datasets_that_hold_it_are_rewritten_with_a_history(
    tmp_path: Path, store_url: str, database: Database, split: Split
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        before = client.datasets.show(dataset)[0]
        example = next(each for each in examples[split])
        known = as_member(client, database, dataset, example, split)
        with database.write() as tx:
            old_run = a_run(tx, RunState.COMPLETED, dataset_id=dataset)
        told = client.experiences.forget([known], reason="asked")
        assert [(each.dataset_id, each.state) for each in told.outcomes] == [(dataset, "done")]
        assert told.datasets[0].splits == {split.value: 1}
        after, report = client.datasets.show(dataset)
        assert after.fingerprint != before.fingerprint
        assert report.earlier_fingerprints == (before.fingerprint,)
        assert after.counts == {**before.counts, split.value: before.counts[split.value] - 1}
        client.datasets.verify(dataset)
        marked = example.messages[0]["content"]
        assert marked.encode() not in everything_on_disk(client.workspace.datasets_dir)
        assert marked not in everything_stored(database)
        with database.read() as tx:
            (erasure,) = erasures.of_dataset(tx, dataset)
        assert (erasure.old_fingerprint, erasure.new_fingerprint) == (before.fingerprint, after.fingerprint)
        assert len(list(client.workspace.datasets_dir.glob(f"{dataset}*"))) == 1
        run = client.runs.submit(PROFILE, dataset)  # trained on as before
        assert client.runs.show(run.id).num_erased == 0
        assert client.runs.show(old_run.id).num_erased == 1  # the run of that time explains itself


def test_rows_kept_aside_go_with_their_excerpts(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, _ = a_dataset_of(client, 40, suspects=[f"{SECRET} one@somebody.org?", "two@somebody.org?"])
        known = add(client, f"{SECRET} one@somebody.org?", "It is so.")
        with database.write() as tx:
            reason = f"not in dataset {dataset}: suspect by screen email"
            events.record(tx, "experience", known, "left_out", actor=ACTOR, reason=reason)
        assert client.datasets.show(dataset)[1].num_quarantined == 2
        told = client.experiences.forget([known], reason="asked")
        assert [each.state for each in told.outcomes] == ["done"]
        report = client.datasets.show(dataset)[1]
        assert (report.num_quarantined, report.quarantine[0].num, len(report.quarantine[0].first)) == (1, 1, 1)
        assert SECRET.encode() not in everything_on_disk(client.workspace.datasets_dir)
        assert b"two@somebody.org" in everything_on_disk(client.workspace.datasets_dir)


@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.TRAINING, RunState.PAUSED, RunState.EVALUATING])
def test_erasure_of_a_held_out_case_waits_for_a_run_that_reads_the_dataset(
    tmp_path: Path, store_url: str, database: Database, state: RunState
) -> None:
    """A held-out case is never learnt: the run goes on, and the text goes when it has ended."""
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.HELDOUT][0], Split.HELDOUT)
        with database.write() as tx:
            run = a_run(tx, state, dataset_id=dataset, profile=PROFILE)
        told = client.experiences.forget([known], reason="asked")
        assert told.ends == ()
        assert [(outcome.state, outcome.runs) for outcome in told.outcomes] == [("waits", (run.id,))]
        client.datasets.verify(dataset)  # the run reads what it was given
        with pytest.raises(Refused, match="its text is being removed"):
            client.runs.submit(PROFILE, dataset)
        waiting = [item for item in client.system.inbox() if item.kind == "erasure"]
        assert [item.id for item in waiting] == [dataset]
        with database.write() as tx:
            force(tx, tables.runs, run.id, state=RunState.CANCELLED, finished_at=tx.now)
        client.system.worker().sweep()
        assert [item.id for item in client.system.inbox() if item.kind == "erasure"] == []
        assert client.datasets.show(dataset)[1].earlier_fingerprints
        client.datasets.verify(dataset)


@pytest.mark.parametrize("split", [Split.TRAIN, Split.VALIDATION])
@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.PAUSED, RunState.HELD, RunState.EVALUATING])
def test_run_that_nobody_works_on_ends_when_what_it_learns_from_is_forgotten(
    tmp_path: Path, store_url: str, database: Database, state: RunState, split: Split
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[split][0], split)
        with database.write() as tx:
            run = a_run(tx, state, dataset_id=dataset, profile=PROFILE)
            if state is RunState.QUEUED:
                tasks.add(tx, TaskKind.TRAIN, actor=ACTOR, run_id=run.id, profile=PROFILE, priority=1)
        assert client.experiences.preview_forget([known]).ends == (run.id,)
        told = client.experiences.forget([known], reason="asked")
        assert (told.ends, [each.state for each in told.outcomes]) == ((run.id,), ["done"])
        ended = client.runs.show(run.id)
        assert ended.run.state == "cancelled"
        assert f"tunesmith run retry {run.id}" in ended.run.reason
        with database.read() as tx:
            assert tasks.open_of_run(tx, run.id) is None


@pytest.mark.parametrize(
    ("state", "kind", "fact"),
    [
        (RunState.TRAINING, TaskKind.TRAIN, Trained("a", "d" * 64, {}, stopped_early=False)),
        (RunState.TRAINING, TaskKind.TRAIN, None),
        (RunState.SHADOWING, TaskKind.WATCH, Looked("passed", "fine")),
        (RunState.DEPLOYING, TaskKind.DEPLOY, NotFlipped("later", "later")),
    ],
)
def test_end_of_an_attempt_that_learnt_what_was_forgotten_is_not_believed(
    tmp_path: Path, store_url: str, database: Database, state: RunState, kind: TaskKind, fact: Any
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            run, claim = a_claimed_run(tx, state, kind, dataset_id=dataset, profile=PROFILE)
        told = client.experiences.forget([known], reason="asked")
        assert told.ends == (run.id,)
        with database.read() as tx:
            assert [each.kind for each in requests.unanswered(tx, run.id)] == [RequestKind.CANCEL]
        end = StageEnd.succeeded(fact) if fact is not None else StageEnd.failed(ErrorClass.TRANSIENT, "a hiccup")
        with database.write() as tx:
            lifecycle.settle(tx, claim, end, actor=ACTOR)
        with database.read() as tx:
            ended = runs.get(tx, run.id)
            assert ended.state is RunState.CANCELLED
            assert "run retry" in ended.reason
            assert adapters.live(tx, PROFILE) is None
            assert tasks.open_of_run(tx, run.id) is None
        client.system.worker().sweep()
        assert [item for item in client.system.inbox() if item.kind == "erasure"] == []


def test_adapter_that_learnt_what_was_forgotten_cannot_go_live(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            run = a_run(tx, RunState.COMPLETED, dataset_id=dataset, profile=PROFILE)
            adapter = an_adapter(tx, run_id=run.id)
        client.experiences.forget([known], reason="asked")
        with pytest.raises(Refused, match="cannot go live: an experience in its dataset"), database.write() as tx:
            deployments.flip(tx, adapter, baseline="base", targets=[], actor=ACTOR, reason="test")
        with database.write() as tx:  # a run on what is left has learnt nothing of it
            after = a_run(tx, RunState.COMPLETED, dataset_id=dataset, profile=PROFILE)
            clean = an_adapter(tx, run_id=after.id)
            deployments.flip(tx, clean, baseline="base", targets=[], actor=ACTOR, reason="test")


def test_sweep_ends_the_runs_of_somebody_who_was_killed_after_forgetting(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            run = a_run(tx, RunState.PAUSED, dataset_id=dataset, profile=PROFILE)
        forget.forget(database, [known], actor=ACTOR, reason="asked")  # and killed here
        client.system.worker().sweep()
        assert client.runs.show(run.id).run.state == "cancelled"
        assert [item for item in client.system.inbox() if item.kind == "erasure"] == []


def test_stop_runs_cancels_what_is_judged_on_it(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.HELDOUT][0], Split.HELDOUT)
        with database.write() as tx:
            run = a_run(tx, RunState.QUEUED, dataset_id=dataset, profile=PROFILE)
            tasks.add(tx, TaskKind.TRAIN, actor=ACTOR, run_id=run.id, profile=PROFILE, priority=1)
        told = client.experiences.forget([known], reason="asked", stop_runs=True)
        assert [each.state for each in told.outcomes] == ["done"]
        with database.read() as tx:
            assert runs.get(tx, run.id).state is RunState.CANCELLED


@pytest.mark.parametrize("state", [RunState.WATCHING, RunState.DEPLOYED])
def test_run_that_is_live_is_neither_ended_nor_waited_for(
    tmp_path: Path, store_url: str, database: Database, state: RunState
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            run = a_run(tx, state, dataset_id=dataset, profile=PROFILE)
        told = client.experiences.forget([known], reason="asked")
        assert (told.ends, [each.state for each in told.outcomes]) == ((), ["done"])
        assert client.runs.show(run.id).run.state == state


def test_adapters_that_contain_it_are_named_with_their_descendants(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        judged, _ = a_dataset_of(client, 41)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        as_member(client, database, judged, examples[Split.HELDOUT][0], Split.HELDOUT, experience_id=known)
        with database.write() as tx:
            first = an_adapter(tx, run_id=a_run(tx, RunState.DEPLOYED, dataset_id=dataset).id)
            start = AdapterRef(id=first.id, path="/x", digest="d")
            second = an_adapter(tx, AdapterState.LIVE, run_id=a_run(tx, RunState.DEPLOYED, start=start).id)
            third = an_adapter(tx, run_id=a_run(tx, RunState.REJECTED, dataset_id=judged).id)
            an_adapter(tx)
        found = client.experiences.preview_forget([known]).adapters
        assert [(each.name, each.contains) for each in found] == [
            (first.name, True), (second.name, True), (third.name, False)
        ]  # fmt: skip
        assert found[1].how == f"starts from {first.name}"
        assert client.experiences.forget([known], reason="asked").adapters == found


@pytest.mark.parametrize("state", ["reserved", "consumed"])
def test_reserved_and_consumed_ones_can_be_forgotten(
    tmp_path: Path, store_url: str, database: Database, state: str
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        with database.write() as tx:
            force(tx, tables.experiences, known, state=state, dataset_id=dataset)
        assert client.experiences.forget([known], reason="asked").states == {state: 1}
        with database.read() as tx:
            assert experiences.get(tx, known).dataset_id is None


def test_held_out_case_goes_and_that_of_another_with_the_same_prompt_comes_back(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40, twice=True)
        groups = [each.group for each in examples[Split.HELDOUT]]
        pair = [each for each in examples[Split.HELDOUT] if groups.count(each.group) == 2][:2]
        known = as_member(client, database, dataset, pair[1], Split.HELDOUT)
        with database.read() as tx:
            num = len(tx.all(sa.select(tables.heldout_cases)))
        client.experiences.forget([known], reason="asked")
        with database.read() as tx:
            rows = tx.all(sa.select(tables.heldout_cases))
        assert len(rows) == num
        (case,) = [row for row in rows if row["case_id"] == pair[0].group]
        assert case["messages"][-1]["content"] == pair[0].messages[-1]["content"]


def test_copies_of_cases_and_samples_in_the_folders_of_attempts_go_too(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 60)
        held, shown = examples[Split.HELDOUT][0], examples[Split.VALIDATION][0]
        with database.write() as tx:
            run = a_run(tx, RunState.COMPLETED, dataset_id=dataset)
        folder = client.workspace.runs_dir / run.id / "at-1"
        folder.mkdir(parents=True)
        other = {"id": "other", "messages": ["two\u2028lines"]}  # the end of a line for a str, not for JSONL
        cases = [{"id": held.group, "messages": [held.messages[0]["content"]]}, other]
        (folder / "cases.jsonl").write_text("".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases))
        sample = {"prompt": shown.messages[0]["content"], "expected": "x", "answer": "y"}
        told = [{"seq": 1, "type": "log"}, {"seq": 2, "type": "validation", "samples": [sample], "values": {}}]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
        ids = [
            as_member(client, database, dataset, held, Split.HELDOUT),
            as_member(client, database, dataset, shown, Split.VALIDATION),
        ]
        client.experiences.forget(ids, reason="asked")
        assert json_lines((folder / "cases.jsonl").read_bytes()) == [other]
        left = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert left == [told[0], {**told[1], "samples": []}]


def test_damaged_dataset_is_not_made_to_look_whole_and_waits_in_the_inbox(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 40)
        known = as_member(client, database, dataset, examples[Split.TRAIN][0], Split.TRAIN)
        folder = client.workspace.data_dir / client.datasets.show(dataset)[0].path
        (folder / "validation.parquet").write_bytes(b"broken")
        (outcome,) = client.experiences.forget([known], reason="asked").outcomes
        assert outcome.state == "failed"
        assert [item.kind for item in client.system.inbox()] == ["erasure"]
        shutil.rmtree(folder)  # as the inbox says
        done = forget.finish(database, client.workspace, actor=ACTOR)
        assert [each.state for each in done] == ["done"]


def test_all_examples_of_a_dataset_can_be_forgotten(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        dataset, examples = a_dataset_of(client, 20)
        ids = [
            as_member(client, database, dataset, example, split)
            for split, found in examples.items()
            for example in found
        ]
        client.experiences.forget(ids, reason="asked")
        shown, report = client.datasets.show(dataset)
        assert (shown.counts, report.lengths) == ({"train": 0, "validation": 0, "heldout": 0}, ())
        client.datasets.verify(dataset)
        assert read_manifest(client.workspace.data_dir / shown.path).meta["mean_score"] == 0.0


def _many(client: Client, num: int) -> list[str]:
    return [add(client, f"Where does order {n} go, and when?", f"Order {n} goes to place {n * 7}.") for n in range(num)]


@pytest.mark.slow
def test_what_was_assembled_is_taken_out_and_never_chosen_again(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        ids = _many(client, 80)
        reviewed = add(client, f"Mail {SECRET}@somebody.org about order 90, please", "Order 90 is mailed.")
        client.experiences.review([reviewed], "accept", reason="they agreed")
        dataset, report = client.datasets.assemble(PROFILE, min_new=10)
        with database.read() as tx:
            held = {member.experience_id: member for member in members.of_dataset(tx, dataset.id)}
        assert reviewed in held  # accepted means trained: the same screen does not stop it again
        assert report.num_quarantined == 0
        trained = next(each for each in ids if each in held and held[each].split is Split.TRAIN)
        told = client.experiences.forget([trained, reviewed], reason="asked")
        assert [each.state for each in told.outcomes] == ["done"]
        client.datasets.verify(dataset.id)
        left = everything_on_disk(client.workspace.datasets_dir)
        assert SECRET.encode() not in left
        assert trained.encode() not in left
        assert sum(client.datasets.show(dataset.id)[0].counts.values()) == sum(dataset.counts.values()) - 2
        with database.write() as tx:
            members.release_reservation(tx, dataset.id, actor=ACTOR, reason="test")
        again, _ = client.datasets.assemble(PROFILE, min_new=10)
        with database.read() as tx:
            assert {trained, reviewed}.isdisjoint(each.experience_id for each in members.of_dataset(tx, again.id))


@pytest.mark.slow
def test_many_that_forget_the_same_at_once_forget_it_once(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url) as client:
        ids = _many(client, 30)
        client.datasets.assemble(PROFILE, min_new=5)
        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(lambda n: client.experiences.forget(ids[n : n + 20], reason="asked"), (0, 5, 10, 0)))
        assert sum(each.num_new for each in told) == 30
        client.system.worker().sweep()
        assert client.system.inbox() == []
        assert client.experiences.stats()[0].states == {"forgotten": 30}


@pytest.mark.slow
def test_forgetting_while_runs_end_loses_nothing_and_never_waits_in_a_circle(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        ids = _many(client, 60)
        dataset, _ = client.datasets.assemble(PROFILE, min_new=5)
        with database.write() as tx:
            pending = [a_run(tx, RunState.EVALUATING, dataset_id=dataset.id) for _ in range(6)]

        def end(run: Run) -> None:
            with suppress(InvalidTransition), database.write() as tx:  # forgetting may have ended it before
                lifecycle.finish(tx, run, RunState.COMPLETED, actor=ACTOR, reason="test")

        with ThreadPoolExecutor(8) as pool:
            ended = pool.map(end, pending)
            gone = pool.map(lambda each: client.experiences.forget([each], reason="asked").num_new, ids[:24])
            assert (len(list(ended)), sum(gone)) == (6, 24)
        client.system.worker().sweep()
        assert client.system.inbox() == []
        with database.read() as tx:
            states = [experiences.get(tx, each).state.value for each in ids]
        assert states[:24] == ["forgotten"] * 24
        assert "reserved" not in states[24:]
        client.datasets.verify(dataset.id)


@pytest.mark.slow
def test_run_on_a_dataset_of_which_everything_to_train_on_was_forgotten_is_refused(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        ids = [add(client, f"Tell me about the town {n}", f"The town {n} is old.") for n in range(20)]
        dataset, _ = client.datasets.assemble(PROFILE, min_new=2)
        with database.read() as tx:
            trained = [each.experience_id for each in members.of_dataset(tx, dataset.id) if each.split is Split.TRAIN]
        assert set(trained) < set(ids)
        client.experiences.forget(trained, reason="asked")
        with pytest.raises(Refused, match="nothing left to train on"):
            client.runs.submit(PROFILE, dataset.id)
        assert client.runs.list() == []


def test_forgotten_one_has_no_class_and_no_rating_in_any_listing(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        known = _full(client, database)
        client.experiences.forget([known], reason="asked")
        (shown,) = client.experiences.list(profile=PROFILE)
        assert (shown.class_name, shown.state, shown.feedback.num) == ("forgotten", "forgotten", 0)
        assert client.experiences.list(profile=PROFILE, class_name="quarantined") == []
        (stats,) = client.experiences.stats(PROFILE)
        assert (stats.num, stats.classes, stats.states, stats.num_rated) == (0, {}, {"forgotten": 1}, 0)
        assert stats.num_corrected == 0
        assert client.experiences.show(known).experience.class_name == "forgotten"
