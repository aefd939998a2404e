"""What a program sees of the environment of who starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tunesmith.core.environment import child_environment, visible

SECRETS = (
    "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "NVIDIA_API_KEY", "DATABASE_URL", "PGPASSWORD", "https_proxy",
    "TUNESMITH__STORE__URL", "SSH_AUTH_SOCK", "GITHUB_TOKEN", "TRITON_TOKEN", "LD_PRELOAD", "BASH_FUNC_x%%",
)  # fmt: skip
NEEDED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME",
    "HF_HUB_OFFLINE", "PYTORCH_ALLOC_CONF",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_secret_stays_unless_somebody_names_it(name: str) -> None:
    assert visible({name: "canary"}) == {}
    assert visible({name: "canary"}, (name,)) == {name: "canary"}


@pytest.mark.parametrize("name", NEEDED)
def test_what_programs_need_passes(name: str) -> None:
    assert visible({name: "x"}) == {name: "x"}


def test_threads_of_a_program_wait_passively_unless_somebody_says_otherwise() -> None:
    assert child_environment({}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert child_environment({"OMP_WAIT_POLICY": "ACTIVE", "HF_TOKEN": "x"}) == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_importing_packages_changes_no_environment() -> None:
    script = "import os; before = dict(os.environ); import tunesmith.models.queries, tunesmith.client; "
    script += "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    subprocess.run([sys.executable, "-c", script], check=True, env=visible({}))
