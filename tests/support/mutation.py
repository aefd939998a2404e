"""Mutation testing of small pure modules: change one thing at a time, and see whether a test notices.

    python tests/support/mutation.py [GROUP …] [--every N]

A mutant is a module with one comparison, sign, number, condition, field or return value changed. It is *killed* if the
tests fail. What survives is printed with its line: a missing test, or a change that makes no difference.
Works in a copy of `src`; nothing in the checkout is changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 120.0
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "gate": (
        ["evaluation/rules/gate.py", "evaluation/rules/checks.py", "evaluation/rules/evidence.py"],
        ["tests/unit/test_gate.py"],
    ),
    "comparison": (
        ["evaluation/rules/comparison.py"],
        ["tests/unit/test_gate.py", "tests/unit/test_evaluation.py", "tests/unit/test_significance.py"],
    ),
    "significance": (
        ["evaluation/rules/significance.py"],
        ["tests/unit/test_significance.py", "tests/unit/test_evaluation.py", "tests/unit/test_gate.py"],
    ),
}
"""Modules below src/tunesmith, and the tests that must notice a change of them."""
_PRELOADED = (
    "hypothesis",
    "hypothesis.strategies",
    "tunesmith.client",
    "tunesmith.cli.main",
    "tunesmith.profiles.profile",
)
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
_TWINS = {"low": "high", "candidate": "baseline", "guard_low": "guard_high", "n": "num_left_out"}
_FIELDS = {**_TWINS, **{twin: name for name, twin in _TWINS.items()}}


@dataclass(frozen=True)
class Mutant:
    module: Path
    line: int
    what: str
    source: str


def mutants_of(module: Path) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(module.read_text())
    for number, node in enumerate(_code(tree)):
        for variant in range(len(_changes(node))):
            changed = copy.deepcopy(tree)
            target = list(_code(changed))[number]
            before = ast.unparse(target)
            _changes(target)[variant]()
            what = f"{before}  →  {ast.unparse(target)}"
            yield Mutant(module, getattr(node, "lineno", 0), what, ast.unparse(changed))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no docstrings."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _code(node)


def _changes(node: ast.AST) -> list[Callable[[], None]]:
    """What can be changed about a node, each as a function that does it."""
    field, values = "", list[Any]()
    match node:
        case ast.Compare(ops=[op]):
            field, values = "ops", [[to()] for to in _COMPARISONS[type(op)]]
        case ast.BoolOp(op=op):
            field, values = "op", [ast.Or() if isinstance(op, ast.And) else ast.And()]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            field, values = "operand", [ast.UnaryOp(ast.Not(), operand)]
        case ast.UnaryOp(op=ast.USub()):
            field, values = "op", [ast.UAdd()]
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            field, values = "op", [_OPERATORS[type(operator)]()]
        case ast.Constant(value=bool() as value):
            field, values = "value", [not value]
        case ast.Constant(value=int() | float() as value):
            field, values = "value", [value + 1]
        case ast.Attribute(attr=name) if name in _FIELDS:
            field, values = "attr", [_FIELDS[name]]
        case ast.Return(value=ast.AST() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            field, values = "value", [ast.Constant(None)]
        case ast.If() | ast.IfExp():
            field, values = "test", [ast.Constant(True), ast.Constant(False)]
    return [partial(setattr, node, field, value) for value in values]


def is_killed(mutant: Mutant, copied: Path, tests: list[str]) -> bool:
    """Run the tests in a fork that has everything in memory but the mutant's package."""
    path = copied / mutant.module.relative_to(ROOT / "src")
    whole = path.read_text()
    path.write_text(mutant.source)
    try:
        child = os.fork()
        if child == 0:
            _run_tests(".".join(path.relative_to(copied).parts[:2]), tests)
        deadline = time.monotonic() + TIMEOUT_S
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        return ended[1] != 0
    finally:
        path.write_text(whole)


def _run_tests(package: str, tests: list[str]) -> NoReturn:
    code = 1
    try:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        quietly = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main(["-x", "-m", "not slow", *quietly, *tests]))
    finally:
        os._exit(code)


def run(group: str, every: int) -> tuple[int, int]:
    """Try every n-th mutant of a group; how many were killed, of how many."""
    modules, tests = GROUPS[group]
    mutants = [mutant for module in modules for mutant in mutants_of(ROOT / "src" / "tunesmith" / module)][::every]
    killed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        sys.path.insert(0, str(copied))
        for name in _PRELOADED:
            importlib.import_module(name)
        whole = Mutant(mutants[0].module, 0, "unchanged", mutants[0].module.read_text())
        if is_killed(whole, copied, tests):
            sys.exit("the tests fail without any change")
        for number, mutant in enumerate(mutants, start=1):
            if is_killed(mutant, copied, tests):
                killed += 1
            else:
                print(f"survived {mutant.module.name}:{mutant.line}  {mutant.what}", flush=True)
            if number % 25 == 0:
                print(f"{number} of {len(mutants)}, {time.monotonic() - began:.0f} s", flush=True)
        sys.path.remove(str(copied))
    return killed, len(mutants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all unless named")
    parser.add_argument("--every", type=int, default=1, help="take every n-th mutant only")
    asked = parser.parse_args()
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    for group in asked.groups or GROUPS:
        child = os.fork()  # each group with modules of its own copy
        if child == 0:
            killed, num = run(group, asked.every)
            print(f"{group}: {killed} of {num} killed ({killed / num:.1%})", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
