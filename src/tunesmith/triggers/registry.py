"""The triggers by name: ours, and those that installed packages bring (entry-point group `tunesmith.triggers`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.plugins import load_plugin, plugin_names
from tunesmith.core.section import Section
from tunesmith.triggers import age, cron, new_data, quality
from tunesmith.triggers.base import Condition, Trigger, TriggerFacts

GROUP = "tunesmith.triggers"
TRIGGERS: dict[str, Trigger] = {each.TRIGGER.name: each.TRIGGER for each in (new_data, age, quality, cron)}


class SettingsError(ValueError):
    """What is wrong with the settings of a trigger; `key` is empty where it is about the trigger itself."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}" if key else reason)
        self.key = key
        self.reason = reason


def find_trigger(name: str) -> Trigger:
    """The trigger of that name. Raises SettingsError with the nearest known name, or if its package is broken."""
    try:
        found = TRIGGERS.get(name) or _installed(name)
    except ConfigError as error:
        raise SettingsError("", error.message) from error
    if found is None:
        raise SettingsError("", f"no trigger {quoted(name)}{did_you_mean(name, {*TRIGGERS, *plugin_names(GROUP)})}")
    return found


def settings_of(name: str, said: Mapping[str, Any]) -> Section:
    """What a trigger is set to, checked. Raises SettingsError."""
    settings = find_trigger(name).settings
    try:
        return settings.model_validate(dict(said), strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        key, reason = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            reason = f"unknown key{did_you_mean(key, settings.model_fields)}"
        elif detail["type"] == "missing":
            reason = f"is required: {settings.model_fields[key].description or ''}"
        raise SettingsError(key, f"{reason[:1].lower()}{reason[1:]}") from None


def look(trigger: Trigger, settings: Section, facts: TriggerFacts) -> Condition:
    """What a trigger says. One of a package that breaks the contract does not hold, and stops nothing else."""
    if trigger.name in TRIGGERS:  # ours keep the contract by test
        return trigger.look(settings, facts)
    try:
        found = trigger.look(settings, facts)
        if not isinstance(found, Condition):
            raise TypeError(f"it returned {type(found).__name__}, not a Condition")
    except Exception as error:  # whatever foreign code raises
        problem = f"the trigger failed ({type(error).__name__}: {error}); repair or uninstall its package"
        return Condition(trigger.name, problem, trigger.says, False)
    return Condition(trigger.name, str(found.value), str(found.threshold), bool(found.holds))


@cache
def _installed(name: str) -> Trigger | None:
    return load_plugin(GROUP, name, Trigger, "trigger")
