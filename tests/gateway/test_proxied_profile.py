"""A profile that vLLM serves, behind a real `tunesmith serve`: names, streams, a switch, a restart of vLLM, capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from support.gateway import PROFILE, ServerProcess, a_served_workspace, a_server, make_live
from support.vllm_server import VllmServer
from support.workspaces import a_profile, wait_for
from tunesmith.client import Client


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmServer]:
    with VllmServer() as server:
        yield server


@pytest.fixture(scope="module")
def proxied(base: Path, vllm: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = a_served_workspace(tmp_path_factory.mktemp("proxied") / "ws", base, num_versions=2)
    targets = [{"name": "gpu", "kind": "vllm", "options": {"url": vllm.url, "timeout_s": 10.0}}]
    a_profile(client.workspace.root, PROFILE, experience={"capture": {"finished_only": False}}, targets=targets)
    yield client
    client.close()


@pytest.fixture(scope="module")
def door(proxied: Client) -> Iterator[ServerProcess]:
    with a_server(proxied.workspace.root) as process:
        yield process


def say(door: ServerProcess, model: str, text: str = "hi") -> str:
    with door.openai() as client:
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
    assert answer.model.startswith(f"{PROFILE}@")
    return str(answer.choices[0].message.content)


def test_names_mean_the_versions_of_the_store(door: ServerProcess, proxied: Client, vllm: VllmServer) -> None:
    assert say(door, PROFILE) == "support@v1: hi"
    assert say(door, f"{PROFILE}@v2") == "support@v2: hi"
    assert say(door, f"{PROFILE}@base") == "tiny: hi"
    make_live(proxied.serving.session.database, 2)
    wait_for(lambda: say(door, PROFILE) == "support@v2: hi", 10.0, "until the new version is served")
    assert sorted(vllm.adapters) == ["support@v1", "support@v2"]


def test_stream_comes_through_under_our_name(door: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with door.openai() as client:
        chunks = list(client.chat.completions.create(model=f"{PROFILE}@v1", messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "support@v1: hello"
    assert {chunk.model for chunk in chunks} == {"support@v1"}


def test_restarted_server_behind_gets_its_adapter_back_with_the_first_request(
    door: ServerProcess, vllm: VllmServer
) -> None:
    vllm.restart()
    assert say(door, f"{PROFILE}@v1") == "support@v1: hi"


def test_server_behind_that_is_gone_is_503_without_its_address(door: ServerProcess, vllm: VllmServer) -> None:
    vllm.stop()
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            say(door, PROFILE)
    finally:
        vllm.start()
    assert caught.value.status_code == 503
    assert "retry-after" in caught.value.response.headers
    assert vllm.url.rpartition(":")[2] not in caught.value.response.text
    assert wait_for(lambda: say(door, PROFILE), 10.0, "until it answers again")


def test_answer_is_kept_with_the_version_that_gave_it(door: ServerProcess, proxied: Client) -> None:
    say(door, f"{PROFILE}@v1", "keep this one")
    found = wait_for(
        lambda: (
            [each for each in proxied.experiences.list(profile=PROFILE) if each.question == "keep this one"] or None
        ),
        10.0,
        "until it is kept",
    )
    assert (found[0].answer, found[0].served_by) == ("support@v1: keep this one", "support@v1")


@pytest.mark.parametrize("says", [None, "", "one moment"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_tool_calls_passes_through_and_feedback_is_told_why_it_was_not_captured(
    door: ServerProcess, vllm: VllmServer, says: str | None, stream: bool
) -> None:
    vllm.says_beside_calls = says
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    messages = [{"role": "user", "content": "look it up"}]
    with door.openai() as client:
        answer = client.chat.completions.create(model=PROFILE, messages=messages, tools=tools, stream=stream)
        parts = [*answer] if stream else [answer]
    choices = [part.choices[0] for part in parts]
    told = choices[0].delta if stream else choices[0].message
    assert (told.tool_calls[0].function.name, told.content) == ("look_up", says)
    assert choices[-1].finish_reason == "tool_calls"
    with door.http() as http:
        rated = http.post("/v1/feedback", json={"response_id": parts[0].id, "rating": "up"})
    assert rated.status_code == 404
    assert "answers with tool calls are not captured" in rated.json()["error"]["message"]


@pytest.fixture(scope="module")
def strict(door: ServerProcess, proxied: Client, vllm: VllmServer) -> str:
    """A profile that learns only from answers that the model ended itself."""
    targets = [{"name": "gpu", "kind": "vllm", "options": {"url": vllm.url, "timeout_s": 10.0}}]
    a_profile(proxied.workspace.root, "strict", recipe={"max_length": 256}, targets=targets)
    wait_for(lambda: "strict" in door.health()["serving"], 10.0, "until the profile is served")
    return "strict"


def captured(proxied: Client, profile: str) -> dict[str, str]:
    """By question, the class of what was captured."""
    return {each.question: each.class_name for each in proxied.experiences.list(profile=profile)}


def test_a_stream_that_breaks_off_says_so_and_is_not_captured_as_a_whole_answer(
    door: ServerProcess, proxied: Client, vllm: VllmServer, strict: str
) -> None:
    messages = [{"role": "user", "content": "break off"}]
    vllm.breaks_off = True
    try:
        with door.openai() as client, pytest.raises(openai.APIError, match="broke off in the middle"):
            list(client.chat.completions.create(model=strict, messages=messages, stream=True))
    finally:
        vllm.breaks_off = False
    found = wait_for(lambda: captured(proxied, strict).get("break off"), 10.0, "until it is captured")
    assert found != "gold"


def test_an_answer_that_a_stop_text_of_the_caller_ended_is_not_a_whole_one(
    door: ServerProcess, proxied: Client, vllm: VllmServer, strict: str
) -> None:
    def ask(text: str, stop: str | None, tells: bool, stream: bool) -> None:
        vllm.tells_stop_reason = tells
        messages = [{"role": "user", "content": text}]
        with door.openai() as client:
            answer = client.chat.completions.create(model=strict, messages=messages, stop=stop, stream=stream)
            assert not stream or [chunk.choices[0].finish_reason for chunk in answer][-1] == "stop"

    for stream in (False, True):
        ask(f"cut {stream}", "ut", True, stream)
        ask(f"perhaps cut {stream}", "§", False, stream)
        ask(f"not cut {stream}", "§", True, stream)
        ask(f"plain {stream}", None, False, stream)
    wait_for(lambda: len(captured(proxied, strict).keys() - {"break off"}) >= 8, 10.0, "until they are kept")
    kept = {question for question, name in captured(proxied, strict).items() if name == "gold"}
    assert kept == {"not cut False", "plain False", "not cut True", "plain True"}


def test_a_target_that_cannot_be_made_holds_no_capacity(door: ServerProcess, proxied: Client) -> None:
    targets = [{"name": "gpu", "kind": "vllm", "options": {"url": "http://127.0.0.1:9", "timeout_s": -1.0}}]
    a_profile(proxied.workspace.root, "wrong", targets=targets)
    wait_for(lambda: "wrong" in door.health()["serving"], 10.0, "until the profile is served")
    settings = proxied.serving.session.settings.serve
    asked = {"model": "wrong", "messages": [{"role": "user", "content": "hi"}]}
    with door.http() as http:
        statuses = {
            http.post("/v1/chat/completions", json=asked).status_code
            for _ in range(settings.max_batch + settings.max_waiting + 1)
        }
    assert statuses == {422}
