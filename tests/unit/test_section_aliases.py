"""Renamed settings: the earlier name is still read in every layer; giving both names is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from support.config import a_workspace
from support.rows import a_spec
from tunesmith.core.errors import ConfigError, NotFound
from tunesmith.core.section import Section, doc_of
from tunesmith.profiles.keys import schema_fields
from tunesmith.profiles.profile import GateSettings, Method, Recipe
from tunesmith.profiles.resolve import explain, resolve, resolve_settings
from tunesmith.profiles.sample import sample_project
from tunesmith.profiles.settings import ServeSettings
from tunesmith.runs.spec import RunSpec


class Colour(StrEnum):
    RED = "red"


class Inner(Section):
    aliases: ClassVar[Mapping[str, str]] = {"size": "width", "breadth": "width"}

    width: int = 1
    """How wide it is."""
    colours: tuple[Colour, ...] = ()


class Outer(Section):
    inner: Inner = Inner()


@pytest.mark.parametrize("name", ["width", "size", "breadth"])
def test_section_every_name_of_a_key_is_read_strictly_from_json(name: str) -> None:
    outer = Outer.model_validate_json(f'{{"inner": {{"{name}": 3, "colours": ["red"]}}}}', strict=True)
    assert outer.inner == Inner(width=3, colours=(Colour.RED,))
    assert outer.inner.model_dump(mode="json") == {"width": 3, "colours": ["red"]}


def test_section_two_names_of_one_key_are_refused() -> None:
    with pytest.raises(ValidationError, match="size"):
        Inner.model_validate({"size": 3, "width": 3})


def test_section_documents_the_current_name_only() -> None:
    properties = Inner.model_json_schema()["properties"]
    assert set(properties) == {"width", "colours"}
    assert doc_of(Inner, "width") == "How wide it is."


def serve(tmp_path: Path, project: str = "", environ: Mapping[str, str] | None = None) -> ServeSettings:
    return resolve_settings(a_workspace(tmp_path, project=project), environ=environ or {}).serve


@pytest.mark.parametrize(
    ("project", "environ"),
    [
        ("serve:\n  hysteresis_s: 7\n", {}),
        ("serve:\n  min_residency_s: 7\n", {}),
        ("", {"TUNESMITH__SERVE__HYSTERESIS_S": "7"}),
        ("serve:\n  min_residency_s: 9\n", {"TUNESMITH__SERVE__HYSTERESIS_S": "7"}),
        ("serve:\n  hysteresis_s: 9\n", {"TUNESMITH__SERVE__MIN_RESIDENCY_S": "7"}),
    ],
)
def test_settings_earlier_name_is_read_and_layers_still_win(
    tmp_path: Path, project: str, environ: dict[str, str]
) -> None:
    assert serve(tmp_path, project, environ).min_residency_s == 7.0


def test_settings_every_renamed_key_of_serving_is_read(tmp_path: Path) -> None:
    hand_over = serve(tmp_path, "serve:\n  hand_over:\n    requests: refuse\n    patience_s: 5\n").hand_over
    assert (hand_over.when_released, hand_over.unused_timeout_s) == ("refuse", 5.0)


@pytest.mark.parametrize(
    ("project", "environ", "message"),
    [
        (
            "serve:\n  min_residency_s: 1\n  hysteresis_s: 1\n",
            {},
            "serve.min_residency_s: is given twice: hysteresis_s is an earlier name of it; keep only min_residency_s",
        ),
        (
            "",
            {"TUNESMITH__SERVE__HYSTERESIS_S": "1", "TUNESMITH__SERVE__MIN_RESIDENCY_S": "1"},
            "environment TUNESMITH__SERVE__HYSTERESIS_S: serve.hysteresis_s: is given twice: "
            "TUNESMITH__SERVE__MIN_RESIDENCY_S is the current name",
        ),
        ("serve:\n  hysteresis_s: -1\n", {}, "tunesmith.yaml:2: serve.min_residency_s: -1 is out of range"),
        ("serve:\n  min_residenc_s: 1\n", {}, "did you mean 'min_residency_s'?"),
    ],
)
def test_settings_refusal_names_the_current_key(
    tmp_path: Path, project: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(tmp_path, project, environ)
    assert message in caught.value.message


def test_mapping_with_two_names_is_refused(tmp_path: Path) -> None:
    both: dict[str, Any] = {"serve.hysteresis_s": 1, "serve.min_residency_s": 1}
    with pytest.raises(ConfigError, match="is given twice"):
        resolve_settings(a_workspace(tmp_path), environ={}, overrides=both)


def test_explain_finds_a_key_by_its_earlier_name(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, project="serve:\n  hysteresis_s: 7\n")
    resolved = resolve("dates", workspace=workspace, environ={})
    (row,) = explain(resolved, "serve.hysteresis_s")
    assert (row.key, row.value, str(row.origin)) == ("serve.min_residency_s", 7.0, "tunesmith.yaml:2")
    with pytest.raises(NotFound, match="unknown key"):
        explain(resolved, "serve.hysteresis")


RENAMED = {
    "gate.min_n": ("gate.min_cases", 7),
    "recipe.clip": ("recipe.max_grad_norm", 0.5),
    "curriculum.bar": ("curriculum.min_score", 0.7),
    "experience.mix.min_beside": ("experience.mix.min_eval_examples", 3),
}


@pytest.mark.parametrize("earlier", RENAMED)
def test_profile_is_read_with_the_earlier_and_with_the_current_name_of_a_key(tmp_path: Path, earlier: str) -> None:
    current, value = RENAMED[earlier]
    for number, key in enumerate((earlier, current)):
        workspace = a_workspace(tmp_path / str(number))
        resolved = resolve("dates", workspace=workspace, environ={}, overrides=(f"{key}={value}",))
        assert resolved.values[current] == value
        assert earlier not in resolved.values
    assert earlier not in schema_fields()


def test_stored_spec_with_earlier_names_is_read() -> None:
    spec = a_spec("ds-1", gate=GateSettings(min_cases=7), recipe=Recipe(method=Method.SFT, max_grad_norm=0.5))
    stored = spec.model_dump(mode="json")
    stored["gate"]["min_n"] = stored["gate"].pop("min_cases")
    stored["recipe"]["clip"] = stored["recipe"].pop("max_grad_norm")
    assert RunSpec.model_validate_json(json.dumps(stored), strict=True) == spec


def test_sample_and_schema_name_the_current_key_only() -> None:
    assert "min_residency_s" in sample_project()
    assert "hysteresis_s" not in sample_project()
    assert "serve.hysteresis_s" not in schema_fields()
