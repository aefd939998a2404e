"""Every `tunesmith …` command line in the documents names a command and options that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tunesmith.cli.main import command_tree
from tunesmith.profiles.settings import ServeSettings

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
_CODE = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.S)
_COMMAND = re.compile(r"^(?:TUNESMITH\w*=\S* )?tunesmith ([^#\n]+)", re.M)


def _commands(page: Path) -> list[list[str]]:
    """The words after `tunesmith` in every command line of a page, in blocks of code and within sentences."""
    found = []
    for block, span in _CODE.findall(page.read_text()):
        for text in _COMMAND.findall(block or span):
            words = [word.strip("[],.:") for word in re.split(r" (?:&&|;|>|\|) ", text)[0].split()]
            found.append([word for word in words if word and word != "…"])
    return found


def _problem(words: list[str]) -> str | None:
    """What is wrong with a command line; None if the parser could take it."""
    command: Any = command_tree()
    options = {name for param in command.params for name in param.opts} | {"--help", "-h"}
    for word in words:
        if word.startswith("-") and word.split("=")[0] not in options and word != "--":
            return f"no option {word}"
        known = getattr(command, "commands", None)
        if known is None or word.startswith("-"):
            continue
        alternatives = [each for each in word.split("\\|") if each]
        if not all(each in known for each in alternatives):
            return f"no command {word}"
        command = known[alternatives[0]]
        options |= {name for param in command.params for name in param.opts}
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    problems = [f"tunesmith {' '.join(words)}: {_problem(words)}" for words in _commands(page) if _problem(words)]
    assert problems == []


def test_commands_are_found_and_wrong_ones_are_told() -> None:
    assert sum(len(_commands(page)) for page in PAGES) > 80
    assert _problem(["run", "sumbit", "support"]) == "no command sumbit"
    assert _problem(["run", "submit", "support", "--prioritty", "high"]) == "no option --prioritty"


@pytest.mark.parametrize("setting", ["host", "key_file", "allowed_origins"])
def test_security_page_tells_what_lets_others_in(setting: str) -> None:
    assert setting in ServeSettings.model_fields
    assert f"`serve.{setting}`" in (ROOT / "SECURITY.md").read_text()
