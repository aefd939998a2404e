"""Answers become experiences, as policy and consent allow; feedback finds them; a store that is down costs nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.databases import Postgres
from support.gateway import (
    CHAT,
    PROFILE,
    ServerProcess,
    a_served_workspace,
    a_server,
    ask,
    frozen_engine,
    make_live,
    warm,
)
from support.vllm_server import VllmServer
from support.workspaces import a_profile, wait_for
from tunesmith.client import Client
from tunesmith.client.experience_views import ExperienceView
from tunesmith.openai import learn_from


def experience_of(client: Client, response_id: str, profile: str = PROFILE) -> ExperienceView | None:
    found = client.experiences.list(profile=profile, limit=1000)
    return next((each for each in found if each.key == response_id), None)


def kept(client: Client, response_id: str) -> ExperienceView:
    return wait_for(lambda: experience_of(client, response_id), what=f"for {response_id}")


def settle(server: ServerProcess) -> dict[str, Any]:
    """Until nothing waits to be kept; the counts."""
    wait_for(lambda: server.health()["capture"]["num_pending"] == 0)
    counts: dict[str, Any] = server.health()["capture"]
    return counts


def test_an_answer_becomes_an_experience_with_the_version_that_wrote_it(server: ServerProcess, client: Client) -> None:
    answer = ask(
        server,
        metadata={"task_type": "greeting", "template": "t1", "session": "from-metadata"},
        extra_headers={"X-Tunesmith-Session": "s-1"},
    )
    experience = kept(client, answer.id)
    assert experience.answer == answer.choices[0].message.content
    assert experience.question == "hi"
    assert (experience.served_by, experience.source) == ("support@v1", "serve")
    assert (experience.session, experience.task_type, experience.template) == ("s-1", "greeting", "t1")


def test_streams_choices_exact_versions_and_texts_are_kept_each_under_its_id(
    server: ServerProcess, client: Client
) -> None:
    chunks = list(ask(server, model="support@v2", stream=True, user="u-1"))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    streamed = kept(client, chunks[0].id)
    assert (streamed.answer, streamed.served_by, streamed.session) == (text, "support@v2", "u-1")
    several = ask(server, n=2, temperature=0)
    assert kept(client, f"{several.id}/1").answer == several.choices[1].message.content
    base = ask(server, model="support@base")
    assert kept(client, base.id).served_by == "support@base"
    plain = server.api.completions.create(model=PROFILE, prompt="say ab", max_tokens=4, temperature=0)
    assert kept(client, plain.id).question == "say ab"


def test_who_does_not_want_it_is_not_kept_and_what_belongs_to_nobody_neither(
    server: ServerProcess, client: Client
) -> None:
    refused = [
        ask(server, extra_headers={"X-Tunesmith-Consent": "no"}),
        ask(server, store=False),
        ask(server, store=False, extra_headers={"X-Tunesmith-Consent": "yes"}),
        ask(server, model="base"),
    ]
    settle(server)
    for answer in refused:
        assert experience_of(client, answer.id) is None
        with pytest.raises(openai.NotFoundError) as caught:
            learn_from(server.openai()).feedback(answer, "helpful")  # type: ignore[attr-defined]
        assert "not captured" in str(caught.value)
    with pytest.raises(openai.BadRequestError):
        ask(server, extra_headers={"X-Tunesmith-Consent": "maybe"})


def test_a_profile_may_want_consent_and_whole_answers(server: ServerProcess, client: Client) -> None:
    for name, finished_only in (("careful", True), ("asking", False)):
        capture = {"consent": "required", "finished_only": finished_only}
        a_profile(client.workspace.root, name, recipe={"max_length": 256}, experience={"capture": capture})
    wait_for(lambda: {"careful", "asking"} <= set(server.health()["serving"]))
    first = ask(server, model="careful").choices[0].message.content
    yes = {"X-Tunesmith-Consent": "yes"}
    at_limit = ask(server, model="careful", extra_headers=yes)
    at_text = ask(server, model="careful", stop=first[5], extra_headers=yes)
    assert (at_limit.choices[0].finish_reason, at_text.choices[0].finish_reason) == ("length", "stop")
    unasked = ask(server, model="asking", stop=first[5])
    asked = ask(server, model="asking", stop=first[5], extra_headers=yes)
    wait_for(lambda: experience_of(client, asked.id, "asking"))
    assert experience_of(client, unasked.id, "asking") is None
    settle(server)
    kept_for_corrections = client.experiences.list(profile="careful")
    assert {each.key for each in kept_for_corrections} == {at_limit.id, at_text.id}
    assert {each.class_name for each in kept_for_corrections} == {"ambiguous"}


def test_feedback_on_an_answer_that_is_being_written_is_asked_for_again_and_not_lost(
    server: ServerProcess,
) -> None:
    told = {"rating": "down", "correction": "It left on Monday."}
    assert any(_rate_early(server, told) for _ in range(20)), "every answer was whole before its engine was stopped"


def _rate_early(server: ServerProcess, told: Mapping[str, str]) -> bool:
    """Rate both choices of an answer that is being written; False: it was whole before that."""
    api = server.openai(timeout=120.0)
    with (
        server.http() as http,
        api.chat.completions.create(**{**CHAT, "max_tokens": 60, "n": 2}, stream=True) as stream,
    ):
        response_id = next(iter(stream)).id

        def rate(choice: int) -> httpx2.Response:
            return http.post("/v1/feedback", json={"response_id": response_id, "choice": choice, **told})

        with frozen_engine(server):
            early = [rate(choice) for choice in (0, 1)]
        for _ in stream:
            pass
        if any(answer.status_code == 200 for answer in early):
            return False
        for answer in early:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_kept_yet"), answer.text
            assert "retry-after" in answer.headers
        for choice in (0, 1):
            later = rate(choice)
            assert later.status_code == 200, later.text
        unknown = rate(2)
        assert unknown.status_code == 404, unknown.text
        return True


def test_feedback_finds_a_fresh_answer_and_says_the_same_twice_once(server: ServerProcess, client: Client) -> None:
    api: Any = learn_from(server.openai())
    answer = ask(server)
    first = api.feedback(answer, "helpful", comment="just right")
    again = api.feedback(answer.id, "helpful", comment="just right")
    assert (first["is_new"], again["is_new"]) == (True, False)
    assert first["id"] == again["id"]
    shown = client.experiences.show(first["experience_id"])
    assert [(said.value, said.comment, said.rater) for said in shown.feedback] == [(1.0, "just right", "client")]
    rated = api.feedback(answer, 0.5, rater="anna")
    assert rated["is_new"]
    corrected = api.feedback(answer, "irrelevant", correction="Hello, how can I help?", rater="bert")
    assert client.experiences.show(corrected["experience_id"]).feedback[-1].correction == "Hello, how can I help?"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"rating": "helpful"}, 400), ({"response_id": "", "rating": "up"}, 400), ({"response_id": "x" * 300}, 400),
        ({"response_id": 7, "rating": "up"}, 400), ({"response_id": "ID", "rating": "great"}, 400),
        ({"response_id": "ID", "rating": 7}, 400), ({"response_id": "ID", "rating": True}, 400),
        ({"response_id": "ID"}, 400), ({"response_id": "ID", "ratng": "up"}, 400),
        ({"response_id": "a\0b", "rating": "up"}, 400), ({"response_id": "ID", "rating": 1, "rater": "\x1b[31m"}, 400),
        ({"response_id": "ID", "rating": "up", "choice": -1}, 400), ({"response_id": "ID", "comment": ""}, 400),
        ({"response_id": "chatcmpl-nobody", "rating": "up"}, 404), ({"response_id": "a' OR 1=1", "rating": "up"}, 404),
        ({"response_id": "ID", "correction": "no, that is wrong"}, 422),
    ],
)  # fmt: skip
def test_feedback_that_cannot_be_understood_is_refused(
    server: ServerProcess, body: dict[str, Any], status: int
) -> None:
    answer_id = ask(server).id
    said = {name: answer_id if value == "ID" else value for name, value in body.items()}
    with server.http() as http:
        answer = http.post("/v1/feedback", json=said)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_helper_rates_with_the_async_client_too(server: ServerProcess) -> None:
    async def chat() -> Any:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as api:
            learning: Any = learn_from(api)
            answer = await learning.chat.completions.create(**CHAT)
            return await learning.feedback(answer, "up")

    assert asyncio.run(chat())["is_new"]


def test_the_helper_keeps_answers_of_any_other_endpoint(base: Path, tmp_path: Path) -> None:
    """What a stop text cut is kept too, for the correction it may get, and is never gold."""
    elsewhere = a_served_workspace(tmp_path / "other", base, num_versions=0)
    a_profile(tmp_path / "other", PROFILE, recipe={"max_length": 256})  # finished_only, as it is by default
    where = {"workspace": tmp_path / "other", "profile": PROFILE}
    wishes: dict[str, Any] = {"model": "other", "messages": CHAT["messages"]}
    with VllmServer() as server:
        server.adapters["other"] = "/nowhere"
        url = f"{server.url}/v1"
        api: Any = learn_from(OpenAI(base_url=url, api_key="any"), **where)
        answer = api.chat.completions.create(**wishes)
        chunks = list(api.chat.completions.create(**wishes, stream=True))
        assert api.flush().num_stored == 2
        said = answer.choices[0].message.content
        assert [kept(elsewhere, each.id).answer for each in (answer, chunks[0])] == [said, said]
        assert api.feedback(answer, "helpful").is_new
        for server.tells_stop_reason in (True, False):
            api.chat.completions.create(**wishes, stop=said[2])
            cut = list(api.chat.completions.create(**wishes, stop=said[2], stream=True))
        assert api.flush().num_stored == 6
        assert api.feedback(cut[0], "up").class_name == "ambiguous"
        assert api.feedback(cut[0], correction="Hello, how can I help?").is_new
        left = api.chat.completions.create(**wishes, stream=True)
        for first in left:
            if first.choices[0].delta.content:
                break
        left.close()
        assert api.flush().num_stored == 7
        assert kept(elsewhere, first.id).class_name == "ambiguous"

        async def stream() -> Any:
            async with AsyncOpenAI(base_url=url, api_key="any") as plain:
                learning: Any = learn_from(plain, **where)
                last = None
                async for chunk in await learning.chat.completions.create(**wishes, stream=True):
                    last = chunk
                return await learning.feedback(last, "down")

        assert asyncio.run(stream()).is_new
    elsewhere.close()


def test_the_helper_imports_nothing_heavy() -> None:
    code = (
        "import sys, tunesmith.openai; print(sorted({'openai', 'sqlalchemy', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def on_postgres(base: Path, tmp_path: Path, postgres: Postgres) -> Iterator[tuple[ServerProcess, Client]]:
    """A server whose store can be stopped under it."""
    store = {"url": postgres.create("gateway", template="template_of_tests")}
    client = a_served_workspace(tmp_path / "pg", base, num_versions=2, store=store)
    with a_server(client.workspace.root) as process:
        warm(process, client)
        yield process, client
    client.close()


def test_answers_flow_while_the_store_is_down_drops_are_counted_and_it_recovers(
    on_postgres: tuple[ServerProcess, Client], postgres: Postgres
) -> None:
    server, client = on_postgres
    before = ask(server)
    kept(client, before.id)
    postgres.stop()
    try:
        begun = time.monotonic()
        during = [ask(server) for _ in range(5)]
        streamed = list(ask(server, stream=True))
        assert time.monotonic() - begun < 5.0
        assert {answer.model for answer in during} == {"support@v1"}
        assert streamed[-1].choices[0].finish_reason == "length"
        wait_for(lambda: server.health()["store"] != "ok", 30)
        wait_for(lambda: server.health()["capture"]["num_dropped"] == 6, 30)
        with pytest.raises(openai.InternalServerError):
            learn_from(server.openai()).feedback(before, "up")  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            ask(server, model="support@v2")
    finally:
        postgres.start()
    wait_for(lambda: server.health()["store"] == "ok", 30)
    after = ask(server)
    kept(client, after.id)
    make_live(client.serving.session.database, 2)
    wait_for(lambda: ask(server).model == "support@v2", 20)
    now = {PROFILE: "support@v2"}
    row = wait_for(lambda: next((s for s in client.serving.list() if s.serving == now), None), 20)
    assert (row.id, row.counts.get("num_dropped")) == (server.id, 6)
    assert isinstance(server.api, OpenAI)
