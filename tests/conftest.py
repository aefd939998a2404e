"""Puts `tests` on the import path, for `support`; what is costly is made once for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support import order
from support.places import MEMORY, has_roomy_memory
from support.quick_processes import fork_programs
from support.shared_work import keep_what_is_there, share_compiled_statements

# in memory where there is room: the product flushes every file that it publishes, which a disk answers in milliseconds
# and memory at once (`--basetemp` names another place)
if has_roomy_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# tiny models: threads that wait for each other cost more than they bring, above all beside another test process
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, and every program the tests start would inherit that: the drills
# that interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

share_compiled_statements()

# half the usual number of examples, without a clock: the machine may be busy. `make soak` draws a thousand of each.
settings.register_profile("suite", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    order.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    order.choose_seed(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shuffle"] = node.config.option.shuffle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.shuffle:
        terminalreporter.write_line(f"the order was that of --shuffle {config.option.shuffle}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order.arrange(config, items)


def pytest_collection_finish() -> None:
    keep_what_is_there()


@pytest.fixture(scope="session")
def cache_of_bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trained base models are kept for this session, shared by its worker processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bases"


@pytest.fixture(autouse=True)
def _forked_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers fork our programs, which saves seconds of imports each; see support.quick_processes."""
    # a fork of a process that has asked for CUDA cannot use it
    if request.node.get_closest_marker("real_programs") or request.node.get_closest_marker("gpu"):
        yield
        return
    end = fork_programs()
    yield
    end()
