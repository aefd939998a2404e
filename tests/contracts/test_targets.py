"""Every kind of target keeps one contract: refuse, try, load, flip, observe, switch, drain, unload, lose, come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.plugins import EXAMPLES, install_project, on_path
from support.target_contract import comes_back, keeps_the_contract
from support.target_worlds import WORLDS, Made, World, shared_adapters
from tunesmith.core.errors import ConfigError
from tunesmith.deployment.targets.registry import TARGETS, make_target

pytestmark = pytest.mark.xdist_group("targets")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return shared_adapters(tmp_path_factory.getbasetemp() / "adapters-of-targets")


@contextmanager
def a_target_of_a_package(root: Path, made: Made) -> Iterator[World]:
    def lose() -> None:
        for version in (root / "served").glob("support@*"):
            (version / "adapter_model.safetensors").write_bytes(b"")

    why = "not what the manifest"
    with on_path(install_project(EXAMPLES, root / "site")):
        yield World("nginx_map", {"folder": "served"}, root, made.first, made.second, made.damaged(root), why, lose)


@pytest.fixture(params=[*sorted(TARGETS), "nginx_map"])
def world(request: pytest.FixtureRequest, made: Made, tmp_path: Path) -> Iterator[World]:
    with {**WORLDS, "nginx_map": a_target_of_a_package}[request.param](tmp_path, made) as world:
        yield world


def test_contract_is_kept(world: World) -> None:
    keeps_the_contract(world)


def test_lost_version_is_seen_and_loaded_again(world: World) -> None:
    comes_back(world)


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_unknown_option_is_refused_with_the_nearest(kind: str, tmp_path: Path) -> None:
    misspelt = {"directory": "pathh", "command": "programs"}.get(kind, "timeout")
    with pytest.raises(ConfigError, match=misspelt) as caught:
        make_target(kind, {misspelt: "x"}, root=tmp_path, profile="support")
    assert misspelt.rstrip("hs")[:4] in caught.value.message.partition(misspelt)[2]
