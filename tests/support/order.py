"""Which tests run, where and in what order: `--shuffle`, `--fast`, and one process for tests that share a fixture.

`pytest FILE` runs what `make test` runs of it: drills with their full counts (hours), big engines and the GPU only
where `-m` or the name of a test asks for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tunesmith")
    group.addoption(
        "--shuffle",
        metavar="SEED",
        help="run modules, and the tests within each, in an order drawn with this seed ('new' draws a seed)",
    )
    group.addoption(
        "--fast",
        action="store_true",
        help="leave out what needs PostgreSQL and what is marked slow (make test-fast)",
    )


def choose_seed(config: pytest.Config) -> None:
    """Worker processes are told the seed of the process that started them, so that all have the same order."""
    if hasattr(config, "workerinput"):
        config.option.shuffle = config.workerinput["shuffle"]
    elif config.option.shuffle == "new":
        config.option.shuffle = str(random.SystemRandom().randrange(10_000))


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.markexpr and not any("::" in argument for argument in config.args):
        _leave_out(config, items, lambda item: any(map(item.get_closest_marker, ("soak", "extra", "gpu"))))
    if config.option.fast:
        _leave_out(config, items, _is_slow)
    if config.option.shuffle:
        items[:] = shuffled(items, config.option.shuffle)
    for item in items:
        if _shares_a_fixture(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def shuffled(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Modules stay together, so that a fixture of a module is still made once."""
    drawn = random.Random(seed)
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = sorted(modules)
    drawn.shuffle(names)
    for name in names:
        drawn.shuffle(modules[name])
    return [item for name in names for item in modules[name]]


def _leave_out(config: pytest.Config, items: list[pytest.Item], leaves_out: Callable[[pytest.Item], bool]) -> None:
    left_out = [item for item in items if leaves_out(item)]
    items[:] = [item for item in items if not leaves_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _is_slow(item: pytest.Item) -> bool:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    needed = getattr(item, "fixturenames", ())
    return "postgres" in needed or "postgres" in parameters.values() or item.get_closest_marker("slow") is not None


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether it uses a fixture that is made once for its module: two processes would make it twice."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return any(definitions and definitions[-1].scope == "module" for definitions in known.values())
