"""Every verifier by name: ours, and what installed packages add under the entry-point group `tunesmith.verifiers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.plugins import load_plugin, plugin_names
from tunesmith.core.section import Section
from tunesmith.verifiers.base import Finding, Interaction, Verifier
from tunesmith.verifiers.builtin import BUILTIN

GROUP = "tunesmith.verifiers"
VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in BUILTIN}
"""Ours, by name."""
_MAX_REASON = 200


def find_verifier(name: str) -> Verifier | None:
    """The verifier of that name; None if it is not installed now, or cannot be used: stored findings outlive it."""
    try:
        return VERIFIERS.get(name) or _installed(name)
    except ConfigError:
        return None


def monitors_among(names: Iterable[str]) -> frozenset[str]:
    """The verifiers whose findings are shown and decide no class. One that is not installed now is none of them."""
    found = (find_verifier(name) for name in names)
    return frozenset(verifier.name for verifier in found if verifier is not None and verifier.monitors_only)


def settings_of(name: str, said: Mapping[str, Any]) -> Section:
    """The settings of one verifier; raises ValueError with what is wrong: an unknown name, or an unknown setting."""
    return _settings(_known(name), said)


def verify(interaction: Interaction, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Finding]:
    """What each wanted verifier says, by name; the same interaction and settings always give the same."""
    return {name: _look(_known(name), interaction, said) for name, said in wanted.items()}


def _known(name: str) -> Verifier:
    try:
        verifier = VERIFIERS.get(name) or _installed(name)
    except ConfigError as error:
        raise ValueError(error.message) from error
    if verifier is None:
        raise ValueError(f"no verifier {quoted(name)}{did_you_mean(name, {*VERIFIERS, *plugin_names(GROUP)})}")
    return verifier


def _settings(verifier: Verifier, said: Mapping[str, Any]) -> Section:
    try:
        return verifier.settings.model_validate(dict(said), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = tuple(info.alias or field for field, info in verifier.settings.model_fields.items())
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{verifier.name} has no setting {quoted(key)}{did_you_mean(key, known)}") from None
        problem = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{key + ': ' if key else ''}{problem[:1].lower()}{problem[1:]}") from None


def _look(verifier: Verifier, interaction: Interaction, said: Mapping[str, Any]) -> Finding:
    settings = _settings(verifier, said)
    if verifier.name in VERIFIERS:  # ours keep the contract by test
        return verifier.look(interaction, settings)
    try:
        finding = verifier.look(interaction, settings)
        return _checked(finding)
    except Exception as error:  # an answer that nobody could check must be stored, and must not count as gold
        reason = f"the verifier failed ({type(error).__name__}: {error}); repair or uninstall its package"
        return Finding(None, flagged=True, reason=_plain(reason))


def _checked(finding: object) -> Finding:
    """A finding of an installed verifier as it may be stored; raises where it breaks the contract."""
    if not isinstance(finding, Finding):
        raise TypeError(f"it returned {type(finding).__name__}, not a Finding")
    score = finding.score
    if score is not None and not 0.0 <= float(score) <= 1.0:  # NaN is in no range
        raise ValueError(f"its score is {score}, not between 0 and 1")
    return Finding(None if score is None else float(score), bool(finding.flagged), _plain(str(finding.reason)))


def _plain(reason: str) -> str:
    """One line without control characters, as every database stores it."""
    line = "".join(char if char.isprintable() else " " for char in reason[: 2 * _MAX_REASON])
    return " ".join(line.split())[:_MAX_REASON]


@cache
def _installed(name: str) -> Verifier | None:
    return load_plugin(GROUP, name, Verifier, "verifier")
