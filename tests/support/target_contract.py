"""What every target must do, whoever serves there: used over stand-ins, and over real servers where there are some."""

from __future__ import annotations

import pytest

from support.target_worlds import World
from tunesmith.deployment.targets.base import TargetError


def serve(world: World, number: int) -> None:
    """Load and flip, as a deployment does."""
    adapter = world.first if number == 1 else world.second
    world.target().load(adapter)
    world.wanted(adapter)
    world.target().flip(adapter)


def keeps_the_contract(world: World) -> None:
    """The life of two versions at one target, step by step."""
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


def comes_back(world: World) -> None:
    """What was lost is seen to be lost, and loading it again brings it back."""
    serve(world, 1)
    assert world.target().observe() == world.first.digest
    world.lose()
    with pytest.raises(TargetError):
        world.target().observe()
    world.mend()
    serve(world, 1)
    assert world.target().observe() == world.first.digest
    if world.kind == "embedded" or world.about.get("is_slow"):  # another start would tell nothing more
        return
    world.lose()
    serve(world, 2)  # what is wanted moved on while nobody served
    assert world.target().observe() == world.second.digest
