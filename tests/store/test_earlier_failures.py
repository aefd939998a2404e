"""What broke in earlier systems, as tests of the joints between experience, data, gate and campaign.

Where the proof of a failure stands in the suite; what has no other home is here.

| # | what broke | proof |
|---|---|---|
| 1 | data was marked used at assembly | `store/test_assembly.py`: `test_failure_1_…`; `store/test_learning_machine.py` |
| 2 | corrections never reached a batch | `store/test_assembly.py`: `test_failure_2_…` |
| 3 | a clean entry without feedback was never gold | `store/test_assembly.py`: `test_failure_3_…` |
| 4 | rejected, stopped and crashed were all "failed", and opened the breaker | `test_failure_04_…` here |
| 5 | the evaluator read another folder; errors were scores of 0.0 | `test_failure_05_…` here; `unit/test_evaluation.py`: `test_one_flawed_case_among_many_never_promotes`; `contracts/test_evaluators.py`: `test_case_that_cannot_be_scored_is_an_error_never_a_score`; `faults/test_deploy_faults.py`: `test_broken_evaluation_never_deploys` |
| 6 | there was no true hold-out | `store/test_assembly.py`: `test_failure_6_…`; `store/test_evaluation_overlap.py`; `store/test_learning_machine.py` |
| 12 | packed examples attended to each other | `unit/test_modeling_packs.py`: `test_every_family_keeps_packed_examples_apart` |
| 12 | a chat marker of one family masked everything of others | `unit/test_chat_families.py` |
| 12 | truncation cut the end of answers | `unit/test_modeling_chat.py`: `test_tokens_are_never_cut`; `stories/test_native_training.py`: `test_too_long_examples_are_dropped_whole_and_counted` |
| 16 | the memory kill switch had no process id; adapters were loaded eagerly | `engine/test_engine_process.py`: `test_engine_that_takes_too_much_memory_is_ended`; `faults/test_flips_under_load.py`: `test_failure_16_…` |
| 17 | a fabrication rate rejected good models | `test_failure_17_…` here; `unit/test_builtin_verifiers.py`: `test_fabrication_is_scored_and_never_flagged` |
| 18 | quantising after evaluation changed quality | `unit/test_parity.py`: `test_parity_with_what_differs_is_refused_with_the_difference`; `faults/test_deploy_steps.py`: `test_target_that_answers_otherwise_is_refused_before_the_flip_and_holds_nothing` |
| 19 | the teacher was the student, or never compared with it | `unit/test_curriculum.py`: `test_student_by_any_name_is_no_teacher`, `test_nothing_is_accepted_that_is_not_better_everywhere_it_matters`; `stories/test_teachers.py`; `stories/test_curriculum_cli.py`: `test_teacher_that_cannot_be_one_is_refused_before_the_first_call` |
| 21 | a promotion demoted itself | `store/test_deployments.py`: `test_flip_of_what_is_live_already_is_refused_and_keeps_the_way_back` |
| 21 | no shadow observation sufficed | `unit/test_shadowing.py`: `test_no_observation_suffices_though_every_limit_is_open` |
| 21 | what was rolled back to was not checked | `store/test_deployments.py`: `test_roll_back_to_what_was_never_live_or_is_gone_is_refused`; `faults/test_deploy_steps.py`: `test_target_restarted_with_other_weights_is_not_brought_back_silently` |
| 21 | a later evaluation that failed revoked nothing | `test_failure_21_…` here; `faults/test_deploy_faults.py`: `test_two_runs_on_one_profile_the_second_is_judged_again_by_what_is_live` |
"""  # noqa: E501 - names of tests are looked for, so they stay whole

from __future__ import annotations

