"""Settings that are read without the schema of profiles are those that the resolver finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.config import a_workspace
from tunesmith.profiles.keys import subsection
from tunesmith.profiles.plain_settings import _SECTIONS, read_plainly, says_nothing, settings_of
from tunesmith.profiles.resolve import resolve_settings
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.workspace import MIN_FREE_MB, init_workspace


def test_fresh_workspace_says_nothing(tmp_path: Path) -> None:
    said = read_plainly(init_workspace(tmp_path / "ws"), {})
    assert said is not None
    assert says_nothing(said)
    assert settings_of(said) == Settings()
    assert Settings().worker.min_free_mb == MIN_FREE_MB


def test_sections_that_may_be_named_are_those_of_the_schema() -> None:
    def sections(section: type) -> dict[str, object] | None:
        below = {name: subsection(info) for name, info in section.model_fields.items()}  # type: ignore[attr-defined]
        return {name: sections(each) for name, each in below.items() if each is not None} or None

    assert sections(Settings) == _SECTIONS


@pytest.mark.parametrize(
    "project",
    [
        "",
        "store:\nworker:\nserve:\n  hand_over:\n",
        "store: {url: 'sqlite:///other.db'}\n",
        "worker: {lease_s: 60, pass_environment: [HF_TOKEN], phase_deadlines_s: {load: 5.0}}\n",
        "worker: {phase_deadlines_s: {}}\nserve: {port: 1, hand_over: {mode: cpu}}\n",
        "serve: {allowed_hosts: [a, b], max_memory_gb: null}\n",
    ],
)
def test_plain_settings_are_what_the_resolver_finds(tmp_path: Path, project: str) -> None:
    workspace = a_workspace(tmp_path, project=project)
    said = read_plainly(workspace, {})
    assert said is not None
    assert settings_of(said) == resolve_settings(workspace, environ={})
    assert says_nothing(said) == (settings_of(said) == Settings() and "null" not in project and "{}" not in project)


@pytest.mark.parametrize(
    "project",
    [
        "recipe: {lr: 1e-4}\n",  # holds for every profile
        "worker: {leases_s: 60}\n",
        "worker: {lease_s: '60'}\n",
        "worker: {lease_s: null}\n",
        "worker: {heartbeat_s: 20}\n",
        "worker: 3\n",
        "serve: {hysteresis_s: 5}\n",  # an earlier name
        "serve: {hysteresis_s: 5, min_residency_s: 6}\n",
        "store: {url: 'mysql://x'}\n",
        "3: 4\n",
    ],
)
def test_anything_else_is_left_to_the_resolver(tmp_path: Path, project: str) -> None:
    said = read_plainly(a_workspace(tmp_path, project=project), {})
    assert said is None or (settings_of(said) is None and not says_nothing(said))


@pytest.mark.parametrize("project", ["[", "- a\n", "store:\nstore:\n"])
def test_file_that_cannot_be_read_is_left_to_the_resolver(tmp_path: Path, project: str) -> None:
    assert read_plainly(a_workspace(tmp_path, project=project), {}) is None


def test_variables_are_left_to_the_resolver(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    assert read_plainly(workspace, {"TUNESMITH__WORKER__LEASE_S": "60"}) is None
    assert read_plainly(workspace, {"TUNESMITH_WORKSPACE": "x", "HOME": "/"}) is not None
