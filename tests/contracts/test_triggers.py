"""What every trigger owes: settings with defaults, one condition for any facts, the same for the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tunesmith.core.section import Section
from tunesmith.triggers.base import Condition, LiveQuality, NewData, TriggerFacts
from tunesmith.triggers.registry import TRIGGERS, find_trigger, settings_of

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


@pytest.mark.parametrize("name", sorted(TRIGGERS))
def test_trigger_says_what_it_is_and_keeps_to_it(name: str) -> None:
    trigger = find_trigger(name)
    assert trigger.name == name
    assert trigger.says
    assert "\n" not in trigger.says
    assert issubclass(trigger.settings, Section)
    assert all(info.description for info in trigger.settings.model_fields.values()), "every setting is documented"
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
