"""The `experience` section of a profile: documented defaults, layers that add, unknown names refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.config import a_workspace
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.sections.experience import ExperiencePolicy


def policy(tmp_path: Path, body: str, *overrides: str) -> ExperiencePolicy:
    workspace = a_workspace(tmp_path, body)
    return resolve("dates", workspace=workspace, overrides=overrides, environ={}).profile.experience


def test_defaults_are_those_of_the_design() -> None:
    defaults = ExperiencePolicy()
    assert set(defaults.wanted) == {"template_echo", "length"}  # the others depend on the task
    limits = defaults.classes
    assert (limits.gold_entities, limits.poor_entities) == (0.9, 0.7)
    assert (limits.gold_feedback, limits.poor_feedback, limits.min_poor_ratings) == (0.8, 0.3, 3)


def test_verifiers_of_the_profile_add_to_the_defaults_and_null_takes_one_out(tmp_path: Path) -> None:
    body = (
        "experience:\n  verifiers:\n    length: {max_chars: 100}\n    template_echo: null\n"
        "    json_schema:\n      schema: {type: object, required: [city], properties: {city: {type: string}}}\n"
    )
    wanted = policy(tmp_path, body, "experience.verifiers.exact_match={}").wanted
    assert set(wanted) == {"length", "json_schema", "exact_match"}
    assert wanted["length"] == {"max_chars": 100}
    assert wanted["json_schema"]["schema"]["properties"] == {"city": {"type": "string"}}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("  verifiers: {jsonschema: {}}\n", "no verifier 'jsonschema'; did you mean 'json_schema'?"),
        ("  verifiers: {length: {max_char: 5}}\n", "length has no setting 'max_char'; did you mean 'max_chars'?"),
        ("  verifiers: {length: 5}\n", "settings are a mapping"),
        ("  verifiers: {json_schema: {}}\n", "schema: field required"),
        ("  verifers: {}\n", "did you mean 'verifiers'?"),
        ("  classes: {poor_entities: 0.95}\n", "must not be more than gold_entities"),
        ("  classes: {gold_feedback: 1.5}\n", "≤ 1"),
        ("  capture: {share: -1}\n", "≥ 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_key_and_line(tmp_path: Path, body: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, f"experience:\n{body}")
    assert problem in caught.value.message
    assert "profiles/dates.yaml:7" in caught.value.message
    assert "experience." in caught.value.message
