"""The house rules that a reader relies on, checked on the source itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tunesmith"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if "migrations/versions" not in path.as_posix())

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|PRAGMA)\s")


STARTS_A_PROCESS = {f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output")}
STARTS_A_PROCESS |= {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"}
MOVES_A_RUN = "runs.move"
WATCHED = {*STARTS_A_PROCESS, MOVES_A_RUN}


def drawn_levels() -> list[set[str]]:
    """The packages of the drawing in ARCHITECTURE.md, a set for each of its lines, the lowest first."""
    drawing = PAGE.split("## Packages, and the direction of imports")[1].split("```")[1]
    # what stands to the right of column 36 is said about a line, and names no package
    return [set(re.findall(r"[a-z_]+", line[:36])) for line in reversed(drawing.strip("\n").splitlines())]


# Lower never imports higher, and packages on one line do not import each other.
LEVELS = [*drawn_levels(), {"__main__"}]
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
TORCH = {"torch", "transformers", "peft", "safetensors", "accelerate", "numpy", "matplotlib"}
TORCH |= {"trl", "datasets", "unsloth"}
MAY_IMPORT_TORCH_AT_TOP = (
    "training/trainers/native/",
    "training/trainers/trl/",
    "evaluation/evaluators/model_backend",
    "evaluation/evaluators/probe",
    "models/",
    "serving/engine/",
    "demo/base_model",
)


pytestmark = pytest.mark.xdist_group("architecture")  # each file is parsed once


@dataclass
class Module:
    """What the rules ask about a module. Its tree is not kept: millions of nodes would slow the garbage collector."""

    docstring: str | None
    num_lines: int
    imports: set[str] = field(default_factory=set)
    imports_at_top: set[str] = field(default_factory=set)
    functions: list[tuple[str, int]] = field(default_factory=list)
    """Names, with their number of lines."""
    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, int, set[str | None]]] = field(default_factory=list)
    """Of functions that rules are about: name, line, keywords."""


@cache
def module_of(path: Path) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    module = Module(ast.get_docstring(tree), text.count("\n"))
    for node in tree.body:
        module.imports_at_top |= imported_by(node)
    for node in ast.walk(tree):
        module.imports |= imported_by(node)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                module.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
            case ast.Constant(value=str(said)):
                module.texts.append(said)
            case ast.Call(func=ast.Attribute()) if (called := ast.unparse(node.func)) in WATCHED:
                module.calls.append((called, node.lineno, {keyword.arg for keyword in node.keywords}))
    return module


def imported_by(node: ast.AST) -> set[str]:
    match node:
        case ast.Import():
            return {alias.name for alias in node.names}
        case ast.ImportFrom(module=str(module)):
            return {f"{module}.{alias.name}" for alias in node.names} | {module}
    return set()


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path, *, only_top: bool = False) -> set[str]:
    """Dotted names that a module imports; with `only_top`, only what importing it costs."""
    return module_of(path).imports_at_top if only_top else module_of(path).imports


def packages_imported(path: Path) -> set[str]:
    names = (name.split(".") for name in imports_of(path) if name.startswith("tunesmith."))
    return {parts[1] for parts in names if parts[1] in LEVEL}


def test_imports_point_downwards() -> None:
    inside = [(path, package_of(path)) for path in MODULES if package_of(path) != "__init__"]
    assert {package for _, package in inside} <= set(LEVEL), "a package is not in the drawing of ARCHITECTURE.md"
    upwards = [
        f"{name_of(path)} must not import {other}"
        for path, package in inside
        for other in packages_imported(path) - {package}
        if LEVEL[other] >= LEVEL[package]
    ]
    assert upwards == []


def test_the_drawing_names_every_package_and_nothing_else() -> None:
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert set(LEVEL) == there
    assert len(LEVELS) > 10


def test_checks_of_imports_see_them_inside_functions_too() -> None:
    inside = [path for path in MODULES if imports_of(path) - imports_of(path, only_top=True)]
    assert len(inside) > 20
    assert sum(len(packages_imported(path)) for path in MODULES) > 1000


def is_about_the_store(path: Path) -> bool:
    """Whether SQL belongs there: the store itself, and each package's tables and queries."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0] == "store" or "queries" in parts or parts[-1] == "tables"


def test_only_tables_and_queries_import_sqlalchemy() -> None:
    importers = [
        path for path in MODULES if any(n.split(".")[0] in ("sqlalchemy", "alembic") for n in imports_of(path))
    ]
    assert len(importers) > 10
    assert [path for path in importers if not is_about_the_store(path)] == []


def test_sql_is_written_in_tables_queries_and_listings_alone() -> None:
    written = [path for path in MODULES if any(map(SQL.match, module_of(path).texts))]
    assert len({path for path in written if path.stem == "listings"}) >= 6
    assert {path for path in written if path.stem != "listings" and not is_about_the_store(path)} == set()


def test_listings_import_no_sqlalchemy() -> None:
    for path in MODULES:
        if path.stem == "listings":
            heavy = {name for name in imports_of(path) if name.split(".")[0] in ("sqlalchemy", "pydantic")}
            assert not heavy, f"{path}: a quick command would pay for {heavy}"


def test_rules_are_pure() -> None:
    forbidden = {"os", "time", "socket", "subprocess", "sqlalchemy", "pathlib.Path.open", "threading"}
    forbidden |= {"tunesmith.core.clock"}
    rules = [path for path in MODULES if {"rules", "rules.py"} & set(path.relative_to(SOURCE).parts)]
    assert len(rules) > 20
    for path in rules:
        found = imports_of(path) & forbidden
        assert not found, f"{path.name} imports {found}: rules hold values and decisions only"


