"""What each kind of target does beyond the contract: its options, its server's odd answers, what it leaves behind."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.json_server import JsonServer
from support.ollama_server import BASE, OllamaServer
from support.target_worlds import PROFILE, SUPPORT, Made, shared_adapters
from support.vllm_server import VllmServer
from support.workspaces import a_jsonl, a_workspace
from tunesmith.core.errors import ConfigError
from tunesmith.deployment.targets.base import ServedAdapter, Target, TargetError
from tunesmith.deployment.targets.registry import make_target
from tunesmith.programs.process_identity import identify

pytestmark = pytest.mark.xdist_group("targets")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return shared_adapters(tmp_path_factory.getbasetemp() / "adapters-of-targets")


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


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"<html>hello</html>", "no JSON"),
        ({"data": [{"name": "x"}]}, "not what vLLM answers"),
        ({"data": "none"}, "not what vLLM answers"),
        (b"x" * (17 << 20), "more than 16 MiB"),
    ],
)
def test_server_that_answers_with_something_else_is_a_target_error(answer: Any, told: str, tmp_path: Path) -> None:
    class Odd(JsonServer):
        def answer(self, method: str, path: str, body: Any, call: Any) -> Any:
            return answer

    with Odd() as server, pytest.raises(TargetError, match=told):
        a_target("vllm", tmp_path, url=server.url).loaded()


def test_answer_that_comes_in_drops_is_too_slow(tmp_path: Path) -> None:
    class Dripping(JsonServer):
        def answer(self, method: str, path: str, body: Any, call: Any) -> Any:
            call.send_response(200)
            call.send_header("Content-Length", "100")
            call.end_headers()
            for _ in range(100):
                call.wfile.write(b" ")
                call.wfile.flush()
                time.sleep(0.05)
            return ...

    begun = time.monotonic()
    with Dripping() as server, pytest.raises(TargetError, match=r"not whole after 0\.3 s"):
        a_target("vllm", tmp_path, url=server.url, timeout_s=0.3).loaded()
    assert time.monotonic() - begun < 3.0


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
        with pytest.raises(TargetError, match="has another support:v1, which was not made here; remove or rename"):
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
    argv = [sys.executable, str(SUPPORT / "target_program.py"), str(tmp_path / "state.json"), manner]
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
