"""Renamed commands and options: the former name still works and only the current one is shown."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.cli.main import command_tree

OPTIONS = [
    ("dataset quarantine", "--leave", "--dismiss"),
    ("dataset outliers", "--keep-aside", "--quarantine"),
    ("experience review", "--all-with", "--all-matching"),
    ("experience add", "--about", "--context"),
]


def command(path: str) -> Any:
    found = command_tree()
    for word in path.split():
        found = found.commands[word]
    return found


@pytest.mark.parametrize(("path", "former", "current"), OPTIONS)
def test_former_option_is_read_and_hidden(path: str, former: str, current: str) -> None:
    by_name = {name: option for option in command(path).params for name in option.opts}
    assert (by_name[former].hidden, by_name[current].hidden) == (True, False)
    assert by_name[former].multiple == by_name[current].multiple


def test_former_command_is_the_same_and_hidden() -> None:
    former, current = command("curriculum again"), command("curriculum retry")
    assert (former.hidden, current.hidden) == (True, False)
    assert [option.opts for option in former.params] == [option.opts for option in current.params]
