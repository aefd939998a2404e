"""The schema documents itself, and refuses what makes no sense between its keys."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tunesmith.core.section import Section, doc_of
from tunesmith.profiles.keys import schema_fields, subsection
from tunesmith.profiles.profile import FAMILIES, Base, Profile, Role
from tunesmith.profiles.settings import PHASE_DEADLINES_S, Phase, Settings, StoreSettings, WorkerSettings


def a_profile(**changes: Any) -> Profile:
    return Profile(**{"name": "x", "role": Role.ASSISTANT, "base": Base(path="m", family="llama"), **changes})


def undocumented(section: type[Section]) -> list[str]:
    found = []
    for name, info in section.model_fields.items():
        found += [] if doc_of(section, name) else [name]
        below = subsection(info)
        found += undocumented(below) if below else []
    return found


def test_every_key_of_profile_and_settings_says_what_it_is_for() -> None:
    assert len(schema_fields()) > 60
    assert [*undocumented(Settings), *undocumented(Profile)] == []


def test_settings_and_profile_share_no_top_key() -> None:
    assert not set(Settings.model_fields) & set(Profile.model_fields)


def test_every_role_lists_its_families() -> None:
    assert set(FAMILIES) == set(Role)
    assert all(FAMILIES.values())


@pytest.mark.parametrize("role", list(Role))
def test_family_is_matched_exactly_never_by_substring(role: Role) -> None:
    a_profile(role=role, base=Base(path="m", family="llama"))
    for family in ("lama", "llama4", "Llama", "llama ", ""):
        with pytest.raises(ValidationError, match="is not allowed for role"):
            a_profile(role=role, base=Base(path="m", family=family))


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_disabled_without_reason_is_refused(reason: str | None) -> None:
    with pytest.raises(ValidationError, match="say why"):
        a_profile(enabled=False, disabled_reason=reason)


def test_profile_survives_json() -> None:
    profile = a_profile()
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    ("heartbeat", "lease", "fits"), [(10, 30, True), (15, 30, False), (14.9, 30, True), (30, 10, False)]
)
def test_heartbeat_must_fit_twice_into_the_lease(heartbeat: float, lease: float, fits: bool) -> None:
    if fits:
        WorkerSettings(heartbeat_s=heartbeat, lease_s=lease)
    else:
        with pytest.raises(ValidationError, match=r"must be less than half of worker\.lease_s"):
            WorkerSettings(heartbeat_s=heartbeat, lease_s=lease)


def test_every_phase_has_a_deadline_whatever_is_said() -> None:
    assert set(PHASE_DEADLINES_S) == set(Phase)
    said = WorkerSettings(phase_deadlines_s={Phase.TRAIN: 1.0}).phase_deadlines_s
    assert said == {**PHASE_DEADLINES_S, Phase.TRAIN: 1.0}


@pytest.mark.parametrize("url", ["mysql://x", "store.db", "sqlite://x", "", "postgres://x"])
def test_store_url_of_another_database_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="must begin with sqlite:/// or postgresql://"):
        StoreSettings(url=url)
