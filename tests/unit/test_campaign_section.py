"""The `campaign` section: typos are config errors with file, line, key and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.config import a_workspace
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.sections.campaign import CampaignPolicy


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("window: 2am-6am", "campaign.window: '2am-6am' must be HH:MM-HH:MM with two different times"),
        ("window: 02:00-25:00", "campaign.window: '02:00-25:00' must be HH:MM-HH:MM"),
        ("window: 24:00-06:00", "campaign.window: '24:00-06:00' must be HH:MM-HH:MM"),
        ("window: 24:01-02:00", "campaign.window: '24:01-02:00' must be HH:MM-HH:MM"),
        ("window: 04:00-04:00", "campaign.window: '04:00-04:00' must be HH:MM-HH:MM with two different times"),
        (
            "time_zone: Europe/Berln",
            "campaign.time_zone: no time zone 'Europe/Berln'; did you mean 'Europe/Berlin'?",
        ),
        ("time_zone: ../etc/passwd", "campaign.time_zone: no time zone '../etc/passwd'"),
        ("time_zone: Europe", "campaign.time_zone: no time zone 'Europe'"),
        ("triggers: {new_dat: {}}", "campaign.triggers.new_dat: no trigger 'new_dat'; did you mean 'new_data'?"),
        ("triggers: {new_data: {cout: 5}}", "campaign.triggers.new_data.cout: unknown key; did you mean 'count'?"),
        ("triggers: {new_data: {count: 0}}", "campaign.triggers.new_data.count: input should be greater than"),
        ("triggers: {new_data: 100}", "campaign.triggers.new_data: settings are a mapping"),
        ("triggers: {cron: {}}", "campaign.triggers.cron.at: is required"),
        (
            "triggers: {cron: {at: 0 3 * * sunn}}",
            "campaign.triggers.cron.at: '0 3 * * sunn' is no schedule (bad day-of-week); write e.g. '30 3 * * sun'",
        ),
        ("triggers: {cron: {at: 0 3 * *}}", "campaign.triggers.cron.at: '0 3 * *' must have five fields"),
        ("triggers: {cron: {at: 0 0 31 4 *}}", "campaign.triggers.cron.at: '0 0 31 4 *' is no schedule"),
        ("budget: {money: 5}", "campaign.budget.gpu_hour_price: is not set, and an unknown price fits no budget"),
        ("budget: {gpu_hour: 5}", "campaign.budget.gpu_hour: unknown key; did you mean 'gpu_hours'?"),
        (
            "start: bse",
            "campaign.start: 'bse' is no start; write live, base, both, or a version of the profile, e.g. v3",
        ),
        ("start: support@3", "campaign.start: 'support@3' is no start"),
        ("refresh_every: 0", "campaign.refresh_every: 0 is out of range; must be a whole number ≥ 1 and ≤ 1000"),
        ("refresh_evry: 5", "campaign.refresh_evry: unknown key; did you mean 'refresh_every'?"),
        ("windw: 02:00-06:00", "campaign.windw: unknown key; did you mean 'window'?"),
    ],
)
def test_typo_is_refused_with_its_place_and_what_was_meant(tmp_path: Path, body: str, reason: str) -> None:
    workspace = a_workspace(tmp_path, f"campaign:\n  {body}\n")
    with pytest.raises(ConfigError) as caught:
        resolve("dates", workspace=workspace, environ={})
    [line] = caught.value.message.splitlines()
    place, _, told = line.partition(": ")
    assert place == "profiles/dates.yaml:7"
    assert told.startswith(reason), told


def test_one_key_of_a_trigger_from_a_campaign_keeps_the_other_triggers(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    overrides = {"campaign.triggers.new_data.count": 7, "campaign.triggers.quality": None}
    policy = resolve("dates", workspace=workspace, campaign_overrides=overrides, environ={}).profile.campaign
    assert [(trigger.name, settings.model_dump()) for trigger, settings in policy.wanted] == [
        ("new_data", {"count": 7, "weighted": False}),
        ("age", {"days": 30.0, "of": "data"}),
    ]


def test_defaults_are_those_of_the_design() -> None:
    policy = CampaignPolicy()
    settings = {trigger.name: set_to.model_dump() for trigger, set_to in policy.wanted}
    assert settings["new_data"]["count"] == 100
    assert settings["age"]["days"] == 30
    assert (settings["quality"]["drop"], settings["quality"]["audits"]) == (0.1, 2)
    assert (policy.window, policy.time_zone) == ("02:00-06:00", "UTC")
    assert (policy.start, policy.refresh_every, policy.refresh_after_rejections) == ("live", 5, 2)
    assert (policy.refresh_after_plateau, policy.max_accumulated) == (3, 2000)


def test_what_opens_rounds_is_no_part_of_what_a_run_is_made_of(tmp_path: Path) -> None:
    """A run's config fingerprint, and with it its idempotency, depends on no trigger."""
    workspace = a_workspace(tmp_path)
    plain = resolve("dates", workspace=workspace, environ={})
    other = resolve(
        "dates", workspace=workspace, environ={}, overrides=["campaign.window=00:00-24:00", "campaign.start=both"]
    )
    assert plain.profile.campaign != other.profile.campaign
    assert plain.fingerprint == other.fingerprint
    off = resolve("dates", workspace=workspace, environ={}, overrides=["curriculum.enabled=false"])
    assert plain.profile.curriculum.enabled == "auto"
    assert plain.fingerprint == off.fingerprint, "as it was when `false` was the default"