import ast
import re
import shutil
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from support import tables
from support.candidates import a_candidate
from support.rows import an_evaluation, force
from support.workspaces import PROFILE, a_jsonl, a_workspace, wait_for
from tunesmith.client import Client
from tunesmith.core.errors import ConfigError
from tunesmith.evaluation.rules.gate import Decision
from tunesmith.experience.queries import members
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.rules.campaign import Breaker, breaker
from tunesmith.runs.queries import runs, tasks
from tunesmith.store.database import Database

TESTS = Path(__file__).parents[1]


def _client(folder: Path, store_url: str, **sections: Any) -> Client:
    return a_workspace(folder, profile=sections, settings={"store": {"url": store_url}})


def _submit(client: Client, *options: str, first: int = 0, start: Literal["live", "base"] = "live") -> str:
    data = a_jsonl(client.workspace.root / f"rows-{first}.jsonl", 60, first=first)
    overrides = [f"trainer.options.{each}" for each in options]
    return client.runs.submit(PROFILE, data, overrides=overrides, start=start).id


def _work(client: Client) -> None:
    client.system.worker().run(until_idle=True)


def _state(client: Client, run_id: str) -> str:
    return client.runs.get(run_id).state


@pytest.mark.slow
def test_failure_04_rejected_stopped_and_crashed_are_told_apart_and_only_crashes_open_the_breaker(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        campaign_id = client.campaigns.create(PROFILE).id

        def counted() -> tuple[int, int, Breaker]:
            with database.read() as tx:
                counters = campaigns.get(tx, campaign_id).counters
                return len(counters.failures), counters.num_rejections, breaker(counters, tx.now)

        good = _submit(client, "quality=0.6")
        _work(client)
        worse = [_submit(client, "quality=0.1") for _ in range(3)]
        _work(client)
        assert [_state(client, each) for each in (good, *worse)] == ["deployed", *["rejected"] * 3]
        assert counted() == (0, 3, Breaker.CLOSED)

        stopped = _submit(client, "steps=400", "step_s=0.02")
        worker = client.system.worker()
        thread = threading.Thread(target=worker.run)
        thread.start()
        wait_for(lambda: len(client.runs.metrics(stopped)) > 0, 30, "for the first step")
        client.system.estop(True, "smoke")
        wait_for(lambda: _state(client, stopped) == "queued", 30, "for the e-stop")
        worker.stop()
        thread.join(30)
        assert "e-stop" in (client.runs.get(stopped).waits_for or "")
        assert [each.outcome for each in client.runs.show(stopped).attempts] == ["interrupted"]
        client.runs.cancel(stopped)
        client.system.estop(False)
        assert counted() == (0, 3, Breaker.CLOSED)

        crashed = [_submit(client, "script=crash") for _ in range(3)]
        for each in crashed:
            _had_crashed_twice(database, each)  # the pauses between three crashes are seconds long
        _work(client)
        assert [_state(client, each) for each in crashed] == ["failed"] * 3
        assert {each.outcome for each in client.runs.show(crashed[0]).attempts} == {"failed"}
        assert counted() == (3, 3, Breaker.OPEN)


def _had_crashed_twice(database: Database, run_id: str) -> None:
    with database.write() as tx:
        task = tasks.open_of_run(tx, run_id)
        assert task is not None
        force(tx, tables.tasks, task.id, num_crashes=2)


@pytest.mark.slow
def test_failure_05_baseline_from_another_folder_is_an_error_and_promotes_nobody(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    with _client(tmp_path, store_url) as client:
        good = _submit(client, "quality=0.6")
        _work(client)
        worse = _submit(client, "quality=0.1", first=100)
        _work(client)
        live, other = client.adapters.live(PROFILE), client.adapters.show(f"{PROFILE}@v2")
        assert live is not None
        assert (live.run_id, _state(client, worse)) == (good, "rejected")
        shutil.rmtree(live.path)
        shutil.copytree(other.path, live.path)
        # better than what lies in the folder, worse than what is live
        between = _submit(client, "quality=0.3", first=200, start="base")
        _work(client)
        run = client.runs.get(between)
        assert (run.state, run.adapter) == ("failed", f"{PROFILE}@v3")
        assert client.runs.show(between).evaluation is None
        assert live.digest[:8] in run.reason
        assert "expected" in run.reason
        now_live = client.adapters.live(PROFILE)
        assert now_live is not None
        assert now_live.id == live.id


def test_failure_05_baseline_whose_cases_fail_is_no_score_of_zero(tmp_path: Path, store_url: str) -> None:
    with _client(tmp_path, store_url) as client:
        broken = _submit(client, "quality=0.6", "eval_script=error")
        _work(client)
        assert _state(client, broken) == "held"
        client.adapters.deploy(f"{PROFILE}@v1", force=True, reason="a person lets it live all the same")
        _work(client)
        assert _state(client, broken) == "deployed"
        better = _submit(client, "quality=0.9", first=100)
        _work(client)
        run = client.runs.get(better)
        assert (run.state, "baseline" in run.reason, "scripted error" in run.reason) == ("held", True, True)
        live = client.adapters.live(PROFILE)
        assert live is not None
        assert live.run_id == broken


@pytest.mark.slow
def test_failure_17_fabrication_is_scored_and_keeps_nothing_from_being_learnt_or_deployed(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    verifiers = {"verifiers": {"fabrication": {}}, "mix": {"min_new": 5, "max_examples": 60}}
    with _client(tmp_path, store_url, experience=verifiers) as client:
        ids = [
            client.experiences.add(
                PROFILE,
                [
                    {"role": "user", "content": f"who built the tower of the town number {number}?"},
                    {"role": "assistant", "content": f"It was built in {1800 + number} by Gustave Eiffel."},
                ],
            ).id
            for number in range(40)
        ]
        for each in ids:
            shown = client.experiences.show(each)
            assert shown.findings["fabrication"].score < 0.5
            assert (shown.experience.class_name, shown.suspicions) == ("gold", ())
        run = client.runs.submit(PROFILE)
        with database.read() as tx:
            assert {member.experience_id for member in members.of_dataset(tx, run.dataset_id)} == set(ids)
        _work(client)
        assert _state(client, run.id) == "deployed"
        spec = client.runs.show(run.id).spec
        assert not any("fabrication" in str(spec[section]) for section in ("gate", "evaluation"))
        with pytest.raises(ConfigError, match="fabrication"):
            client.runs.submit(PROFILE, run.dataset_id, overrides=['gate.floors={"fabrication": 0.9}'])


def test_failure_21_verdict_that_was_followed_by_a_bad_one_flips_nothing(
    tmp_path: Path, store_url: str, database: Database
) -> None:
    """Promoted, and found worse by a later evaluation before it went live: it is measured again, and rejected."""
    with _client(tmp_path, store_url) as client:
        adapter = a_candidate(client)
        assert adapter.run_id is not None
        with database.write() as tx:
            an_evaluation(tx, runs.get(tx, adapter.run_id), adapter, Decision.REJECT)
        worker = client.system.worker(["deploy"])
        worker.run(until_idle=True)
        assert client.runs.get(adapter.run_id).state == "evaluating"
        assert "the latest verdict is against it" in client.runs.get(adapter.run_id).reason
        assert client.adapters.live(PROFILE) is None


def test_every_proof_that_the_table_names_is_there() -> None:
    assert __doc__ is not None
    named = 0
    for cell in (line.split("|")[3] for line in __doc__.splitlines() if re.match(r"\| \d", line)):
        for part in cell.split(";"):
            file, *names = re.findall(r"`([^`]+)`", part)
            path = Path(__file__) if file.startswith("test_failure") else TESTS / file
            tree = ast.parse(path.read_text(encoding="utf-8"))
            tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            for name in names or [file] if path == Path(__file__) else names:
                begin = name.rstrip("…")
                assert any(test == name or (name != begin and test.startswith(begin)) for test in tests), (file, name)
                named += 1
    assert named > 10
