"""What the command and unsloth trainers refuse before anything is queued, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.config import a_base, a_workspace
from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError
from tunesmith.datasets.screens.detectors import check_installed
from tunesmith.evaluation.evaluators.registry import find_metric
from tunesmith.profiles.checks import check_profile
from tunesmith.profiles.resolve import resolve
from tunesmith.training.trainers.command import argv_of, changed_since_sealed, environment_of, sealed
from tunesmith.training.trainers.registry import find_trainer

COMMAND, NATIVE = find_trainer("command"), find_trainer("native")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("print('hello')\n")
    (tmp_path / "mine.sh").write_text("#!/bin/sh\n")
    (tmp_path / "mine.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "argv: the command trainer needs a list"),
        ({"argv": "python mine.py"}, "argv: the command trainer needs a list"),
        ({"argv": []}, "argv: Tuple should have at least 1 item"),
        ({"argv": [1]}, r"argv\.0: Input should be a valid string"),
        ({"argv": [""]}, "argv: an element is empty"),
        ({"argv": ["python", "a\0b"]}, "argv: an element is empty or holds a NUL"),
        ({"argv": ["python"]}, "argv: name the program too"),
        ({"argv": ["mine.py"]}, "'mine.py' is not executable; chmod"),
        ({"argv": ["no-such-program-here"]}, "no program 'no-such-program-here' in the workspace or on PATH"),
        ({"argv": ["./bin/absent"]}, r"no program './bin/absent' in the workspace"),
        ({"argv": ["python", "mine.py"], "enviroment": []}, "no option 'enviroment'"),
        ({"argv": ["python", "mine.py"], "env": ["A=1"]}, "env: 'A=1' is not the name of a variable"),
        ({"argv": ["python", "mine.py"], "env": "HOME"}, "trainer.options.env: "),
        ({"argv": ["python", "mine.py"], "sha256": {}}, "sha256: tunesmith writes it itself"),
    ],
)
def test_command_bad_options_are_refused_in_one_line(root: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        sealed(COMMAND, options, root)
    assert caught.value.message.startswith("trainer.options")
    assert "\n" not in caught.value.message


def test_command_argv_names_files_of_the_workspace_and_programs_on_the_path(root: Path) -> None:
    argv = argv_of(COMMAND, {"argv": ["python", "mine.py", "--steps", "7", "other"]}, root)
    assert argv == ("python", str(root / "mine.py"), "--steps", "7", "other")
    assert argv_of(COMMAND, {"argv": ["mine.sh"]}, root) == (str(root / "mine.sh"),)
    # no shell of ours
    assert argv_of(COMMAND, {"argv": ["sh", "-c", "true; false"]}, root)[1:] == ("-c", "true; false")
    assert argv_of(NATIVE, {}, root) == NATIVE.argv


def test_command_sees_only_the_usual_variables_and_those_it_is_given() -> None:
    environ = {"PATH": "/bin", "API_TOKEN": "secret", "MY_SETTING": "1"}
    options = {"argv": ["python", "mine.py"], "env": ["MY_SETTING", "ABSENT"]}
    ours = {"PATH": "/bin", **child_environment({})}
    assert environment_of(COMMAND, options, environ) == {**ours, "MY_SETTING": "1"}
    assert environment_of(NATIVE, {}, environ) == ours
    assert environment_of(NATIVE, {}, environ, ["API_TOKEN"]) == {**ours, "API_TOKEN": "secret"}


def test_command_program_that_changes_after_sealing_is_noticed(root: Path) -> None:
    options = sealed(COMMAND, {"argv": ["python", "mine.py", "--steps", "7"]}, root)
    assert list(options["sha256"]) == ["mine.py"]
    assert argv_of(COMMAND, options, root) == ("python", str(root / "mine.py"), "--steps", "7")
    assert changed_since_sealed(COMMAND, options, root) is None
    (root / "mine.py").write_text("print('other')\n")
    assert changed_since_sealed(COMMAND, options, root) == (
        "trainer.options.argv: 'mine.py' changed since the run was submitted"
    )
    (root / "mine.py").unlink()
    assert changed_since_sealed(COMMAND, options, root) is not None


def test_unsloth_on_a_cpu_is_refused_before_queueing(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, "recipe:\n  max_length: 512\n")
    a_base(workspace)
    resolved = resolve("dates", workspace=workspace, environ={}, overrides=["hardware.tier=cpu"])
    with pytest.raises(ConfigError, match="trainer unsloth does not accept cpu; it accepts: small-gpu"):
        check_profile(
            resolved,
            workspace,
            locked=None,
            trainer=find_trainer("unsloth"),
            target_kinds={"directory"},
            check_detector=check_installed,
            check_metric=find_metric,
        )
