"""The curriculum's decisions: when, which, at what price, and whether a teacher's answer is learnt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tunesmith.curriculum.rules.correction import ComparedAnswers, Reply, decide, unusable
from tunesmith.curriculum.rules.cycle import (
    GIVEN_UP,
    CycleInputs,
    Entry,
    Spent,
    cost_of,
    in_window,
    money,
    most_tokens,
    not_due,
    refusal_of_spend,
    same_as_student,
    unready,
    waits_for,
    why_off,
    worst,
    worth,
)
from tunesmith.profiles.sections.curriculum import CurriculumPolicy, SpendLimits, TeacherSettings
from tunesmith.verifiers.base import Finding, Interaction

NIGHT = datetime(2026, 11, 15, 3, 30, tzinfo=UTC)
READY = {"base_url": "http://127.0.0.1:1/v1", "model": "big", "price_in": 0.5, "price_out": 1.5}
EPR, LENGTH, MONITOR = "entity_preservation", "length", "fabrication"


def a_policy(**values: Any) -> CurriculumPolicy:
    return CurriculumPolicy.model_validate({"enabled": True, "teacher": READY, **values})


def an_entry(score: float = 0.4, **values: Any) -> Entry:
    return Entry(**{"id": "xp-1", "seq": 1, "findings": {EPR: Finding(score)}, **values})


# settings


def test_defaults_of_a_curriculum() -> None:
    policy = CurriculumPolicy()
    assert (policy.enabled, policy.min_entries, policy.max_entries, policy.cooldown_h) == ("auto", 10, 20, 24.0)
    assert policy.max_attempts == 3


@pytest.mark.parametrize(
    ("enabled", "has_campaign", "problem", "says"),
    [
        ("auto", True, None, None),
        ("auto", False, None, "auto, and the profile has no active campaign"),
        ("auto", True, "curriculum.teacher.model is not set", "auto, and curriculum.teacher.model is not set"),
        (True, False, None, None),
        (True, True, "curriculum.teacher.model is not set", None),  # whoever turns it on must see the error
        (False, True, None, "curriculum.enabled is false"),
    ],
)
def test_teacher_and_campaign_turn_it_on_unless_somebody_says_no(
    enabled: bool | str, has_campaign: bool, problem: str | None, says: str | None
) -> None:
    found = why_off(a_policy(enabled=enabled), has_campaign=has_campaign, problem=problem)
    assert found == says if says is None else found is not None and says in found
    waits = waits_for(a_policy(enabled=enabled), a_moment(why_off=found))
    assert waits == ([] if says is None else [found])


@pytest.mark.parametrize("window", ["2:00-6:00", "02:00", "25:00-26:00", "24:30-01:00", "02:00-02:00", "", "a-b"])
def test_window_that_makes_no_sense_is_refused(window: str) -> None:
    with pytest.raises(ValidationError, match="HH:MM-HH:MM"):
        CurriculumPolicy(window=window)


@pytest.mark.parametrize("key", ["sk-abc123def", "Bearer x", "", "1KEY", "my key"])
def test_key_itself_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TeacherSettings(api_key_env=key)
    assert "must name an environment variable" in raised.value.errors()[0]["msg"]
    assert not key or key not in raised.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "url", ["ftp://host/v1", "host/v1", "http://", "https://me:secret@host/v1", "http://h/v1?key=1", "http://h:99999/"]
)
def test_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TeacherSettings(base_url=url)
    assert "secret" not in raised.value.errors()[0]["msg"]


def test_address_loses_its_last_slash() -> None:
    assert TeacherSettings(base_url="https://host/v1/").base_url == "https://host/v1"


# money


@pytest.mark.parametrize("missing", ["price_in", "price_out", "model", "base_url"])
def test_unknown_price_or_teacher_is_refused(missing: str) -> None:
    problem = unready(a_policy(teacher={**READY, missing: None}), [EPR])
    assert problem is not None
    assert f"curriculum.teacher.{missing}" in problem


def test_price_of_zero_is_a_price() -> None:
    policy = a_policy(teacher={**READY, "price_in": 0.0, "price_out": 0.0})
    assert unready(policy, [EPR]) is None
    assert cost_of(10**6, 10**6, policy.teacher) == 0


def test_without_a_verifier_that_decides_no_teacher_is_asked() -> None:
    assert unready(a_policy(), [MONITOR]) is not None
    assert unready(a_policy(), []) is not None
    assert unready(a_policy(), [MONITOR, LENGTH]) is None


def test_cost_is_rounded_up_to_a_whole_millionth() -> None:
    teacher = a_policy().teacher
    assert cost_of(1, 0, teacher) == 1
    assert cost_of(2, 2, teacher) == 4
    assert cost_of(1_000_000, 1_000_000, teacher) == 2_000_000


def test_money_reads_as_people_write_it() -> None:
    assert [money(amount) for amount in (0, 10_000, 2_500_000, 1, 480)] == [
        "0.00",
        "0.01",
        "2.50",
        "0.000001",
        "0.00048",
    ]


@given(st.lists(st.text(max_size=50), min_size=1, max_size=5))
def test_most_tokens_is_more_than_the_bytes(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    assert most_tokens(messages) > sum(len(text.encode(errors="replace")) for text in texts)


@given(
    st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)
)
def test_spend_is_allowed_only_inside_both_budgets(
    most: int, cycle: int, month: int, per_cycle: int, per_month: int
) -> None:
    why = refusal_of_spend(most, Spent(cycle, month), SpendLimits(per_cycle, per_month))
    assert (why is None) == (cycle + most <= per_cycle and month + most <= per_month)


# when


def test_window_is_open_exactly_in_its_minutes() -> None:
    day = [datetime(2026, 1, 1, minute // 60, minute % 60, 59, tzinfo=UTC) for minute in range(24 * 60)]
    assert sum(in_window("02:00-06:00", now) for now in day) == 240
    assert sum(in_window("22:00-04:00", now) for now in day) == 360
    assert all(in_window("00:00-24:00", now) for now in day)
    assert in_window("22:00-04:00", day[23 * 60])
    assert in_window("22:00-04:00", day[0])
    assert not in_window("22:00-04:00", day[4 * 60])
    assert not in_window("02:00-06:00", day[6 * 60])


def a_moment(**values: Any) -> CycleInputs:
    return CycleInputs(**{"now": NIGHT, "last_began_at": None, "num_due": 10, "month": 0, **values})


def test_cycle_is_due_when_nothing_speaks_against_it() -> None:
    assert waits_for(a_policy(), a_moment()) == []
    assert waits_for(a_policy(), a_moment(last_began_at=NIGHT - timedelta(hours=24))) == []


@pytest.mark.parametrize(
    ("policy", "moment", "says"),
    [
        ({"enabled": False}, {}, "enabled"),
        ({}, {"is_stopped": True}, "e-stop"),
        ({}, {"is_open": True}, "open already"),
        ({"window": "04:00-05:00"}, {}, "04:00-05:00 UTC"),
        ({}, {"last_began_at": NIGHT - timedelta(hours=23)}, "1.0 h to go"),
        ({}, {"num_due": 9}, "9 entries are due"),
        ({}, {"month": 10_000_000}, "per_month"),
    ],
)
def test_cycle_waits_for_each_reason_alone(policy: dict[str, Any], moment: dict[str, Any], says: str) -> None:
    found = waits_for(a_policy(**policy), a_moment(**moment))
    assert len(found) == 1
    assert says in found[0]


def test_clock_that_jumped_back_does_not_stop_the_curriculum_for_years() -> None:
    assert waits_for(a_policy(), a_moment(last_began_at=NIGHT + timedelta(days=3650))) == []
    tried = an_entry(num_attempts=1, last_attempt_at=NIGHT + timedelta(days=3650))
    assert not_due(tried, a_policy(), NIGHT) is None


# which


def test_worst_entries_come_first_and_no_more_than_asked_for() -> None:
    entries = [
        an_entry(0.6, id="c", seq=1),
        an_entry(0.2, id="b", seq=2, feedback_mean=0.5),
        an_entry(0.2, id="a", seq=3, feedback_mean=0.1),
        an_entry(0.6, id="d", seq=4),
        an_entry(1.0, id="never", seq=5),
    ]
    assert [entry.id for entry in worst(entries, a_policy(), NIGHT, 3)] == ["a", "b", "c"]
    assert [entry.id for entry in worst(entries, a_policy(), NIGHT, 10)] == ["a", "b", "c", "d"]


def test_worth_is_that_of_the_worst_verifier_that_decides() -> None:
    assert worth({EPR: Finding(0.5), LENGTH: Finding(1.0), MONITOR: Finding(0.0)}) == 0.5
    assert worth({EPR: Finding(0.5), LENGTH: Finding(0.9, flagged=True)}) == 0.0
    assert worth({EPR: Finding(None)}) == 1.0
    assert worth({}) == 1.0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_counted": 3, "num_attempts": 3}, GIVEN_UP),
        ({"is_suspect": True}, "sent to nobody"),
        ({"served_by": "big"}, "this very teacher"),
        ({"findings": {EPR: Finding(1.0)}}, "correct it by hand"),
        ({"num_attempts": 1, "last_attempt_at": NIGHT - timedelta(hours=23)}, "tried lately"),
        ({"num_attempts": 2, "last_attempt_at": NIGHT - timedelta(hours=47)}, "tried lately"),
        ({"num_attempts": 9, "last_attempt_at": NIGHT - timedelta(days=29)}, "tried lately"),
    ],
)
def test_entry_waits_with_its_reason(values: dict[str, Any], says: str) -> None:
    assert says in (not_due(an_entry(**values), a_policy(), NIGHT) or "")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_attempts": 1, "last_attempt_at": NIGHT - timedelta(hours=24)},
        {"num_attempts": 2, "last_attempt_at": NIGHT - timedelta(hours=48)},
        {"num_attempts": 99, "last_attempt_at": NIGHT - timedelta(days=30)},
        {"num_attempts": 5, "num_counted": 2, "last_attempt_at": NIGHT - timedelta(days=30)},
        {"served_by": "support@v3"},
    ],
)
def test_entry_is_due(values: dict[str, Any]) -> None:
    assert not_due(an_entry(**values), a_policy(), NIGHT) is None


@pytest.mark.parametrize(
    "model",
    ["support", "support@v3", "Support@V3", "org/support", "org/support@v3", "support:latest", "tiny", "a/tiny/"],
)
def test_student_by_any_name_is_no_teacher(model: str) -> None:
    problem = same_as_student(TeacherSettings(model=model), {"support", "dates"}, {"tiny"})
    assert problem is not None
    assert model in problem
    assert "cannot teach itself" in problem


@pytest.mark.parametrize("model", ["big", "support-large", "org/other", "tiny-2", "unsupport"])
def test_other_names_may_teach(model: str) -> None:
    assert same_as_student(TeacherSettings(model=model), {"support", "dates"}, {"tiny"}) is None


# whether it is learnt

STUDENT = Interaction([{"role": "user", "content": "Send order 17"}, {"role": "assistant", "content": "It  is done."}])


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply("Order 17", "length", 1, 1), "cut off"),
        (Reply("", "stop", 1, 1), "empty"),
        (Reply(" \n\t", "stop", 1, 1), "empty"),
        (Reply("Order 17", "tool_calls", 1, 1), "tool_calls"),
        (Reply("Order 17", "content_filter", 1, 1), "content_filter"),
        (Reply("It is DONE.", "stop", 1, 1), "what the student said"),
        (Reply("No, that's wrong.", "stop", 1, 1), "complaint"),
        (Reply("Order 17 \0", "stop", 1, 1), "no database"),
        (Reply("Order 17 \ud800", "stop", 1, 1), "no database"),
        (Reply("x" * 200_001, "stop", 1, 1), "characters"),
    ],
)
def test_reply_that_is_no_answer_is_refused(reply: Reply, says: str) -> None:
    assert says in (unusable(reply, STUDENT) or "")


@pytest.mark.parametrize("finish", ["stop", None])
def test_reply_that_ended_may_be_judged(finish: str | None) -> None:
    assert unusable(Reply("Order 17 is sent.", finish, None, None), STUDENT) is None


@pytest.mark.parametrize(
    ("student", "teacher", "suspicions", "accepted", "says"),
    [
        ({EPR: Finding(0.5)}, {EPR: Finding(1.0)}, [], True, "1.00 instead of 0.50"),
        ({EPR: Finding(0.5)}, {EPR: Finding(1.0)}, ["injection: x"], False, "screen"),
        ({EPR: Finding(0.5)}, {EPR: Finding(0.89)}, [], False, "(curriculum.min_score)"),
        ({EPR: Finding(0.5)}, {EPR: Finding(1.0, flagged=True, reason="bad")}, [], False, "bad"),
        ({EPR: Finding(0.95)}, {EPR: Finding(0.95)}, [], False, "no verifier finds it better"),
        ({EPR: Finding(0.95)}, {EPR: Finding(0.92)}, [], False, "worse"),
        ({EPR: Finding(0.5), LENGTH: Finding(1.0)}, {EPR: Finding(1.0), LENGTH: Finding(0.95)}, [], False, "worse"),
        ({EPR: Finding(1.0), LENGTH: Finding(1.0, flagged=True)}, {EPR: Finding(1.0), LENGTH: Finding(1.0)}, [], True,
         "length not flagged"),
        ({EPR: Finding(0.5)}, {EPR: Finding(None)}, [], False, "no verifier applies"),
        ({EPR: Finding(0.5), LENGTH: Finding(1.0)}, {EPR: Finding(None), LENGTH: Finding(1.0)}, [], False, "better"),
        ({MONITOR: Finding(0.0)}, {MONITOR: Finding(1.0)}, [], False, "no verifier applies"),
        ({}, {}, [], False, "no verifier applies"),
        ({EPR: Finding(0.5)}, {EPR: Finding(float("nan"))}, [], False, "(curriculum.min_score)"),
    ],
)  # fmt: skip
def test_verdict(
    student: dict[str, Finding], teacher: dict[str, Finding], suspicions: list[str], accepted: bool, says: str
) -> None:
    said = decide(ComparedAnswers(student, teacher, suspicions), 0.9)
    assert said.is_accepted is accepted
    assert says in said.reason


FINDINGS = st.dictionaries(
    st.sampled_from([EPR, LENGTH, MONITOR, "template_echo"]),
    st.builds(Finding, st.one_of(st.none(), st.floats(0, 1), st.just(float("nan"))), st.booleans()),
)


@given(FINDINGS, FINDINGS, st.lists(st.just("secret: x"), max_size=1), st.floats(0, 1))
def test_nothing_is_accepted_that_is_not_better_everywhere_it_matters(
    student: dict[str, Finding], teacher: dict[str, Finding], suspicions: list[str], min_score: float
) -> None:
    if not decide(ComparedAnswers(student, teacher, suspicions), min_score).is_accepted:
        return
    deciding = {name: finding for name, finding in teacher.items() if name != MONITOR}
    assert suspicions == []
    assert not any(finding.flagged for finding in deciding.values())
    assert all(finding.score >= min_score for finding in deciding.values() if finding.score is not None)
    better = False
    for name, finding in deciding.items():
        other = student.get(name)
        if other is None:
            continue
        comparable = finding.score is not None and other.score is not None
        assert other.flagged or not comparable or not finding.score < other.score
        better |= other.flagged or (comparable and finding.score > other.score)
    assert better
