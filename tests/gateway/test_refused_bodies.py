"""What a bad body is told, route by route: status, code, parameter and text, as recorded in refused_bodies.json."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_type_hints

import httpx2
import pytest
from pydantic import PlainValidator

from support.gateway import PROFILE, ServerProcess
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.app import ROUTES
from tunesmith.serving.gateway.schemas import ChatBody
from tunesmith.serving.gateway.validation import Body, Told, validated

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "refused_bodies.json").read_text())
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP: Any = json.loads("[" * 80 + "]" * 80)
VERSION = f"{PROFILE}@v1"
LOAD = {"profile": PROFILE, "name": VERSION, "path": "/nowhere", "digest": "0" * 64}
PROBE: dict[str, Any] = {"profile": PROFILE, "name": VERSION, "prompts": [HELLO], "max_tokens": 4}
RATED: dict[str, Any] = {"response_id": "chatcmpl-none", "rating": "up"}

WISHES: dict[str, dict[str, Any]] = {
    "unknown": {"temprature": 1},
    "unknown null": {"nucleus": None},
    "unknown long": {"x" * 300: 1},
    "unknown before others": {"n": 0, "temprature": 1, "stream": "yes"},
    "model missing": {"model": None},
    "model number": {"model": 7},
    "model empty": {"model": ""},
    "model long": {"model": "m" * 600},
    "model not there": {"model": "supprt"},
    "model no name": {"model": "../../etc"},
    "stream text": {"stream": "yes"},
    "stream number": {"stream": 1},
    "stream_options alone": {"stream_options": {"include_usage": True}},
    "stream_options list": {"stream": True, "stream_options": []},
    "stream_options unknown": {"stream": True, "stream_options": {"usage": True}},
    "stream_options text": {"stream": True, "stream_options": {"include_usage": "yes"}},
    "n zero": {"n": 0},
    "n nine": {"n": 9.0},
    "n half": {"n": 1.5},
    "n true": {"n": True},
    "n text": {"n": "2"},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens huge": {"max_tokens": 10**30},
    "temperature text": {"temperature": "hot"},
    "temperature digits": {"temperature": "1"},
    "temperature true": {"temperature": True},
    "temperature high": {"temperature": 2.5},
    "temperature list": {"temperature": [1]},
    "top_p high": {"top_p": 1.5},
    "top_p negative": {"top_p": -1},
    "presence_penalty": {"presence_penalty": -2.01},
    "frequency_penalty": {"frequency_penalty": 3},
    "stop many": {"stop": ["a", "b", "c", "d", "e"]},
    "stop empty": {"stop": ""},
    "stop number": {"stop": [1]},
    "stop object": {"stop": {}},
    "stop long": {"stop": "s" * 513},
    "seed text": {"seed": "x"},
    "seed large": {"seed": 2**63},
    "seed half": {"seed": 0.5},
    "user number": {"user": 5},
    "user long": {"user": "u" * 513},
    "user nul": {"user": "a\0b"},
    "user control": {"user": "a\nb"},
    "metadata list": {"metadata": []},
    "metadata many": {"metadata": {str(number): "x" for number in range(17)}},
    "metadata number": {"metadata": {"a": 1}},
    "metadata long key": {"metadata": {"k" * 65: "x"}},
    "metadata session": {"metadata": {"session": "a\tb"}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "tools deep": {"tools": DEEP},
    "tools large number": {"tools": [{"a": 10**40}]},
    "response_format": {"response_format": {"type": "json_object"}},
    "logit_bias": {"logit_bias": {"5": 1}},
    "echo": {"echo": True},
    "two unsupported": {"verbosity": "low", "audio": {"voice": "x"}},
}
CHAT_WISHES: dict[str, dict[str, Any]] = {
    "messages missing": {"messages": None},
    "messages empty": {"messages": []},
    "messages text": {"messages": "hi"},
    "messages many": {"messages": HELLO * 2049},
    "message text": {"messages": ["hi"]},
    "message unknown field": {"messages": [{"role": "user", "contents": "hi"}]},
    "message without role": {"messages": [{"content": "hi"}]},
    "message role": {"messages": [*HELLO, {"role": "usr", "content": "hi"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "message content number": {"messages": [{"role": "user", "content": 7}]},
    "message content image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "message content nul": {"messages": [{"role": "user", "content": "a\0b"}]},
    "message audio": {"messages": [{"role": "assistant", "content": "x", "audio": {}}]},
    "message name": {"messages": [{"role": "user", "content": "x", "name": 5}]},
    "message calls": {"messages": [{"role": "assistant", "tool_calls": "f"}]},
    "message call unknown field": {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "idx": 1}]}]},
    "message call type": {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "shell"}]}]},
    "logprobs number": {"logprobs": 2},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs many": {"logprobs": True, "top_logprobs": 21},
    "both limits": {"max_tokens": 5, "max_completion_tokens": 5},
    "max_completion_tokens zero": {"max_completion_tokens": 0},
    "store text": {"store": "no"},
    "prompt": {"prompt": "hi"},
    "logprobs before messages": {"logprobs": "x", "messages": []},
    "messages before model": {"messages": [], "model": 7, "temperature": 9},
    "store before model": {"store": 1, "model": 7},
    "stream before n": {"stream": 1, "n": 0},
    "temperature before stop": {"temperature": 9, "stop": 7, "tools": DEEP},
    "metadata before tools": {"metadata": 7, "tools": DEEP},
}
TEXT_WISHES: dict[str, dict[str, Any]] = {
    "prompt missing": {"prompt": None},
    "prompt empty": {"prompt": ""},
    "prompt one empty": {"prompt": ["a", ""]},
    "prompt no prompts": {"prompt": []},
    "prompt object": {"prompt": {}},
    "prompt mixed": {"prompt": ["a", 5]},
    "prompt negative token": {"prompt": [1, -5]},
    "prompt true token": {"prompt": [1, True]},
    "prompt many": {"prompt": ["x"] * 17},
    "prompt nul": {"prompt": "a\0b"},
    "logprobs true": {"logprobs": True},
    "logprobs many": {"logprobs": 21},
    "messages": {"messages": HELLO},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "model before prompt": {"model": 7, "prompt": None},
    "tools before prompt": {"tools": DEEP, "prompt": None},
    "prompt before logprobs": {"prompt": None, "logprobs": 99},
}
FEEDBACK_WISHES: dict[str, dict[str, Any]] = {
    "unknown": {"raiting": "up"},
    "unknown null": {"raiting": None},
    "unknown long": {"x" * 300: 1},
    "response_id missing": {"response_id": None},
    "response_id number": {"response_id": 5},
    "response_id empty": {"response_id": ""},
    "response_id long": {"response_id": "r" * 201},
    "response_id control": {"response_id": "a\nb"},
    "comment number": {"comment": 5},
    "correction list": {"correction": []},
    "rater number": {"rater": 5},
    "rater control": {"rater": "a\tb"},
    "rating true": {"rating": True},
    "rating object": {"rating": {}},
    "rating word": {"rating": "great"},
    "choice text": {"choice": "1"},
    "choice negative": {"choice": -1},
    "choice true": {"choice": True},
    "choice half": {"choice": 1.0},
    "choice large": {"choice": 128},
    "nobody's": {},
    "texts before rating": {"rating": {}, "comment": 5, "choice": -1},
    "rater before rating": {"rating": {}, "rater": "a\tb"},
    "rating before choice": {"rating": {}, "choice": -1},
}
CONTROL: dict[str, tuple[str, dict[str, Any]]] = {
    "load unknown": ("load", {**LOAD, "nmae": "x"}),
    "load missing": ("load", {key: value for key, value in LOAD.items() if key != "path"}),
    "load null": ("load", {**LOAD, "digest": None}),
    "load number": ("load", {**LOAD, "name": 5}),
    "load digest": ("load", LOAD),
    "load live name": ("load", {**LOAD, "name": PROFILE}),
    "load other profile": ("load", {**LOAD, "profile": "other"}),
    "load no version": ("load", {**LOAD, "name": f"{PROFILE}@v99"}),
    "load no name": ("load", {**LOAD, "name": "a b"}),
    "probe prompts text": ("probe", {**PROBE, "prompts": "hi"}),
    "probe prompts empty": ("probe", {**PROBE, "prompts": []}),
    "probe prompts many": ("probe", {**PROBE, "prompts": [HELLO] * 257}),
    "probe prompt": ("probe", {**PROBE, "prompts": [[{"role": "usr", "content": "x"}]]}),
    "probe max_tokens text": ("probe", {**PROBE, "max_tokens": "5"}),
    "probe max_tokens float": ("probe", {**PROBE, "max_tokens": 5.0}),
    "probe max_tokens true": ("probe", {**PROBE, "max_tokens": True}),
    "probe max_tokens zero": ("probe", {**PROBE, "max_tokens": 0}),
    "probe max_tokens large": ("probe", {**PROBE, "max_tokens": 65}),
    "probe prompts before max_tokens": ("probe", {**PROBE, "prompts": [], "max_tokens": 0}),
    "flip missing": ("flip", {}),
    "flip unknown": ("flip", {"profile": PROFILE, "name": "x"}),
    "flip nobody": ("flip", {"profile": "nobody"}),
    "drain number": ("drain", {"name": 5, "timeout_s": 1}),
    "drain timeout text": ("drain", {"name": VERSION, "timeout_s": "1"}),
    "drain timeout true": ("drain", {"name": VERSION, "timeout_s": True}),
    "drain timeout negative": ("drain", {"name": VERSION, "timeout_s": -1}),
    "drain timeout large": ("drain", {"name": VERSION, "timeout_s": 601}),
    "unload missing": ("unload", {}),
    "unload list": ("unload", {"name": []}),
    "unload live": ("unload", {"name": VERSION}),
}
RAW: dict[str, bytes] = {
    "empty": b"",
    "broken": b"{",
    "list": b"[]",
    "no utf-8": b'{"model": "\xff"}',
    "key twice": b'{"model": "support", "model": "base"}',
    "inner key twice": b'{"messages": [{"role": "user", "role": "user"}]}',
    "nan": b'{"temperature": NaN}',
    "too large number": b'{"temperature": 1e999}',
    "half of a pair": b'{"model": "\\ud800"}',
    "too deep": b'{"a":' * 2000 + b"1" + b"}" * 2000,
}


def cases() -> dict[str, tuple[str, bytes]]:
    """By name: the path and the body."""
    chat = {"model": PROFILE, "messages": HELLO, "max_tokens": 2}
    text = {"model": PROFILE, "prompt": "hi", "max_tokens": 2}
    sent: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, wish in (WISHES | CHAT_WISHES).items():
        limit = {"max_tokens": None} if "max_completion_tokens" in wish and "max_tokens" not in wish else {}
        sent[f"chat: {name}"] = ("/v1/chat/completions", {**chat, **limit, **wish})
    sent |= {f"text: {name}": ("/v1/completions", {**text, **wish}) for name, wish in (WISHES | TEXT_WISHES).items()}
    sent |= {f"feedback: {name}": ("/v1/feedback", {**RATED, **wish}) for name, wish in FEEDBACK_WISHES.items()}
    sent |= {f"control: {name}": (f"/control/{path}", body) for name, (path, body) in CONTROL.items()}
    raw = {
        f"{route.path}: {name}": (route.path, body)
        for route in ROUTES
        if route.method == "POST"
        for name, body in RAW.items()
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in sent.items()} | raw


@pytest.mark.parametrize("path", sorted({path for path, _ in cases().values()}))
def test_a_bad_body_is_told_what_is_recorded(server: ServerProcess, path: str) -> None:
    with server.http(headers={**JSON, "Authorization": f"Bearer {server.token}"}) as http:
        told = {name: refusal(http, path, body) for name, (to, body) in cases().items() if to == path}
    assert told == {name: RECORDED[name] for name in told}


def test_every_recorded_refusal_is_tried() -> None:
    assert sorted(RECORDED) == sorted(cases())


def bodies() -> dict[str, type[Body]]:
    """By path, the model that a handler declares."""
    return {route.path: get_type_hints(route.handler)["body"] for route in ROUTES if route.method == "POST"}


def test_every_route_that_is_posted_to_declares_the_model_of_its_body() -> None:
    assert len(bodies()) == 8
    assert all(issubclass(model, Body) for model in bodies().values())


@pytest.mark.parametrize("path", bodies())
def test_every_parameter_that_can_be_wrong_has_words_for_it(path: str) -> None:
    for name, about in bodies()[path].model_fields.items():
        has_words = any(isinstance(each, Told | PlainValidator) for each in about.metadata)
        assert has_words or about.annotation is Any, name


def test_a_million_unknown_parameters_are_told_of_the_first_at_once() -> None:
    said = {f"x{number}": 1 for number in range(1_000_000)}
    begun = time.process_time()
    with pytest.raises(ApiError, match="unknown parameter 'x0'"):
        validated(ChatBody, said, "/v1/chat/completions")
    assert time.process_time() - begun < 0.5


def test_a_known_idempotency_key_with_another_body_is_told_so_before_that_body_is_checked(
    server: ServerProcess,
) -> None:
    chat = {"model": VERSION, "messages": HELLO, "max_tokens": 2}
    with server.http(headers={**JSON, "Idempotency-Key": "first-come"}) as http:
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        again = http.post("/v1/chat/completions", json={**chat, "temprature": 1})
    assert (again.status_code, again.json()["error"]["code"]) == (422, "idempotency_key_reused")


def refusal(http: httpx2.Client, path: str, body: bytes) -> dict[str, Any]:
    answer = http.post(path, content=body)
    return {"status": answer.status_code, "retry_after": answer.headers.get("retry-after"), **answer.json()["error"]}
