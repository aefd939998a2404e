"""The code fingerprint hashes every module that a trainer computes with, by content and not by place."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import tunesmith
from tunesmith.programs.fingerprint import source_files

PACKAGE = Path(tunesmith.__file__).resolve().parent
TRAINERS = ("training/trainers/native/train.py", "training/trainers/trl/train.py", "training/trainers/trl/unsloth.py")
COMPUTING = ("models", "training", "datasets")


def imported_by(path: Path) -> set[Path]:
    """Modules of tunesmith that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (PACKAGE.joinpath(*name.split(".")[1:]) for name in names if name.startswith("tunesmith."))
    return {path.with_suffix(".py") for path in ours if path.with_suffix(".py").is_file()}


def test_whatever_a_trainer_computes_with_is_hashed() -> None:
    reached: set[Path] = set()
    waiting = [PACKAGE / name for name in TRAINERS]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += imported_by(path)
    computing = {path for path in reached if path.relative_to(PACKAGE).parts[0] in COMPUTING}
    assert len(computing) > 40
    assert {path.relative_to(PACKAGE).as_posix() for path in computing - set(source_files())} == set()


def fingerprint_of(package: Path) -> str:
    code = "from tunesmith.programs.fingerprint import code_fingerprint; print(code_fingerprint())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(package.parent)},
    )
    return done.stdout.strip()


def test_a_moved_module_or_another_import_changes_nothing_and_another_line_does(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "tunesmith"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = fingerprint_of(copy)
    (copy / "models" / "chat.py").rename(copy / "models" / "dialogue.py")
    scoring = copy / "models" / "scoring.py"
    scoring.write_text(
        scoring.read_text().replace("\nimport ", "\nfrom tunesmith.elsewhere import (\n    x,\n)\nimport ", 1)
    )
    assert fingerprint_of(copy) == before
    scoring.write_text(scoring.read_text() + "\nCHANGED = 1\n")
    assert fingerprint_of(copy) != before


def test_a_source_that_is_gone_is_an_error_and_never_an_empty_hash(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "tunesmith"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "training" / "rules")
    code = "from tunesmith.programs.fingerprint import source_files; source_files()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(copy.parent)}
    )
    assert done.returncode != 0
    assert "training/rules" in done.stderr
