"""The whole way with a real vLLM and a real llama.cpp: trained, compared, deployed, asked through our door, lost."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fleet import Fleet, MakeFleet
from support.gateway import SERVE, a_server
from support.real_servers import RealVllm, llama_server, vllm_python
from support.serving_bases import save_base, write_gguf
from support.target_worlds import kill_processes, llama_pids
from support.workspaces import wait_for
from tunesmith.programs.fingerprint import code_fingerprint
from tunesmith.programs.process_identity import identify, is_alive

pytestmark = [pytest.mark.extra, pytest.mark.timeout(900), pytest.mark.xdist_group("real_servers")]
RECIPE = {
    "method": "sft",
    "max_length": 256,
    "batch_tokens": 512,
    "max_steps": 30,
    "epochs": 50,
    "lora_rank": 8,
    "lr": 0.01,
    "train_embeddings": False,
}


def a_fleet(make_fleet: MakeFleet, kind: str, options: dict[str, Any]) -> Fleet:
    """A profile on the tiny base, served by others."""
    profile = {
        "recipe": RECIPE,
        "gate": {"min_cases": 10, "primary": "heldout_loss"},
        "evaluation": {"metrics": ["heldout_loss"]},
        "targets": [{"name": "theirs", "kind": kind, "options": options}],
    }
    fleet = make_fleet(trainer="native", profile=profile, settings={"serve": SERVE})
    save_base(fleet.root / "models" / "tiny")
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    return fleet


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[RealVllm]:
    vllm_python()
    server = RealVllm(save_base(tmp_path / "base"), tmp_path / "vllm.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


def deployed(fleet: Fleet) -> str:
    """Train and deploy; what the parity check said about the one target."""
    run_id = fleet.submit(lines=120)
    fleet.work(timeout_s=400)
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
    (seen,) = fleet.client.adapters.deployment("support").targets
    assert (seen["observed"], seen["error"]) == ("support@v1", None)
    (attempt,) = fleet.attempts(run_id, "deploy")
    assert attempt.result is not None
    return json.dumps(attempt.result)


def say(fleet: Fleet, model: str) -> str:
    """Ask through `tunesmith serve`; the name of what answered."""
    with a_server(fleet.root) as server, server.openai() as client:
        messages = [{"role": "user", "content": "What is 3 plus 3?"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0.0)  # type: ignore[arg-type]
        assert answer.choices[0].message.content is not None
        return answer.model


def test_trained_adapter_is_compared_deployed_and_served_by_llama_cpp(make_fleet: MakeFleet) -> None:
    start = [llama_server(), "-t", "1", "-c", "1024", "-np", "2"]
    fleet = a_fleet(make_fleet, "llamacpp", {"model": "base.gguf", "start": start})
    write_gguf(fleet.root / "base.gguf")
    try:
        assert '"theirs"' in deployed(fleet)
        (pid,) = llama_pids(fleet.root)
        assert b"support@v1.gguf:1" in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert say(fleet, "support") == "support@v1"
        identity = identify(pid)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(identity), 10.0, "until it is gone")
        assert say(fleet, "support") == "support@v1"  # who asks next has it started again
        assert pid not in llama_pids(fleet.root)
    finally:
        kill_processes(fleet.root)


def test_trained_adapter_is_compared_deployed_and_served_by_vllm(make_fleet: MakeFleet, vllm: RealVllm) -> None:
    fleet = a_fleet(make_fleet, "vllm", {"url": vllm.url, "timeout_s": 120})
    assert '"theirs"' in deployed(fleet)
    assert say(fleet, "support") == "support@v1"
    body = json.dumps({"lora_name": "support@v1"}).encode()
    request = urllib.request.Request(
        f"{vllm.url}/v1/unload_lora_adapter", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        assert response.status == 200
    assert say(fleet, "support") == "support@v1"  # who asks next has it loaded again