def test_torch_is_imported_only_where_child_programs_live() -> None:
    heavy = {
        name_of(path)
        for path in MODULES
        if TORCH & {imported.split(".")[0] for imported in imports_of(path, only_top=True)}
    }
    assert len(heavy) > 20
    assert [name for name in heavy if not name.startswith(MAY_IMPORT_TORCH_AT_TOP)] == []


def test_worker_and_client_never_load_torch() -> None:
    heavy = {"torch", "transformers", "peft", "pyarrow", "alembic"}
    code = f"import sys, tunesmith.client, tunesmith.orchestration.worker; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_module_begins_with_what_it_is_for() -> None:
    assert [name_of(path) for path in MODULES if not module_of(path).docstring] == []


def test_modules_and_functions_stay_readable() -> None:
    functions = [(name_of(path), *function) for path in MODULES for function in module_of(path).functions]
    assert len(functions) > 3000
    assert [function for function in functions if function[-1] > 60] == []
    long = [name_of(path) for path in MODULES if module_of(path).num_lines > 400]
    assert long == [], "which concept is missing?"


def test_no_room_is_called_utils() -> None:
    words = {"utils", "helpers", "manager", "common", "misc"}
    assert [path for path in MODULES if path.stem in words] == []


WALK = re.compile(r"^(\d+)\. `([\w/]+\.py)`(?: \(hop: (queue|socket|store|program)\))?: \S", flags=re.M)


def walks() -> dict[str, list[tuple[Path, str]]]:
    """The three walks of ARCHITECTURE.md: each file, with the hop that leads to it or an empty text."""
    section = PAGE.split("## Three walks")[1].split("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        steps = WALK.findall(part)
        assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1)), part.splitlines()[0]
        found[part.splitlines()[0]] = [(SOURCE / name, hop) for _, name, hop in steps]
    return found


def test_three_walks_of_at_most_twelve_files() -> None:
    found = walks()
    assert len(found) == 3
    for name, steps in found.items():
        assert 6 <= len(steps) <= 12, name
        assert len({path for path, _ in steps}) == len(steps), f"{name} goes back"


@pytest.mark.parametrize("name", walks())
def test_each_file_of_a_walk_is_imported_by_an_earlier_one_or_is_a_named_hop(name: str) -> None:
    reached: set[str] = set()
    for number, (path, hop) in enumerate(walks()[name]):
        assert path.is_file(), path
        module = ".".join(("tunesmith", *path.relative_to(SOURCE).with_suffix("").parts))
        assert number == 0 or bool(hop) != (module in reached), f"{module}: imported, or a hop, and not both"
        reached |= imports_of(path)


def test_plug_ins_have_a_contract_a_registry_and_a_contract_test() -> None:
    sentence = re.search(r"^(.*) are plug-ins:", PAGE, flags=re.M)
    assert sentence is not None
    names = re.findall(r"`(\w+)/`", sentence[1])
    assert {"trainers", "targets", "evaluators", "verifiers"} <= set(names)
    registries = {path.parent.name: path for path in MODULES if path.name == "registry.py"}
    assert set(registries) == set(names)
    for name, registry in registries.items():
        assert (registry.parent / "base.py").is_file(), f"{name} has no contract"
        assert f'GROUP = "tunesmith.{name}"' in registry.read_text(), f"no package can add to {name}"
        assert (ROOT / "tests" / "contracts" / f"test_{name}.py").is_file(), f"nothing holds {name} to a contract"


def test_architecture_fits_two_pages() -> None:
    assert PAGE.count("\n") <= 140


def test_paths_of_modules_in_documents_lead_somewhere() -> None:
    """Decisions keep the paths of their time; 0026 says where each module went."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
    named = [
        (document.name, name)
        for document in documents
        if document.name != "CHANGELOG.md"
        for name in re.findall(r"`(?:src/tunesmith/)?((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", document.read_text())
    ]
    assert len(named) > 40
    of_users = {"trainers/mine.py"}
    missing = [
        f"{where}: {name}"
        for where, name in named
        if name not in of_users and not any((root / name).is_file() for root in (SOURCE, ROOT))
    ]
    assert missing == []


def test_only_orchestration_moves_a_run() -> None:
    callers = {
        package_of(path) for path in MODULES if any(called == MOVES_A_RUN for called, _, _ in module_of(path).calls)
    }
    assert callers == {"orchestration"}


def test_documents_of_the_root_exist_and_links_inside_them_lead_somewhere() -> None:
    names = ["README", "ARCHITECTURE", "GLOSSARY", "CONTRIBUTING", "CHANGELOG", "SECURITY"]
    for name in names:
        path = ROOT / f"{name}.md"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (ROOT / target).exists(), f"{name}.md links to {target}"
    assert (ROOT / "LICENSE").read_text().strip()


def test_dependencies_each_say_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [")[1].split("[project.scripts]")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip().startswith('"')]
    assert len(lines) > 15
    assert [line for line in lines if "#" not in line] == []


# Each starts what inherits an environment on purpose: the team of an already limited trainer, and our own commands.
MAY_INHERIT_ENVIRONMENT = ("training/trainers/native/distributed.py", "demo/story.py")


def test_started_processes_get_an_environment_that_was_chosen() -> None:
    starts = [
        (f"{name_of(path)}:{line}", given)
        for path in MODULES
        if name_of(path) not in MAY_INHERIT_ENVIRONMENT
        for called, line, given in module_of(path).calls
        if called in STARTS_A_PROCESS
    ]
    assert len(starts) > 5
    assert [place for place, given in starts if "env" not in given] == [], "these pass our whole environment"
