"""A run that trains, or may yet, decides how much is held out; later that changes for new prompts only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import tables
from support.forgotten import add
from support.rows import WORKER, force
from support.workspaces import PROFILE, a_profile, a_workspace
from tunesmith.client import Client
from tunesmith.core.errors import LockedError, Refused, UsageError
from tunesmith.datasets.example import Split
from tunesmith.datasets.reading import read_split
from tunesmith.runs.queries import tasks
from tunesmith.runs.rules.run import RunState
from tunesmith.runs.rules.task import TaskKind
from tunesmith.store.database import Database

MIX = {"experience": {"mix": {"min_new": 5}}}


def _client(folder: Path, store_url: str, share: float) -> Client:
    return a_workspace(folder, profile=_with(share), settings={"store": {"url": store_url}})


def _with(share: float) -> dict[str, Any]:
    return {"data": {"heldout_share": share}, **MIX}


def _set_share(client: Client, share: float) -> None:
    a_profile(client.workspace.root, **_with(share))


def _capture(client: Client, num: int, first: int = 0) -> None:
    for n in range(first, first + num):
        add(client, f"Where does order {n} go, and when?", f"Order {n} goes to place {n * 7}.")


def _rows(client: Client, name: str, numbers: range) -> Path:
    file = client.workspace.root / name
    rows = [{"prompt": f"Question number {n}", "completion": f"Answer {n}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _groups(client: Client, path: str) -> dict[Split, set[str]]:
    folder = client.workspace.data_dir / path
    return {split: {example.group for example in read_split(folder, split)} for split in Split}


def test_share_may_change_until_a_run_trains(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, 0.1) as client:
        _capture(client, 60)  # the first of them locks the base's facts
        client.datasets.assemble(PROFILE)
        client.datasets.prepare(PROFILE, [_rows(client, "early.jsonl", range(100))])
        _set_share(client, 0.4)
        client.profiles.check(PROFILE)
        late, _ = client.datasets.prepare(PROFILE, [_rows(client, "early.jsonl", range(100))])
        assert late.counts["heldout"] > 30


def _submit(client: Client) -> str:
    return client.runs.submit(PROFILE).id


def test_first_run_decides_the_share(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, 0.1) as client:
        _capture(client, 60)
        assert not client.profiles.check(PROFILE).lock.is_split_decided
        _set_share(client, 0.4)
        _submit(client)
        locked = client.profiles.lock(PROFILE)
        assert (locked.heldout_share, locked.is_split_decided) == (0.4, True)
        _set_share(client, 0.2)
        with pytest.raises(LockedError, match=rf"locked 0.4, now 0.2.*profile lock {PROFILE} --new-split --reason"):
            client.profiles.check(PROFILE)


def _end(database: Database, run_id: str, state: RunState) -> None:
    """As it stands after a worker has trained it: with an attempt."""
    with database.write() as tx:
        claim = tasks.claim(tx, WORKER, [TaskKind.TRAIN], 60.0)
        assert claim is not None
        assert claim.task.run_id == run_id
        force(tx, tables.runs, run_id, state=state, finished_at=tx.now)


def _held_out(client: Client) -> int:
    dataset, _ = client.datasets.prepare(PROFILE, [_rows(client, "all.jsonl", range(200))])
    return dataset.counts["heldout"]


def test_run_that_is_cancelled_before_it_trains_decides_nothing(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, 0.1) as client:
        run = client.runs.submit(PROFILE, [_rows(client, "all.jsonl", range(200))])
        _set_share(client, 0.4)
        with pytest.raises(LockedError, match="has trained on this split, or still may"):
            client.profiles.check(PROFILE)
        client.runs.cancel(run.id)
        assert not client.profiles.check(PROFILE).lock.is_split_decided
        assert _held_out(client) > 60, "every prompt follows the new share: none was trained on"
        again = client.runs.submit(PROFILE, [_rows(client, "all.jsonl", range(200))])
        assert client.profiles.check(PROFILE).lock.is_split_decided
        assert client.datasets.show(again.dataset_id)[0].counts["heldout"] > 60


def test_prompts_that_a_cancelled_run_held_out_may_be_trained(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, 0.4) as client:
        _capture(client, 80)
        first = client.runs.submit(PROFILE)
        client.runs.cancel(first.id)
        _set_share(client, 0.1)
        second, report = client.datasets.assemble(PROFILE, max_examples=1000)
        before = _groups(client, client.datasets.show(first.dataset_id)[0].path)
        assert before[Split.HELDOUT] & _groups(client, second.path)[Split.TRAIN]
        assert report.mix is not None
        assert not any("held out before" in why for why in report.mix.left_out)


@pytest.mark.parametrize("state", [RunState.CANCELLED, RunState.FAILED, RunState.REJECTED])
def test_run_that_began_to_train_decides_however_it_ended(
    tmp_path: Path, store_url: str, database: Database, state: RunState
) -> None:
    with _client(tmp_path, store_url, 0.1) as client:
        run = client.runs.submit(PROFILE, [_rows(client, "all.jsonl", range(200))])
        _end(database, run.id, state)
        _set_share(client, 0.4)
        with pytest.raises(LockedError, match="has trained on this split"):
            client.profiles.check(PROFILE)


def test_datasets_that_disagree_about_a_prompt_are_never_both_trained_on(tmp_path: Path, store_url: str) -> None:
    """One kept the splits of a run that was cancelled later, the other one did not."""
    with _client(tmp_path, store_url, 0.1) as client:
        waits = client.runs.submit(PROFILE, [_rows(client, "first.jsonl", range(200))])
        _set_share(client, 0.4)
        client.profiles.lock(PROFILE, new_split=True, reason="more cases")
        kept, _ = client.datasets.prepare(PROFILE, [_rows(client, "kept.jsonl", range(210))])
        client.runs.cancel(waits.id)
        fresh, _ = client.datasets.prepare(PROFILE, [_rows(client, "fresh.jsonl", range(220))])
        assert _groups(client, kept.path)[Split.TRAIN] & _groups(client, fresh.path)[Split.HELDOUT]
        client.runs.submit(PROFILE, kept.id)
        with pytest.raises(LockedError, match="prepare or assemble it again"):
            client.runs.submit(PROFILE, fresh.id)
        again, _ = client.datasets.prepare(PROFILE, [_rows(client, "again.jsonl", range(230))])
        assert _groups(client, kept.path)[Split.TRAIN].isdisjoint(_groups(client, again.path)[Split.HELDOUT])
        client.runs.submit(PROFILE, again.id)


def test_dataset_of_another_share_is_refused_once_it_is_decided(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url, 0.1) as client:
        early, _ = client.datasets.prepare(PROFILE, [_rows(client, "early.jsonl", range(100))])
        _set_share(client, 0.4)
        late, _ = client.datasets.prepare(PROFILE, [_rows(client, "late.jsonl", range(100))])
        client.runs.submit(PROFILE, late.id)
        with pytest.raises(LockedError, match=r"split by data.heldout_share 0.1 .*prepare or assemble it again"):
            client.runs.submit(PROFILE, early.id)


@pytest.mark.parametrize("share", [0.4, 0.05], ids=["more", "less"])
def test_new_split_keeps_every_earlier_decision(
    tmp_path: Path, store_url: str, database: Database, share: float
) -> None:
    """What was trained on is never judged on, and what was held out is never trained on, whatever the share is."""
    with _client(tmp_path, store_url, 0.2) as client:
        first, _ = client.datasets.prepare(PROFILE, [_rows(client, "first.jsonl", range(200))])
        run = client.runs.submit(PROFILE, first.id)
        _end(database, run.id, RunState.DEPLOYED)
        unused, _ = client.datasets.prepare(PROFILE, [_rows(client, "unused.jsonl", range(500, 600))])
        _set_share(client, share)
        with pytest.raises(UsageError, match="needs a reason"):
            client.profiles.lock(PROFILE, new_split=True)
        locked = client.profiles.lock(PROFILE, new_split=True, reason="the gate wants 50 cases")
        assert (locked.heldout_share, locked.split_number) == (share, 1)
        with pytest.raises(Refused, match="already"):
            client.profiles.lock(PROFILE, new_split=True, reason="again")
        second, report = client.datasets.prepare(
            PROFILE, [_rows(client, "second.jsonl", range(400))], overrides={"data": {"screens": "none"}}
        )
        before, after = _groups(client, first.path), _groups(client, second.path)
        for split in Split:
            assert before[split] <= after[split]
        fresh = {split: len(after[split] - before[split]) / 200 for split in Split}
        assert abs(fresh[Split.HELDOUT] - share) < 0.1
        assert report.options.split_number == 1
        client.runs.submit(PROFILE, second.id)
        client.runs.submit(PROFILE, first.id)  # it was trained on: every prompt of it has kept its split
        with pytest.raises(LockedError, match="has another split by now"):
            client.runs.submit(PROFILE, unused.id)


@pytest.mark.slow
def test_new_split_holds_for_experiences_too(tmp_path: Path, store_url: str, database: Database) -> None:
    with _client(tmp_path, store_url, 0.2) as client:
        _capture(client, 80)
        first = client.runs.submit(PROFILE)
        _end(database, first.id, RunState.CANCELLED)
        with database.write() as tx:
            tx.run(tables.experiences.update().values(state="collected", dataset_id=None))
        _set_share(client, 0.5)
        client.profiles.lock(PROFILE, new_split=True, reason="more cases")
        _capture(client, 80, first=80)
        second, _ = client.datasets.assemble(PROFILE, max_examples=1000)
        before = _groups(client, client.datasets.show(first.dataset_id)[0].path)
        after = _groups(client, second.path)
        assert before[Split.TRAIN].isdisjoint(after[Split.HELDOUT])
        assert before[Split.HELDOUT].isdisjoint(after[Split.TRAIN] | after[Split.VALIDATION])
        assert len(after[Split.HELDOUT]) > len(before[Split.HELDOUT])


def _advised(told: str | None) -> float:
    assert told is not None
    found = re.search(r"[Ss]et data\.heldout_share: ([0-9.]+) \(now", told)
    assert found is not None, told
    return float(found[1])


def _warnings(client: Client) -> list[str | None]:
    return [
        client.profiles.heldout_warning(PROFILE),
        client.datasets.preview_assembly(PROFILE).warning,
        next((told for told in client.profiles.dry_run(PROFILE).warnings if "gate.min_cases" in told), None),
    ]


@pytest.mark.slow
def test_share_that_is_advised_suffices_and_is_the_same_wherever_it_is_told(tmp_path: Path, store_url: str) -> None:
    """Counts only what can be in: answers that are cut and not corrected hold nothing out."""
    profile = {**_with(0.1), "gate": {"min_cases": 40}}
    with a_workspace(tmp_path, profile=profile, settings={"store": {"url": store_url}}) as client:
        assert client.profiles.heldout_warning(PROFILE) is None  # nothing is known yet
        _capture(client, 150)
        for n in range(40):
            asked = [{"role": "user", "content": f"Where is parcel {n}?"}, {"role": "assistant", "content": f"It {n}"}]
            client.experiences.add(PROFILE, asked, is_cut=True)
        told = _warnings(client)
        run = client.runs.submit(PROFILE)
        assert run.warning is not None
        assert f"`tunesmith run cancel {run.id}`" in run.warning, "the remedy that works: the run is queued by now"
        advised = {_advised(each) for each in (*told, run.warning)}
        assert len(advised) == 1, advised
        assert all("of 150 prompts" in str(each) and "PROFILE" not in str(each) for each in (*told, run.warning))
        client.runs.cancel(run.id)
        a_profile(client.workspace.root, **{**profile, "data": {"heldout_share": advised.pop()}})
        assert _warnings(client) == [None, None, None]
        again = client.runs.submit(PROFILE)
        assert again.warning is None
        assert client.datasets.show(again.dataset_id)[0].counts["heldout"] >= 40


@pytest.mark.slow
def test_share_that_is_advised_for_a_file_suffices(tmp_path: Path, store_url: str) -> None:
    profile = {**_with(0.1), "gate": {"min_cases": 40}}
    with a_workspace(tmp_path, profile=profile, settings={"store": {"url": store_url}}) as client:
        file = _rows(client, "all.jsonl", range(200))
        (dry, *_) = client.profiles.dry_run(PROFILE, [file]).warnings
        run = client.runs.submit(PROFILE, [file])
        assert _advised(dry) == _advised(run.warning)
        client.runs.cancel(run.id)
        a_profile(client.workspace.root, **{**profile, "data": {"heldout_share": _advised(dry)}})
        assert client.runs.submit(PROFILE, [file]).warning is None


def test_where_the_split_is_decided_new_prompts_are_wanted_and_no_share(tmp_path: Path, store_url: str) -> None:
    profile = {**_with(0.1), "gate": {"min_cases": 40}}
    with a_workspace(tmp_path, profile=profile, settings={"store": {"url": store_url}}) as client:
        client.runs.submit(PROFILE, [_rows(client, "all.jsonl", range(200))])
        told = client.runs.submit(PROFILE, [_rows(client, "more.jsonl", range(210))]).warning
        assert told is not None
        assert "data.heldout_share" not in told
        assert "new prompts (10% of them are held out)" in told
