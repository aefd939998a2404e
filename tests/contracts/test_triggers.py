"""What every trigger owes, ours and one of a package: settings with defaults, one condition for any facts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from support.config import a_workspace
from support.plugins import EXAMPLES, install_module, install_project, on_path
from tunesmith.core.errors import ConfigError
from tunesmith.core.section import Section, doc_of
from tunesmith.profiles.resolve import resolve
from tunesmith.triggers.base import Condition, LiveQuality, NewData, TriggerFacts
from tunesmith.triggers.registry import GROUP, TRIGGERS, find_trigger, look, settings_of

INSTALLED = "trickle"

SETTINGS: dict[str, dict[str, Any]] = {"cron": {"at": "0 3 * * *"}}
"""Of those that cannot do without."""
NOW = datetime(2026, 11, 16, 3, tzinfo=UTC)
LONG_AGO, AHEAD = NOW - timedelta(days=4000), NOW + timedelta(days=4000)
FACTS = [
    TriggerFacts(now, since, zone, last, new, quality)
    for now in (NOW, datetime(2028, 2, 29, 23, 59, 59, 999999, tzinfo=UTC))
    for zone in (ZoneInfo("UTC"), ZoneInfo("Pacific/Apia"))
    for since in (LONG_AGO, NOW, AHEAD)
    for last in (None, LONG_AGO, NOW, AHEAD)
    for new in (NewData(), NewData(1, 0.5, AHEAD), NewData(10**7, 1e7, LONG_AGO))
    for quality in (LiveQuality(), LiveQuality(0.0, (0.0,) * 5), LiveQuality(1.0, (0.0, 0.0)))
]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with on_path(install_project(EXAMPLES, tmp_path_factory.mktemp("site"))):
        yield


@pytest.mark.parametrize("name", [*sorted(TRIGGERS), INSTALLED])
def test_trigger_says_what_it_is_and_keeps_to_it(name: str) -> None:
    trigger = find_trigger(name)
    assert trigger.name == name
    assert trigger.says
    assert "\n" not in trigger.says
    assert issubclass(trigger.settings, Section)
    assert all(doc_of(trigger.settings, name) for name in trigger.settings.model_fields), "every setting is documented"
    settings = settings_of(name, SETTINGS.get(name, {}))
    seen = set()
    for facts in FACTS:
        condition = trigger.look(settings, facts)
        assert isinstance(condition, Condition)
        assert condition.name == name
        assert condition.value
        assert condition.threshold
        assert not condition.waived, "only the decision waives"
        assert condition == trigger.look(settings, facts)
        seen.add(condition.holds)
    assert seen == {True, False}, "it holds for some facts, and for others not"


def test_trigger_of_a_package_is_named_in_a_profile_like_ours(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, "campaign:\n  triggers: {trickle: {count: 5}}\n")
    policy = resolve("dates", workspace=workspace, environ={}).profile.campaign
    assert [trigger.name for trigger, _ in policy.wanted] == ["new_data", "age", "quality", INSTALLED]
    trigger, settings = policy.wanted[-1]
    week = TriggerFacts(NOW, NOW - timedelta(days=8), new=NewData(5, 5.0, NOW))
    condition = look(trigger, settings, week)
    assert (condition.value, condition.holds) == ("5 new experiences, 8.0 days without a round", True)
    for said, reason in [
        ("{trickl: {}}", r"campaign\.triggers\.trickl: no trigger 'trickl'; did you mean 'trickle'"),
        ("{trickle: {cont: 5}}", r"campaign\.triggers\.trickle\.cont: unknown key; did you mean 'count'"),
    ]:
        (workspace.profiles_dir / "other.yaml").write_text(
            (workspace.profiles_dir / "dates.yaml")
            .read_text()
            .replace("{trickle: {count: 5}}", said)
            .replace("name: dates", "name: other")
        )
        with pytest.raises(ConfigError, match=reason):
            resolve("other", workspace=workspace, environ={})


CODE = """
from tunesmith.core.section import Section
from tunesmith.triggers.base import Trigger
class Nothing(Section):
    pass
def look(settings, facts):
    {body}
TRIGGER = Trigger("odd", "does not keep the contract", Nothing, look)
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('x')", "the trigger failed (KeyError: 'x'); repair or uninstall its package"),
        ("return True", "the trigger failed (TypeError: it returned bool, not a Condition)"),
    ],
)
def test_trigger_that_breaks_the_contract_does_not_hold_and_says_so(tmp_path: Path, body: str, reason: str) -> None:
    site = install_module(tmp_path, "odd_trigger", CODE.format(body=body), {GROUP: {"odd": "odd_trigger:TRIGGER"}})
    with on_path(site):
        condition = look(find_trigger("odd"), settings_of("odd", {}), FACTS[0])
    assert not condition.holds
    assert reason in condition.value


def test_package_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    site = install_module(tmp_path, "odd_trigger", "import no_such_module", {GROUP: {"odd": "odd_trigger:TRIGGER"}})
    with on_path(site), pytest.raises(ValueError, match=r"the installed trigger 'odd' \(odd_trigger:TRIGGER\) cannot"):
        find_trigger("odd")
