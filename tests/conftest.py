"""Puts the folder of shared builders on the import path of every test; what is costly is made once for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_of_bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trained base models are kept for this session, shared by its worker processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bases"
