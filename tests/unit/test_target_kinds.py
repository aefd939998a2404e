"""What each kind of target does beyond the contract: its options, its server's odd answers, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import a_jsonl, a_workspace
from ollama_server import BASE, OllamaServer
from serving_bases import ALPHA, KV_HEADS, RANK, a_tiny_llama
from target_worlds import PROFILE, TESTS, Made, World, a_llamacpp, kill_processes, llama_pids, shared_adapters
from tunesmith.errors import ConfigError, DataError
from tunesmith.files import sha256_file
from tunesmith.programs.process_identity import identify, is_alive
from tunesmith.targets import llama_processes
from tunesmith.targets.base import ServedAdapter, Target, TargetError
from tunesmith.targets.gguf_adapter import base_of, convert, read_base
from tunesmith.targets.registry import make_target
from vllm_server import VllmServer

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


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        ("vllm", {}, "give url, or urls"),
        ("vllm", {"url": "localhost:8000"}, "url: is no address"),
        ("vllm", {"url": "http://me:secret@host:1"}, "url: holds a name or password"),
        ("vllm", {"urls": ["http://a:1", "http://a:1/v1"]}, "named twice"),
        ("vllm", {"url": "http://a:1", "key_env": "sk-1234"}, "never the key itself"),
        ("vllm", {"url": "http://a:1", "max_lora_rank": 20}, "max_lora_rank: '20' is not one of"),
        ("vllm", {"url": "http://a:1", "timeout_s": 0}, "timeout_s"),
        ("vllm", {"url": "http://a:1", "modle": "x"}, "did you mean 'model'"),
        ("llamacpp", {"start": ["llama-server"]}, "model"),
        ("llamacpp", {"model": "b.gguf"}, "give start .* or url"),
        ("llamacpp", {"model": "b.gguf", "start": ["x"], "url": "http://a:1"}, "give start .* or url"),
        ("llamacpp", {"model": "b.gguf", "start": ["x", "--port", "1"]}, "--port is set by tunesmith"),
        ("llamacpp", {"model": "b.gguf", "start": ["x", "--lora=y"]}, "--lora=y is set by tunesmith"),
        ("llamacpp", {"model": "b.gguf", "start": ["x"], "key_env": "KEY"}, "only with url"),
        ("ollama", {}, "model"),
        ("ollama", {"model": " "}, "must not be empty"),
        ("command", {}, "program"),
        ("command", {"program": "./serve.py --fast"}, "must be a list"),
        ("command", {"program": ["./not-there.py"]}, "is not there or may not be run"),
        ("embedded", {"url": "http://a:1"}, "no option 'url'"),
        ("directory", {"max_lora_rank": 16}, "max_lora_rank"),
    ],
)
def test_bad_option_is_refused_when_the_target_is_made(
    kind: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        make_target(kind, options, root=tmp_path, profile=PROFILE)
    assert "secret" not in caught.value.message


def test_profile_check_refuses_a_bad_option_before_anything_is_trained(tmp_path: Path) -> None:
    targets = [{"name": "gpu", "kind": "vllm", "options": {"urll": "http://127.0.0.1:8000"}}]
    with a_workspace(tmp_path, profile={"targets": targets}) as client:
        with pytest.raises(ConfigError, match="no option 'urll'; did you mean 'url'"):
            client.profiles.check(PROFILE)
        with pytest.raises(ConfigError, match="no option 'urll'"):
            client.runs.submit(PROFILE, a_jsonl(tmp_path / "data.jsonl"))


# -- vllm


def test_vllm_that_sees_other_paths_is_told_theirs(made: Made, tmp_path: Path) -> None:
    seen = tmp_path / "in-the-container"
    shutil.copytree(made.folder, seen)
    with VllmServer() as server:
        target = a_target("vllm", tmp_path, url=f"{server.url}/v1/", paths={str(made.folder): str(seen)})
        target.load(made.first)
        target.flip(made.first)
        assert server.adapters == {made.first.name: str(seen / made.first.name)}
        assert target.observe() == made.first.digest
        blind = a_target("vllm", tmp_path, url=server.url, paths={str(made.folder): "/elsewhere"})
        with pytest.raises(TargetError, match=r"from .*in-the-container.*, not from /elsewhere"):
            blind.load(made.first)
        with pytest.raises(TargetError, match=r"finds no adapter at /elsewhere.*options\.paths"):
            blind.load(made.second)


def test_vllm_replica_that_lost_it_is_named_and_only_that_one_loads(made: Made, tmp_path: Path) -> None:
    with VllmServer() as one, VllmServer() as two:
        target = a_target("vllm", tmp_path, urls=[one.url, two.url])
        target.load(made.first)
        target.flip(made.first)
        two.restart()
        with pytest.raises(TargetError, match=f"{two.url} has lost support@v1, as after a restart"):
            target.observe()
        num_before = len(one.calls)
        target.load(made.first)
        assert target.observe() == made.first.digest
        assert not [call for call in one.calls[num_before:] if "load_lora" in call[1]]
        two.stop()
        with pytest.raises(TargetError, match=f"{two.url} cannot be reached"):
            target.observe()


def test_vllm_that_cannot_load_at_runtime_or_wants_a_key_says_what_to_do(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VllmServer(can_load=False) as server, pytest.raises(TargetError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        a_target("vllm", tmp_path, url=server.url).load(made.first)
    with VllmServer(key="sesame") as server:
        with pytest.raises(TargetError, match=r"refuses the key \(401\)"):
            a_target("vllm", tmp_path, url=server.url).observe()
        keyed = a_target("vllm", tmp_path, url=server.url, key_env="VLLM_TEST_KEY")
        with pytest.raises(TargetError, match="put it into the variable VLLM_TEST_KEY"):
            keyed.observe()
        monkeypatch.setenv("VLLM_TEST_KEY", "sesame")
        assert keyed.observe() is None


def test_vllm_drain_waits_for_answers_of_that_version_only(made: Made, tmp_path: Path) -> None:
    with VllmServer() as server:
        target = a_target("vllm", tmp_path, url=server.url)
        target.load(made.first)
        server.running = [made.second.name]
        target.drain(made.first.name, 1.0)
        server.running = [made.second.name, made.first.name]
        with pytest.raises(TargetError, match="still answers from support@v1"):
            target.drain(made.first.name, 0.2)
        threading.Timer(0.3, server.running.clear).start()
        begun = time.monotonic()
        target.drain(made.first.name, 10.0)
        assert 0.1 < time.monotonic() - begun < 5.0


def test_vllm_probe_tells_tokens_text_and_log_probabilities(made: Made, tmp_path: Path) -> None:
    with VllmServer() as one, VllmServer() as two:
        target = a_target("vllm", tmp_path, urls=[one.url, two.url])
        target.load(made.first)
        readings = target.probe(made.first, [HI, HI], 4)
        assert readings is not None
        assert (readings[0].prompt_text, readings[0].prompt_ids) == ("hi", (104, 105))
        assert readings[0].answer_text == "support@v1: hi"
        assert readings[0].answer_ids == tuple(map(ord, "support@v1: hi"))
        assert readings[0].log_probs == (-0.5,) * 14
        assert [len([call for call in each.calls if "chat" in call[1]]) for each in (one, two)] == [1, 1]


# -- GGUF


def test_gguf_holds_the_pairs_under_their_names_with_rotated_rows_and_alpha(made: Made, tmp_path: Path) -> None:
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    from serving_bases import write_gguf

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


def test_llama_processes_outlive_their_starter_and_end_when_unloaded(llama: World) -> None:
    target = llama.target()
    target.load(llama.first)
    (pid,) = llama_pids(llama.root)
    about = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(about[1]) != os.getpid()  # nobody's child, so nobody's end is its end
    assert int(about[3]) == pid  # a session of its own
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
        (door,) = target.doors(adapter)
        assert door.extra["lora"] == [{"id": 0, "scale": 1.0}]


def test_llama_server_that_cannot_start_leaves_nothing_and_tells_its_log(llama: World) -> None:
    broken = a_target("llamacpp", llama.root, model="base.gguf", start=[*llama.options["start"], "--fails"])
    with pytest.raises(TargetError, match="ended while it was starting: error: failed to load model"):
        broken.load(llama.first)
    missing = a_target("llamacpp", llama.root, model="base.gguf", start=["./no-such-server"])
    with pytest.raises(TargetError, match="cannot be started"):
        missing.load(llama.first)
    assert llama_pids(llama.root) == []
    assert broken.loaded() == frozenset()


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
    (door,) = ours.doors(llama.first)
    os.environ["LLAMA_TEST_KEY"] = door.headers["Authorization"].removeprefix("Bearer ")
    theirs: Any = a_target("llamacpp", llama.root, model="base.gguf", url=door.url, key_env="LLAMA_TEST_KEY")
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
        (door,) = theirs.doors(made.first)
        assert door.extra == {"lora": [{"id": 0, "scale": 1.0}], "cache_prompt": False}
        readings = theirs.probe(made.first, [HI], 5)
        assert readings[0].answer_text == "suppo"
        with pytest.raises(TargetError, match="has no support@v2"):
            theirs.load(made.second)
        kill_processes(llama.root)
        with pytest.raises(TargetError, match="cannot be reached"):
            theirs.observe()
    finally:
        del os.environ["LLAMA_TEST_KEY"]


# -- ollama


def test_ollama_is_spoken_to_as_its_documentation_says(made: Made, tmp_path: Path) -> None:
    with OllamaServer() as server:
        target = a_target("ollama", tmp_path, url=server.url, model=BASE)
        target.load(made.first)
        (blob,) = server.blobs
        create = next(body for method, path, body in server.calls if path == "/api/create")
        assert create == {"model": "support:v1", "from": BASE, "adapters": {"adapter.gguf": blob}, "stream": False}
        readings = target.probe(made.first, [HI], 4)
        assert readings is not None
        assert (readings[0].answer_text, readings[0].finish) == ("support:v1: hi", "stop")
        target.unload(made.first.name)
        assert list(server.models) == [BASE]


def test_ollama_that_takes_no_adapters_or_a_quantised_base_refuses(made: Made, tmp_path: Path) -> None:
    with OllamaServer(takes_adapters=False) as server:
        refusal = a_target("ollama", tmp_path, url=server.url, model=BASE).refusal(made.first)
        assert refusal is not None
        assert "LoRA adapters are no longer supported" in refusal
        with pytest.raises(TargetError, match="no model gone:1b; get it with: ollama pull"):
            a_target("ollama", tmp_path, url=server.url, model="gone:1b").refusal(made.first)
    with OllamaServer(quantization="Q4_0") as server:
        refusal = a_target("ollama", tmp_path, url=server.url, model=BASE).refusal(made.first)
        assert refusal is not None
        assert "options.quantization: q4_0" in refusal
        told = a_target("ollama", tmp_path, url=server.url, model=BASE, quantization="q4_0")
        assert told.refusal(made.first) is None


def test_ollama_model_of_the_same_name_that_is_not_ours_is_not_taken_for_it(made: Made, tmp_path: Path) -> None:
    with OllamaServer() as server:
        target = a_target("ollama", tmp_path, url=server.url, model=BASE)
        server.models["support:v1"] = "sha256:" + "2" * 64
        with pytest.raises(TargetError, match="has another support:v1; remove it there"):
            target.load(made.first)
        server.models["support:v1"] = None
        with pytest.raises(TargetError, match="not made by tunesmith"):
            target.load(made.first)


# -- command


@pytest.mark.parametrize(
    ("manner", "told"),
    [
        ("garbage", "its output is no JSON"),
        ("nested", "its output is no JSON"),
        ("floods", "wrote more than 1 MiB"),
        ("fails", "ended with 1: the cable is out"),
        ("hangs", "did not end within 0.5 s"),
        ("lies", "it says that it loaded support@v1, and does not have it"),
    ],
)
def test_program_that_misbehaves_is_a_target_error(manner: str, told: str, made: Made, tmp_path: Path) -> None:
    argv = [sys.executable, str(TESTS / "target_program.py"), str(tmp_path / "state.json"), manner]
    target = a_target("command", tmp_path, program=argv, timeout_s=0.5 if manner == "hangs" else 20)
    begun = time.monotonic()
    with pytest.raises(TargetError, match=told):
        target.load(made.first)
    assert time.monotonic() - begun < 10.0


def test_program_refuses_and_sees_only_the_variables_it_may(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_SECRET", "hidden")
    monkeypatch.setenv("ITS_SETTING", "sweet")
    program = tmp_path / "serve.py"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.load(sys.stdin)\n"
        "print(json.dumps({'refusal': f\"{os.environ.get('OUR_SECRET')} {os.environ.get('ITS_SETTING')}\"}))\n"
    )
    program.chmod(0o755)
    target = a_target("command", tmp_path, program=["./serve.py"], env=["ITS_SETTING"])
    assert target.refusal(made.first) == "None sweet"


# -- embedded


def test_without_a_running_server_the_embedded_target_says_how_to_start_one(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / ".tunesmith" / "serve"
    folder.mkdir(parents=True)
    gone = {"id": "srv-1", "url": "http://127.0.0.1:1", "token": "t", "process": identify(2**22 + 1).to_json()}
    (folder / "srv-1.json").write_text(json.dumps(gone))
    (folder / "srv-2.json").write_text("{")
    target = a_target("embedded", tmp_path)
    for act in (target.observe, target.loaded, lambda: target.load(made.first), lambda: target.refusal(made.first)):
        with pytest.raises(TargetError, match="start it with: tunesmith serve"):
            act()


def test_damaged_adapter_is_refused_before_any_server_is_asked(made: Made, tmp_path: Path) -> None:
    damaged: ServedAdapter = made.damaged(tmp_path)
    options: dict[str, dict[str, Any]] = {
        "vllm": {"url": "http://127.0.0.1:1"},
        "ollama": {"url": "http://127.0.0.1:1", "model": "x"},
        "llamacpp": {"model": "none.gguf", "start": ["llama-server"]},
        "embedded": {},
    }
    for kind, given in options.items():
        refusal = a_target(kind, tmp_path, **given).refusal(damaged)
        assert refusal is not None, kind
        assert "not what the manifest says" in refusal
