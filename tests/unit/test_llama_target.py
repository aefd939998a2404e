"""The llamacpp target: what the GGUF of an adapter holds, and the processes that serve it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.serving_bases import ALPHA, KV_HEADS, RANK, a_tiny_llama
from support.target_worlds import PROFILE, Made, World, a_llamacpp, kill_processes, llama_pids, shared_adapters
from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.targets.base import ServedAdapter, Target, TargetError
from tunesmith.deployment.targets.gguf_adapter import base_of, convert, read_base
from tunesmith.deployment.targets.llamacpp import processes as llama_processes
from tunesmith.deployment.targets.registry import make_target
from tunesmith.programs.process_identity import identify, is_alive

pytestmark = pytest.mark.xdist_group("targets")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return shared_adapters(tmp_path_factory.getbasetemp() / "adapters-of-targets")


@pytest.fixture
def llama(made: Made, tmp_path: Path) -> Iterator[World]:
    with a_llamacpp(tmp_path, made) as world:
        yield world


def a_target(kind: str, root: Path, **options: Any) -> Target:
    return make_target(kind, options, root=root, profile=PROFILE)


# -- GGUF


def test_gguf_holds_the_pairs_under_their_names_with_rotated_rows_and_alpha(made: Made, tmp_path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    from support.serving_bases import write_gguf

    base = read_base(write_gguf(tmp_path / "base.gguf"))
    convert(made.first.path, base, tmp_path / "a.gguf")
    convert(made.first.path, base, tmp_path / "b.gguf")
    assert sha256_file(tmp_path / "a.gguf") == sha256_file(tmp_path / "b.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["adapter.lora.alpha"].contents() == ALPHA
    assert reader.fields["general.type"].contents() == "adapter"
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    weights = load_file(made.first.path / "adapter_model.safetensors")
    assert len(tensors) == len(weights)
    layer = "base_model.model.model.layers.1"
    np.testing.assert_array_equal(tensors["blk.1.ffn_up.weight.lora_b"], weights[f"{layer}.mlp.up_proj.lora_B.weight"])
    ours = weights[f"{layer}.self_attn.k_proj.lora_B.weight"]
    per_head = ours.shape[0] // KV_HEADS
    order = [head * per_head + half * per_head // 2 + at
             for head in range(KV_HEADS) for at in range(per_head // 2) for half in (0, 1)]  # fmt: skip
    np.testing.assert_array_equal(tensors["blk.1.attn_k.weight.lora_b"], ours[order])
    assert tensors["blk.1.attn_k.weight.lora_a"].shape == (RANK, a_tiny_llama().config.hidden_size)


def test_adapter_of_another_base_or_architecture_is_refused(made: Made, llama: World) -> None:
    import gguf

    path = llama.root / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in ((writer.add_block_count, 2), (writer.add_head_count, 4), (writer.add_head_count_kv, 2)):
        add(value)
    import numpy as np

    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    other = a_target("llamacpp", llama.root, model="other.gguf", start=llama.options["start"])
    assert "trained on another base" in (other.refusal(made.first) or "")
    nowhere = a_target("llamacpp", llama.root, model="nowhere.gguf", start=llama.options["start"])
    assert "not a readable GGUF" in (nowhere.refusal(made.first) or "")
    with pytest.raises(DataError, match="cannot be converted to GGUF yet; known: gemma"):
        base_of({"general.architecture": "mamba", "mamba.block_count": 1, "mamba.attention.head_count": 1})


# -- llamacpp


def test_quantised_base_is_refused_unless_it_is_said(made: Made, llama: World) -> None:
    import gguf

    path = llama.root / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in ((writer.add_block_count, 2), (writer.add_head_count, 4), (writer.add_head_count_kv, 2)):
        add(value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    options = {"model": "small.gguf", "start": llama.options["start"]}
    refusal = a_target("llamacpp", llama.root, **options).refusal(made.first)
    assert refusal is not None
    assert "say so: options.quantization: q4_1" in refusal
    said = a_target("llamacpp", llama.root, **options, quantization="q4_1").refusal(made.first)
    assert said is not None  # it goes on, to what else is wrong with this file
    assert "not in the base's GGUF" in said


def test_llama_processes_have_a_session_of_their_own_and_end_when_unloaded(llama: World) -> None:
    target = llama.target()
    target.load(llama.first)
    (pid,) = llama_pids(llama.root)
    about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(about[3]) == pid  # a session of its own: no signal to its starter's is one to it
    assert f"{llama.first.name}.gguf:1".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    target.flip(llama.first)
    target.load(llama.second)
    target.flip(llama.second)
    target.unload(llama.first.name)
    assert not is_alive(identify(pid))
    (kept,) = llama_pids(llama.root)
    assert is_alive(identify(kept))


def test_llama_process_whose_starter_was_killed_is_found_and_ended(
    llama: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    real = llama_processes.start

    def killed_after_the_start(*args: Any) -> Any:
        started.append(real(*args).identity)
        os._exit(0)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(llama_processes, "start", killed_after_the_start)
        llama.target().load(llama.first)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert llama_pids(llama.root) == []  # nothing but the plan was written
    (state,) = (llama.root / ".tunesmith" / "targets" / PROFILE).glob("llamacpp-*.json")
    (planned,) = json.loads(state.read_text())["processes"]
    mark = f"TUNESMITH_ATTEMPT={planned['id']}".encode()
    (lost,) = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _bytes(path)]
    llama.target().load(llama.first)
    (pid,) = llama_pids(llama.root)
    assert pid != lost
    assert not is_alive(identify(lost))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_bare_base_is_served_before_anything_was_deployed(llama: World) -> None:
    target: Any = llama.target()
    (endpoint,) = target.endpoints(None)
    assert endpoint.extra == {"lora": []}
    assert len(llama_pids(llama.root)) == 1
    assert target.endpoints(None) == [endpoint]
    assert target.observe() is None


def test_no_more_llama_processes_than_allowed_and_the_live_one_stays(made: Made, llama: World) -> None:
    options = {**llama.options, "max_processes": 2}
    target: Any = make_target("llamacpp", options, root=llama.root, profile=PROFILE)
    target.load(made.first)
    target.flip(made.first)
    (live,) = llama_pids(llama.root)
    third = ServedAdapter(f"{PROFILE}@v3", made.second.path, made.second.digest)
    for adapter in (made.second, third, made.second, third):
        target.load(adapter)
        assert len(llama_pids(llama.root)) == 2
        assert live in llama_pids(llama.root)
        assert target.observe() == made.first.digest
        (endpoint,) = target.endpoints(adapter)
        assert endpoint.extra["lora"] == [{"id": 0, "scale": 1.0}]


def test_llama_server_that_cannot_start_leaves_nothing_and_tells_its_log(llama: World) -> None:
    broken = a_target("llamacpp", llama.root, model="base.gguf", start=[*llama.options["start"], "--fails"])
    with pytest.raises(TargetError, match="ended while it was starting: error: failed to load model"):
        broken.load(llama.first)
    missing = a_target("llamacpp", llama.root, model="base.gguf", start=["./no-such-server"])
    with pytest.raises(TargetError, match="cannot be started"):
        missing.load(llama.first)
    assert llama_pids(llama.root) == []
    assert broken.loaded() == frozenset()


def test_llama_process_that_hangs_is_seen_and_replaced_by_a_load(llama: World) -> None:
    target = make_target("llamacpp", {**llama.options, "timeout_s": 1.5}, root=llama.root, profile=PROFILE)
    target.load(llama.first)
    target.flip(llama.first)
    (pid,) = llama_pids(llama.root)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TargetError, match=r"no answer within 1\.5 s"):
        target.observe()
    os.kill(pid, signal.SIGSTOP)
    target.load(llama.first)
    target.flip(llama.first)
    assert target.observe() == llama.first.digest
    assert pid not in llama_pids(llama.root)
    assert not is_alive(identify(pid))


def test_gguf_that_was_changed_is_seen(llama: World) -> None:
    target = llama.target()
    target.load(llama.first)
    target.flip(llama.first)
    (made,) = (llama.root / ".tunesmith").rglob("support@v1.gguf")
    made.write_bytes(made.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(TargetError, match="not the one that was converted"):
        target.observe()


def test_server_of_others_serves_only_what_it_was_started_with(made: Made, llama: World) -> None:
    ours: Any = llama.target()
    ours.load(llama.first)
    (endpoint,) = ours.endpoints(llama.first)
    os.environ["LLAMA_TEST_KEY"] = endpoint.headers["Authorization"].removeprefix("Bearer ")
    theirs: Any = a_target("llamacpp", llama.root, model="base.gguf", url=endpoint.url, key_env="LLAMA_TEST_KEY")
    try:
        assert theirs.refusal(made.first) is None
        refusal = theirs.refusal(made.second)
        assert refusal is not None
        assert "start it with --lora" in refusal
        theirs.load(made.first)
        theirs.flip(made.first)
        assert theirs.observe() == made.first.digest
        assert theirs.loaded() == {made.first.name}
        theirs.drain(made.first.name, 1.0)
        (endpoint,) = theirs.endpoints(made.first)
        assert endpoint.extra == {"lora": [{"id": 0, "scale": 1.0}], "cache_prompt": False}
        readings = theirs.probe(made.first, [HI], 5)
        assert readings[0].answer_text == "suppo"
        with pytest.raises(TargetError, match="has no support@v2"):
            theirs.load(made.second)
        kill_processes(llama.root)
        with pytest.raises(TargetError, match="cannot be reached"):
            theirs.observe()
    finally:
        del os.environ["LLAMA_TEST_KEY"]
