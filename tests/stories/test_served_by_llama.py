"""The whole way with a real llama.cpp: trained, judged, converted, compared, deployed, asked through our door, lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from builders import wait_for
from gateway_builders import SERVE, a_server
from real_servers import llama_server
from serving_bases import save_base, write_gguf
from story_builders import Fleet, MakeFleet
from target_worlds import kill_processes, llama_pids
from tunesmith.programs.fingerprint import code_fingerprint

pytestmark = [pytest.mark.extra, pytest.mark.timeout(600)]
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


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """A profile on the tiny base whose GGUF twin a real llama-server serves."""
    start = [llama_server(), "-t", "1", "-c", "1024", "-np", "2"]
    targets = [{"name": "edge", "kind": "llamacpp", "options": {"model": "base.gguf", "start": start}}]
    gate = {"min_n": 10, "primary": "heldout_loss"}
    profile = {"recipe": RECIPE, "gate": gate, "targets": targets, "evaluation": {"metrics": ["heldout_loss"]}}
    fleet = make_fleet(trainer="native", profile=profile, settings={"serve": SERVE})
    save_base(fleet.root / "models" / "tiny")
    write_gguf(fleet.root / "base.gguf")
    code_fingerprint.cache_clear()  # the source may be edited while the tests run
    return fleet


def say(fleet: Fleet, model: str) -> str:
    with a_server(fleet.root) as server, server.openai() as client:
        messages = [{"role": "user", "content": "What is 3 plus 3?"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0.0)
        assert answer.choices[0].message.content is not None
        return answer.model


def test_trained_adapter_is_compared_deployed_and_served_by_llama_cpp(fleet: Fleet) -> None:
    run_id = fleet.submit(lines=120)
    try:
        fleet.work(timeout_s=300)
        assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason
        (seen,) = fleet.client.adapters.deployment("support").targets
        assert seen["error"] is None
        (pid,) = llama_pids(fleet.root)
        assert b"support@v1.gguf:1" in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert say(fleet, "support") == "support@v1"
        # its process dies; who asks next has it started again
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not _is_alive(pid), 10.0, "until it is gone")
        assert say(fleet, "support@v1") == "support@v1"
        assert llama_pids(fleet.root) != [pid]
    finally:
        kill_processes(fleet.root)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
