"""The curriculum from the real command line and by a real worker: run, show, again; what is refused, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.teacher_server import Call, Teacher, a_teacher, better
from support.workspaces import PROFILE, a_profile, a_workspace, cli, work_until_idle
from tunesmith.cli.main import call
from tunesmith.client import Client
from tunesmith.core.errors import Refused
from tunesmith.curriculum.queries import cycles

VERIFIERS = {"experience": {"verifiers": {"entity_preservation": {}}}}


def a_school(folder: Path, url: str, teacher: dict[str, Any] | None = None, **policy: Any) -> Client:
    settings = {"base_url": url, "model": "big", "price_in": 1.0, "price_out": 2.0, **(teacher or {})}
    return a_workspace(folder, profile={**VERIFIERS, "curriculum": {"teacher": settings, **policy}})


def add_entries(client: Client, num: int, first: int = 10) -> list[str]:
    return [
        client.experiences.add(
            PROFILE,
            [
                {"role": "user", "content": f"Send order {number} to Rome"},
                {"role": "assistant", "content": "It is done."},
            ],
        ).id
        for number in range(first, first + num)
    ]


@pytest.fixture(scope="module")
def teacher() -> Iterator[Teacher]:
    with a_teacher(better) as running:
        yield running


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory, teacher: Teacher) -> Path:
    with a_school(tmp_path_factory.mktemp("shared"), teacher.url) as client:
        return client.workspace.root


def test_cycle_by_hand_from_what_is_due_to_what_was_learnt(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(lambda c: better(c) if "order 1" in c.question else c.say("Nothing of that kind."))
    with a_school(tmp_path, teacher.url) as client:
        ids = [*add_entries(client, 2), *add_entries(client, 1, first=20)]
        root = client.workspace.root
    shown = cli("curriculum", "show", PROFILE, cwd=root)
    assert shown.code == 0, shown.err
    for text in (
        "3 due",
        "enabled is auto, and the profile has no active campaign",
        "02:00-06:00 UTC",
        "0.00 this month, 10.00 left",
    ):
        assert text in shown.out
    refused = cli("curriculum", "run", PROFILE, cwd=root)
    assert (refused.code, refused.out) == (1, "")
    assert "--now" in refused.err
    dry = cli("curriculum", "run", PROFILE, "--dry-run", "--max-entries", "2", cwd=root)
    assert dry.out.count("would ask") == 2
    assert "nobody was asked" in dry.out
    assert teacher.calls == []
    ran = cli("curriculum", "run", PROFILE, "--now", cwd=root)
    assert ran.code == 0, ran.err
    assert "2 accepted, 1 refused; spent 0.00012" in ran.out
    assert ran.last_line.startswith("cyc-")
    history = cli("experience", "show", ids[0], cwd=root).out
    assert "corrected" in history
    assert "teacher big: entity_preservation 1.00 instead of 0.00" in history
    assert "answer: Certainly: Send order 10 to Rome, as you wish." in history
    assert "correction_refused" in cli("experience", "show", ids[2], cwd=root).out
    again = cli("curriculum", "run", PROFILE, "--now", "--json", cwd=root).json
    assert (again["id"], again["outcomes"], again["ended"]) == (None, [], "no entry is due")
    found = cli("curriculum", "show", PROFILE, "--json", cwd=root).json
    assert (found["num_due"], found["spent_month"], found["last_summary"][:22]) == (0, 120, "2 accepted, 1 refused;")
    assert found["others"] == {"was tried lately: waits for its next attempt": 1}


def test_tables_fit_eighty_columns(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(lambda c: c.reply(400, {"error": {"message": "a long complaint " * 20}}))
    with a_school(tmp_path, teacher.url) as client:
        add_entries(client, 3)
        root = client.workspace.root
    for words in (["run", PROFILE, "--now", "--dry-run"], ["run", PROFILE, "--now"], ["show", PROFILE]):
        process = cli(
            "curriculum", *words, cwd=root, env={"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb", "NO_COLOR": "1"}
        )
        assert process.code == 0, process.err
        assert max(map(len, process.out.splitlines())) <= 80, process.out


def test_entry_that_no_teacher_betters_is_given_up_and_a_person_may_ask_again(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(lambda c: c.say("Nothing of that kind."))
    with a_school(tmp_path, teacher.url, max_attempts=2, backoff_h=0.0) as client:
        (entry,) = add_entries(client, 1)
        root = client.workspace.root
        for _ in range(2):
            assert client.curriculum.run(PROFILE, now=True).counts["refused"] == 1
        assert client.curriculum.run(PROFILE, now=True).outcomes == ()
        (why,) = client.curriculum.show(PROFILE).others
        assert "given up" in why
    assert "given_up" in cli("experience", "show", entry, cwd=root).out
    bare = cli("curriculum", "again", entry, cwd=root)
    assert (bare.code, "--reason" in bare.err) == (2, True)
    again = cli("curriculum", "retry", entry[:12], "--reason", "a better teacher", cwd=root)
    assert (again.code, again.last_line) == (0, entry), again.err
    teacher.plays(better)
    with Client(root) as client:
        assert client.curriculum.run(PROFILE, now=True).counts["accepted"] == 1
    over = cli("curriculum", "again", entry, "--reason", "once more", cwd=root)
    assert over.code == 1
    assert "has no correction" in over.err
    with Client(root) as client, pytest.raises(Refused, match="has no correction"):  # by its former name
        client.curriculum.again(entry, reason="once more")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"price_in": None}, "price_in is not set"),
        ({"price_out": None}, "price_out is not set"),
        ({"model": None}, "model is not set"),
        ({"base_url": None}, "base_url is not set"),
        ({"model": "support"}, "cannot teach itself"),
        ({"model": "support@v3"}, "is the profile support"),
        ({"model": "dates@v1"}, "is the profile dates"),
        ({"model": "models/tiny"}, "cannot teach itself"),
        ({"model": "models/copy"}, "cannot teach itself"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
    ],
    ids=str,
)
def test_teacher_that_cannot_be_one_is_refused_before_the_first_call(
    tmp_path: Path, teacher: Teacher, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    teacher.server.calls.clear()
    with a_school(tmp_path, teacher.url, changes) as client:
        add_entries(client, 1)
        root = client.workspace.root
    a_profile(root, "dates")
    copy = root / "models" / "copy"
    copy.mkdir()
    for file in (root / "models" / "tiny").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert call(["curriculum", "run", PROFILE, "--now", "--workspace", str(root)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert call(["curriculum", "show", PROFILE, "--workspace", str(root)]) == 0
    assert says in " ".join(capsys.readouterr().out.split())
    assert teacher.calls == []


def test_key_with_a_line_break_is_refused_without_being_shown(tmp_path: Path, teacher: Teacher) -> None:
    with a_school(tmp_path, teacher.url, {"api_key_env": "TEACHER_KEY"}) as client:
        root = client.workspace.root
    ended = cli("curriculum", "run", PROFILE, "--now", cwd=root, env={"TEACHER_KEY": "hush-\n-hush"})
    assert ended.code == 1
    assert "TEACHER_KEY" in ended.err
    assert "hush" not in ended.err + ended.out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "suport", "--now"), 1, "did you mean 'support'?"),
        (("run", PROFILE, "--max-entries", "0"), 2, "from 1 to"),
        (("run", PROFILE, "--max-entries", "x"), 2, "--max-entries"),
        (("show", "suport"), 1, "did you mean 'support'?"),
        (("rn",), 2, "did you mean 'run'?"),
        (("again", "xp-000000000000", "--reason", "x"), 1, "no experience"),
        (("again", "../../etc", "--reason", "x"), 2, "is no experience id"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_one_helpful_line(
    shared_root: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str
) -> None:
    assert call(["curriculum", *words, "--workspace", str(shared_root)]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_budget_ends_the_cycle_and_estop_lets_none_begin(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(lambda c: c.say(f"Certainly: {c.question}, as you wish.", usage=None))
    with a_school(tmp_path, teacher.url, {"max_tokens": 100}, budget={"per_cycle": 0.001}) as client:
        add_entries(client, 6)
        cycle = client.curriculum.run(PROFILE, now=True)
        assert cycle.counts["spent"] <= 1000
        assert "curriculum.budget.per_cycle" in cycle.ended
        assert 0 < cycle.counts["accepted"] < 6
        client.system.estop(True, "stop")
        root = client.workspace.root
    ended = cli("curriculum", "run", PROFILE, "--now", "--json", cwd=root)
    assert ended.code == 1
    assert "estop off" in json.loads(ended.err)["error"]["message"]


def test_worker_opens_a_cycle_in_its_window_and_not_again_before_the_cooldown(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(better)
    teacher.server.calls.clear()
    policy = {"min_entries": 3, "max_entries": 4, "window": "00:00-24:00"}
    with a_school(tmp_path, teacher.url, **policy) as client:
        campaign = client.campaigns.create(PROFILE)  # with a teacher that can be asked, that is enough
        add_entries(client, 2)
        assert work_until_idle(client).code == 0
        assert teacher.calls == [], "too few"
        add_entries(client, 4, first=30)
        client.campaigns.pause(campaign.id)
        assert work_until_idle(client).code == 0
        assert teacher.calls == [], "no active campaign"
        client.campaigns.resume(campaign.id)
        assert work_until_idle(client).code == 0
        assert len(teacher.calls) == 4
        found = client.curriculum.show(PROFILE)
        assert (found.last_summary, found.num_due) == ("4 accepted; spent 0.00016", 2)
        add_entries(client, 4, first=50)
        assert work_until_idle(client).code == 0
        assert len(teacher.calls) == 4, "the cooldown holds"


def test_worker_tells_why_a_cycle_could_not_run_and_does_not_spin(tmp_path: Path, teacher: Teacher) -> None:
    policy = {"enabled": True, "min_entries": 1, "window": "00:00-24:00"}
    with a_school(tmp_path, teacher.url, {"model": "support@v1"}, **policy) as client:
        add_entries(client, 1)
        teacher.server.calls.clear()
        assert work_until_idle(client).code == 0
        assert work_until_idle(client).code == 0
        assert "cannot teach itself" in client.curriculum.show(PROFILE).last_summary
        assert teacher.calls == []
        with client._session.database.read() as tx:
            assert not cycles.is_open(tx, PROFILE)


def test_question_of_a_rude_person_never_reaches_a_teacher(tmp_path: Path, teacher: Teacher) -> None:
    def fail(c: Call) -> None:
        raise AssertionError(c.question)

    teacher.plays(fail)
    teacher.server.calls.clear()
    with a_school(tmp_path, teacher.url) as client:
        key = "AKIA" + "Z7VR2N4QX5TJH3WL"
        messages = [{"role": "user", "content": f"Order 17 with {key}"}, {"role": "assistant", "content": "Done."}]
        added = client.experiences.add(PROFILE, messages)
        assert added.class_name == "quarantined"
        client.experiences.review([added.id], "accept", reason="it is a fake key")
        assert client.experiences.show(added.id).experience.class_name == "needs_improvement"
        assert client.curriculum.run(PROFILE, now=True).outcomes == ()
        assert "sent to nobody" in next(iter(client.curriculum.show(PROFILE).others))
    assert teacher.calls == []


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_accepted_answers_become_targets_and_pairs_and_nothing_else_does(
    tmp_path: Path, teacher: Teacher, kind: Any
) -> None:
    teacher.plays(lambda c: better(c) if int(c.question.split()[2]) % 2 else c.say("Nothing of that kind."))
    mix = {"min_new": 5, "max_examples": 60}
    settings = {"base_url": teacher.url, "model": "big", "price_in": 0.0, "price_out": 0.0}
    profile = {
        "experience": {**VERIFIERS["experience"], "mix": mix},
        "data": {"screens": "none"},
        "curriculum": {"teacher": settings, "max_entries": 100},
    }
    with a_workspace(tmp_path, profile=profile) as client:
        add_entries(client, 40)
        assert client.curriculum.run(PROFILE, now=True).counts["accepted"] == 20
        dataset, _ = client.datasets.assemble(PROFILE, kind=kind)
        client.datasets.export(dataset.id, tmp_path / "out.jsonl")
        states = client.experiences.stats(PROFILE)[0].states
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert states == {"collected": 20, "reserved": 20}
    for line in lines:
        text = json.dumps(line)
        assert "Certainly: Send order" in text
        assert "Nothing of that kind" not in text
        assert ("It is done." in text) == (kind == "preference"), "the student's answer is the worse of a pair, no more"


def test_call_of_a_function_is_never_replaced_by_a_text(tmp_path: Path, teacher: Teacher) -> None:
    teacher.plays(better)
    teacher.server.calls.clear()
    called = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": {"order": 17}}}
    messages = [
        {"role": "user", "content": "Send order 17 to Rome"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]
    with a_school(tmp_path, teacher.url, max_attempts=1) as client:
        assert client.experiences.add(PROFILE, messages).class_name == "needs_improvement"
        (outcome,) = client.curriculum.run(PROFILE, now=True).outcomes
        assert (outcome.decision, outcome.cost, teacher.calls) == ("refused", 0, [])
        assert client.curriculum.run(PROFILE, now=True).outcomes == (), "and it is given up"


def test_disabled_profile_asks_nobody(tmp_path: Path, teacher: Teacher, capsys: pytest.CaptureFixture[str]) -> None:
    teacher.server.calls.clear()
    with a_school(tmp_path, teacher.url, enabled=True, min_entries=1, window="00:00-24:00") as client:
        add_entries(client, 2)
        root = client.workspace.root
        path = root / "profiles" / f"{PROFILE}.yaml"
        path.write_text(path.read_text() + "enabled: false\ndisabled_reason: it rests\n")
        assert work_until_idle(client).code == 0
    assert call(["curriculum", "run", PROFILE, "--now", "--workspace", str(root)]) == 1
    assert "it rests" in capsys.readouterr().err
    assert teacher.calls == []
