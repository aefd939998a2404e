"""The demo and the example tell the truth: real training, a better adapter live, a worse one refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.client import Client
from tunesmith.core.files import verify_folder

pytest.importorskip("torch", reason="torch is not installed: pip install 'tunesmith[train]'")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.extra, pytest.mark.timeout(600), pytest.mark.xdist_group("real-training")]


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environ, timeout=550, check=False
    )


def test_demo_deploys_what_is_better_and_refuses_what_is_worse(tmp_path: Path, cache_of_bases: Path) -> None:
    folder = tmp_path / "demo"
    done = run("-m", "tunesmith.cli.main", "demo", str(folder), "--quick", cache=cache_of_bases)
    assert done.returncode == 0, done.stdout + done.stderr
    with Client(folder) as client:
        worse, better = client.runs.list()
        assert (better.state, worse.state) == ("deployed", "rejected")
        live = client.adapters.live("dates")
        assert live is not None
        assert live.run_id == better.id
        detail = client.runs.show(better.id)
    served = folder / ".tunesmith" / "live" / "dates" / "current"
    assert verify_folder(served.resolve(), live.digest).files.keys() >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert detail.evaluation is not None
    loss = next(c for c in detail.evaluation.comparisons if c["metric"] == "heldout_loss")
    assert loss["n"] == detail.evaluation.num_cases >= 40
    assert loss["candidate"] < loss["baseline"]
    assert 0 < loss["low"] <= loss["difference"] <= loss["high"]
    report = (folder / "report.html").read_text()
    assert report.count("<svg") == 2
    assert "name='viewport'" in report  # a phone shows it in its own width, and wide tables scroll by themselves
    assert report.count("<table>") == report.count("<div class=wide><table>") > 2
    assert "reject" in report


def test_demo_leaves_a_folder_of_others_alone(tmp_path: Path, cache_of_bases: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run("-m", "tunesmith.cli.main", "demo", str(tmp_path), "--quick", cache=cache_of_bases)
    assert done.returncode == 1
    assert "name another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_minimal_loop_promotes_the_good_round_and_rejects_the_shuffled_one(
    tmp_path: Path, cache_of_bases: Path
) -> None:
    done = run(str(ROOT / "examples" / "minimal_loop.py"), str(tmp_path), cache=cache_of_bases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.readlink(tmp_path / "current") == "v1"
    assert json.loads((tmp_path / "v1" / "adapter_config.json").read_text())["peft_type"] == "LORA"
