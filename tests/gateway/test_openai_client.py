"""The stock `openai` client against a real server: chat and text, streamed and not, models, feedback, typed errors."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.gateway import PROFILE, ServerProcess, make_live
from support.workspaces import a_profile, wait_for
from tunesmith.client import Client

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> OpenAI:
    return server.openai()


def said(api: OpenAI, model: str, **wishes: Any) -> str:
    answer = api.chat.completions.create(model=model, messages=HELLO, **{"temperature": 0, "max_tokens": 12, **wishes})
    assert answer.choices[0].message.content is not None
    return answer.choices[0].message.content


def test_chat_of_a_profile_is_answered_by_the_exact_version_that_is_live(api: OpenAI) -> None:
    answer = api.chat.completions.create(model=PROFILE, messages=HELLO, max_tokens=12, temperature=0)
    assert answer.model == "support@v1"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_versions_and_base_answer_differently_and_each_the_same_again(api: OpenAI) -> None:
    names = ["support@v1", "support@v2", "support@v3", "support@base"]
    first = {name: said(api, name) for name in names}
    assert len(set(first.values())) == 4
    assert {name: said(api, name) for name in names} == first
    assert said(api, PROFILE) == first["support@v1"]
    assert said(api, "base") == first["support@base"]


def test_a_stream_is_the_same_answer_in_pieces_and_counts_its_tokens(api: OpenAI) -> None:
    whole = said(api, "support@v2")
    stream = api.chat.completions.create(
        model="support@v2",
        messages=HELLO,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert {(chunk.id, chunk.model) for chunk in chunks} == {(chunks[0].id, "support@v2")}


def test_several_choices_stop_seed_and_log_probabilities_are_honoured(api: OpenAI) -> None:
    wishes: dict[str, Any] = {"model": PROFILE, "messages": HELLO, "max_tokens": 8, "seed": 7, "n": 3}
    one = api.chat.completions.create(**wishes)
    again = api.chat.completions.create(**wishes)
    texts = [choice.message.content for choice in one.choices]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    told = api.chat.completions.create(
        model=PROFILE, messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    log_probs = told.choices[0].logprobs
    assert log_probs is not None
    assert log_probs.content is not None
    assert len(log_probs.content) == 4
    for token in log_probs.content:
        assert next(top.logprob for top in token.top_logprobs) == pytest.approx(token.logprob)
        assert len(token.top_logprobs) == 2
    text = said(api, PROFILE)
    stopped = said(api, PROFILE, stop=text[2])
    assert stopped == text[: text.index(text[2])]


def test_text_completions_take_texts_tokens_and_lists_of_them(api: OpenAI) -> None:
    one = api.completions.create(model=PROFILE, prompt="ab", max_tokens=3, temperature=0)
    two = api.completions.create(model=PROFILE, prompt=["ab", "cd"], max_tokens=3, temperature=0, logprobs=1)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    assert two.choices[0].logprobs is not None
    assert two.choices[0].logprobs.tokens is not None
    assert len(two.choices[0].logprobs.tokens) == 3
    tokens = api.completions.create(model=PROFILE, prompt=[5, 6, 7], max_tokens=3)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 3
    pieces = api.completions.create(model=PROFILE, prompt="ab", max_tokens=3, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == one.choices[0].text


def test_models_are_listed_and_found_by_name(api: OpenAI) -> None:
    listed = {model.id for model in api.models.list()}
    assert {"support", "support@base"} <= listed
    assert api.models.retrieve("support@v3").id == "support@v3"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("suport")


def test_many_clients_at_once_are_each_answered_as_alone(server: ServerProcess) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            asked = [
                api.chat.completions.create(
                    model=f"support@v{1 + number % 3}", messages=HELLO, temperature=0, max_tokens=12
                )
                for number in range(24)
            ]
            return [str(answer.choices[0].message.content) for answer in await asyncio.gather(*asked)]

    answers = asyncio.run(ask_all())
    alone = [said(server.openai(), f"support@v{number}") for number in (1, 2, 3)]
    assert answers == alone * 8


def test_a_name_moves_with_the_store_and_answers_say_who_wrote_them(
    api: OpenAI, server: ServerProcess, client: Client
) -> None:
    database = client.serving.session.database
    exact = {name: said(api, name) for name in ("support@v2", "support@base")}
    make_live(database, 2)
    wait_for(lambda: server.health()["serving"]["support"] == "support@v2")
    assert said(api, PROFILE) == exact["support@v2"]
    make_live(database, None)
    assert server.control("/control/flip", {"profile": PROFILE}) == {"live": None}
    assert said(api, PROFILE) == exact["support@base"]
    make_live(database, 1)
    live = server.control("/control/flip", {"profile": PROFILE})["live"]
    assert live["name"] == "support@v1"


def test_every_refusal_is_a_typed_exception_with_all_four_keys(server: ServerProcess) -> None:
    api = server.openai()

    def refused(kind: type[openai.APIStatusError], **wishes: Any) -> dict[str, Any]:
        asked: dict[str, Any] = {"model": PROFILE, "messages": HELLO, "max_tokens": 2, **wishes}
        with pytest.raises(kind) as caught:
            api.chat.completions.create(**asked)
        body = caught.value.body
        assert isinstance(body, dict)
        assert set(body) == {"message", "type", "param", "code"}
        return body

    assert refused(openai.NotFoundError, model="nobody")["code"] == "model_not_found"
    assert refused(openai.NotFoundError, model="support@v99")["code"] == "model_not_found"
    assert refused(openai.NotFoundError, model="../../etc/passwd")["param"] == "model"
    assert refused(openai.BadRequestError, messages=[])["param"] == "messages"
    assert refused(openai.BadRequestError, n=9)["param"] == "n"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert refused(openai.BadRequestError, tools=tools)["code"] == "unsupported_parameter"
    assert refused(openai.BadRequestError, response_format={"type": "json_object"})["param"] == "response_format"
    assert refused(openai.BadRequestError, logit_bias={"5": 1})["param"] == "logit_bias"
    for name in ("api_base", "chat_template", "lora_path"):
        assert refused(openai.BadRequestError, extra_body={name: "x"})["code"] == "unknown_parameter"
    told = refused(openai.BadRequestError, extra_body={"temprature": 1})
    assert "did you mean 'temperature'" in told["message"]


def test_more_tokens_than_the_server_writes_end_at_its_limit(api: OpenAI) -> None:
    answer = api.chat.completions.create(model=PROFILE, messages=HELLO, max_tokens=1_000_000_000, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 64


def test_parameters_without_effect_are_accepted(api: OpenAI) -> None:
    answer = api.chat.completions.create(
        model=PROFILE,
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        response_format={"type": "text"},
        user="somebody",
        metadata={"task_type": "greeting"},
        store=True,
        service_tier="auto",
    )
    assert answer.choices[0].message.role == "assistant"


def test_an_idempotency_key_brings_the_first_answer_again_and_is_refused_for_another_body(api: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "support@v1", "messages": HELLO, "max_tokens": 8, "temperature": 1.5}
    first = api.chat.completions.create(**asked, extra_headers={"Idempotency-Key": "order-1"})
    again = api.chat.completions.create(**asked, extra_headers={"Idempotency-Key": "order-1"})
    assert again == first
    other = api.chat.completions.create(**asked, extra_headers={"Idempotency-Key": "order-2"})
    assert other.id != first.id
    changed = {**asked, "max_tokens": 9}
    with pytest.raises(openai.UnprocessableEntityError, match="another body"):
        api.chat.completions.create(**changed, extra_headers={"Idempotency-Key": "order-1"})
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        api.chat.completions.create(**asked, extra_headers={"Idempotency-Key": "k" * 256})


def test_an_idempotency_key_of_a_request_that_failed_is_free_again(api: OpenAI) -> None:
    key = {"Idempotency-Key": "order-3"}
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="nobody", messages=HELLO, extra_headers=key)
    assert api.chat.completions.create(model="support@v1", messages=HELLO, max_tokens=4, extra_headers=key).id


def test_a_request_without_max_tokens_ends_where_its_profile_says(server: ServerProcess, client: Client) -> None:
    a_profile(client.workspace.root, "brief", recipe={"max_length": 256}, answers={"max_tokens": 3})
    wait_for(lambda: "brief" in server.health()["serving"])
    asked = {"model": "brief", "messages": HELLO, "temperature": 0}
    answer = server.api.chat.completions.create(**asked)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
    assert server.api.chat.completions.create(**asked, max_tokens=5).usage.completion_tokens == 5
