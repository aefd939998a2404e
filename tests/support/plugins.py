"""Packages with plug-ins, put on an import path as `pip install` would: modules, and metadata that registers them."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tunesmith.evaluation.evaluators import registry as evaluators
from tunesmith.training.trainers import registry as trainers
from tunesmith.triggers import registry as triggers
from tunesmith.verifiers import registry as verifiers

EXAMPLES = Path(__file__).parents[2] / "examples" / "extending"


def install_project(project: Path, site: Path) -> Path:
    """Install the package of a folder with pyproject.toml into `site`; returns `site`."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    package = about["name"].replace("-", "_")
    shutil.copytree(project / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return _register(site, about["name"], about["entry-points"])


def install_module(site: Path, name: str, code: str, points: Mapping[str, Mapping[str, str]]) -> Path:
    """Install one module with this code; `points` are its entry points by group."""
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{name}.py").write_text(code)
    return _register(site, name, points)


def _register(site: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> Path:
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, named in points.items() for line in (f"[{group}]", *map(" = ".join, named.items()))]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


@contextmanager
def on_path(site: Path) -> Iterator[None]:
    """What is installed in `site` is found by this process, and by the real processes that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        _forget_installed()
        try:
            yield
        finally:
            _forget_installed()
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(f"{site}{os.sep}"):
                    del sys.modules[name]


def _forget_installed() -> None:
    for loaded in (trainers._installed, evaluators._installed, verifiers._installed, triggers._installed):
        loaded.cache_clear()
