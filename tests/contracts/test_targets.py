"""Every kind of target keeps one contract: refuse, try, load, flip, observe, switch, drain, unload, lose, come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from target_worlds import WORLDS, Made, World
from tunesmith.errors import ConfigError
from tunesmith.targets.base import TargetError
from tunesmith.targets.registry import TARGETS, make_target

pytestmark = pytest.mark.xdist_group("targets")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.at(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(params=sorted(TARGETS))
def world(request: pytest.FixtureRequest, made: Made, tmp_path: Path) -> Iterator[World]:
    with WORLDS[request.param](tmp_path, made) as world:
        yield world


def serve(world: World, number: int) -> None:
    """Load and flip, as a deployment does."""
    adapter = world.first if number == 1 else world.second
    world.target().load(adapter)
    world.wanted(adapter)
    world.target().flip(adapter)


def test_contract_is_kept(world: World) -> None:
    first, second = world.first, world.second
    target = world.target()
    # nothing is served yet, and a look changes nothing
    assert target.observe() is None
    # what cannot be served is refused with the reason; nothing is served afterwards
    refusal = target.refusal(world.refused)
    assert refusal is not None
    assert world.why in refusal
    assert world.refused.name not in world.target().loaded()
    # a trial of what can be served changes nothing that is served
    assert target.refusal(first) is None
    assert target.observe() is None
    # loaded beside what is served; twice is once
    target.load(first)
    world.target().load(first)
    assert first.name in world.target().loaded()
    assert world.target().observe() is None
    # flipped; twice is once
    world.wanted(first)
    target.flip(first)
    world.target().flip(first)
    assert world.target().observe() == first.digest
    # a trial and a load of the next one leave it served
    assert target.refusal(second) is None
    target.load(second)
    assert world.target().observe() == first.digest
    assert {first.name, second.name} <= world.target().loaded()
    # what is served is not let go
    if world.kind != "command":  # there the program decides
        with pytest.raises(TargetError):
            target.unload(first.name)
    assert world.target().observe() == first.digest
    # the switch; the old one drains and is let go, twice is once
    world.wanted(second)
    target.flip(second)
    assert world.target().observe() == second.digest
    target.drain(first.name, 5.0)
    target.unload(first.name)
    target.unload(first.name)
    assert world.target().observe() == second.digest
    assert first.name not in world.target().loaded()
    assert second.name in world.target().loaded()
    target.unload(f"{first.name}99")
    # back to the one before, which must be loaded again
    serve(world, 1)
    assert world.target().observe() == first.digest
    # and to the bare base
    world.wanted(None)
    target.flip(None)
    assert world.target().observe() is None
    target.unload(second.name)
    target.unload(first.name)
    assert not {first.name, second.name} & world.target().loaded()


def test_lost_version_is_seen_and_loaded_again(world: World) -> None:
    serve(world, 1)
    assert world.target().observe() == world.first.digest
    world.lose()
    with pytest.raises(TargetError):
        world.target().observe()
    world.mend()
    serve(world, 1)
    assert world.target().observe() == world.first.digest
    if world.kind == "embedded":  # a third start of a real server would tell nothing more
        return
    world.lose()
    serve(world, 2)  # what is wanted moved on while nobody served
    assert world.target().observe() == world.second.digest


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_unknown_option_is_refused_with_the_nearest(kind: str, tmp_path: Path) -> None:
    misspelt = {"directory": "pathh", "command": "programs"}.get(kind, "timeout")
    with pytest.raises(ConfigError, match=misspelt) as caught:
        make_target(kind, {misspelt: "x"}, root=tmp_path, profile="support")
    assert misspelt.rstrip("hs")[:4] in caught.value.message.partition(misspelt)[2]
