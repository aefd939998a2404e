"""An answer belongs to the API key that asked: ids that nobody guesses, feedback by its owner, one voice per key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from builders import a_profile, wait_for
from gateway_builders import CHAT, PROFILE, ServerProcess, a_served_workspace, a_server
from tunesmith.client import Client
from tunesmith.gateway.limits import Pace
from tunesmith.gateway.refusals import ApiError
from tunesmith.gateway.scopes import derived_label
from tunesmith.openai import learn_from
from tunesmith.store import candidates

SHOP, DESK, NEW_SHOP, BACKEND, NAMELESS = (
    f"sk-{name}-0123456789abcdef" for name in ("shop", "desk", "new", "all", "x")
)
KEYS = f"""
{SHOP} label=shop
{DESK} read,chat,feedback label=desk
{NEW_SHOP} label=shop
{BACKEND} read,feedback,any_answer label=backend
{NAMELESS}
"""
RIGHT = "Hello, how can I help?"


@dataclass
class Keyed:
    server: ServerProcess
    client: Client

    def api(self, key: str) -> Any:
        return learn_from(self.server.openai(api_key=key))

    def ask(self, key: str, **wishes: Any) -> Any:
        return self.api(key).chat.completions.create(**{**CHAT, **wishes})

    def feedback(self, key: str, **body: Any) -> tuple[int, dict[str, Any]]:
        with self.server.http(headers={"Authorization": f"Bearer {key}"}) as http:
            answer = http.post("/v1/feedback", json=body)
        return answer.status_code, answer.json()

    def correction_of(self, response_id: str) -> tuple[str | None, str | None]:
        """What an assembly would take."""
        found = self.client.experiences.show(f"{PROFILE}:{response_id}").experience.id
        with self.client.serving.session.database.read() as tx:
            candidate = candidates.by_ids(tx, [found])[found]
        return candidate.correction, candidate.corrected_by


@pytest.fixture(scope="module")
def keyed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    serve = {"key_file": "keys"}
    client = a_served_workspace(tmp_path_factory.mktemp("keys") / "ws", base, serve=serve, num_versions=2)
    path = client.workspace.root / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    with a_server(client.workspace.root) as process:
        yield Keyed(process, client)
    client.close()


def test_ids_of_answers_cannot_be_counted_up(keyed: Keyed) -> None:
    ids = [keyed.ask(SHOP, max_tokens=1).id for _ in range(3)]
    tails = [each[-16:] for each in ids]  # after the time
    assert len({tail[:4] for tail in tails}) == 3
    assert len(ids[0]) == len("chatcmpl-") + 26


def test_only_the_key_that_asked_may_rate_and_correct(keyed: Keyed) -> None:
    answer = keyed.ask(SHOP, n=2)
    keyed.api(SHOP).feedback(answer, "helpful")
    stolen, unknown = (
        keyed.feedback(DESK, response_id=name, rating="down", correction=RIGHT) for name in (answer.id, "chatcmpl-none")
    )
    assert stolen[0] == unknown[0] == 404
    assert stolen[1]["error"]["message"].replace(answer.id, "ID") == unknown[1]["error"]["message"].replace(
        "chatcmpl-none", "ID"
    )  # whether the id exists is not told
    assert keyed.feedback(DESK, response_id=answer.id, choice=1, rating="down")[0] == 404
    assert keyed.feedback(DESK, response_id=f"{answer.id}/1", rating="down")[0] == 404
    assert keyed.feedback(SHOP, response_id=answer.id, choice=1, rating="up")[0] == 200
    assert keyed.correction_of(answer.id) == (None, None)
    shown = keyed.client.experiences.show(f"{PROFILE}:{answer.id}")
    assert shown.experience.key_label == "shop"
    assert [(said.key_label, said.rater, said.value) for said in shown.feedback] == [("shop", "client", 1.0)]


def test_rater_names_of_one_key_are_one_voice(keyed: Keyed) -> None:
    answer = keyed.ask(SHOP)
    for rater in ("ann", "bob", "cid", "dan"):
        keyed.api(SHOP).feedback(answer, "down", rater=rater)
    shown = keyed.client.experiences.show(f"{PROFILE}:{answer.id}").experience
    assert (shown.feedback.num, shown.feedback.mean) == (1, 0.0)
    assert shown.class_name == "ambiguous"
    keyed.api(BACKEND).feedback(answer, "up", rater="ann")
    shown = keyed.client.experiences.show(f"{PROFILE}:{answer.id}").experience
    assert (shown.feedback.num, shown.feedback.mean) == (2, 0.5)


def test_a_key_with_any_answer_rates_for_others_under_its_own_label(keyed: Keyed) -> None:
    answer = keyed.ask(DESK)
    rated = keyed.api(BACKEND).feedback(answer, correction=RIGHT, rater="ann")
    assert rated["is_new"]
    assert keyed.correction_of(answer.id) == (RIGHT, "backend/ann")


def test_keys_with_one_label_are_one_caller_and_a_key_without_one_has_its_own(keyed: Keyed) -> None:
    answer = keyed.ask(SHOP)
    keyed.api(SHOP).feedback(answer, "up")
    again = keyed.api(NEW_SHOP).feedback(answer, "up")
    assert again["is_new"] is False
    nameless = keyed.ask(NAMELESS)
    keyed.api(NAMELESS).feedback(nameless, "up")
    label = keyed.client.experiences.show(f"{PROFILE}:{nameless.id}").experience.key_label
    assert label == derived_label(NAMELESS)
    assert NAMELESS not in label
    assert keyed.feedback(SHOP, response_id=nameless.id, rating="up")[0] == 404


def test_what_was_never_served_is_rated_by_nobody_over_http(keyed: Keyed) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    added = keyed.client.experiences.add(PROFILE, messages, key="chatcmpl-mine", source="serve")
    unnamed = keyed.client.experiences.add(PROFILE, messages, session="s")
    for name in ("chatcmpl-mine", added.id, f"{PROFILE}:chatcmpl-mine", unnamed.id):
        for key in (SHOP, BACKEND, keyed.server.token):
            assert keyed.feedback(key, response_id=name, rating="down", correction=RIGHT)[0] == 404, (name, key)
    assert keyed.client.experiences.show(added.id).feedback == ()


def test_a_session_named_by_another_key_says_nothing_about_an_answer(keyed: Keyed) -> None:
    session = {"extra_headers": {"X-Tunesmith-Session": "order-17"}}
    answer = keyed.ask(SHOP, **session)
    said = [*CHAT["messages"], {"role": "assistant", "content": answer.choices[0].message.content}]
    complaint = [*said, {"role": "user", "content": "no, that is wrong"}]
    keyed.api(SHOP).feedback(answer, comment="so that it is stored")
    foreign = keyed.ask(DESK, messages=complaint, **session)
    keyed.api(DESK).feedback(foreign, comment="so that it is stored")
    assert keyed.client.experiences.show(f"{PROFILE}:{answer.id}").experience.feedback.num_complaints == 0
    own = keyed.ask(SHOP, messages=complaint, **session)
    keyed.api(SHOP).feedback(own, comment="so that it is stored")
    assert keyed.client.experiences.show(f"{PROFILE}:{answer.id}").experience.feedback.num_complaints == 1


def test_one_key_sends_only_so_much_in_a_minute() -> None:
    now = 0.0
    pace = Pace(60, clock=lambda: now)
    for _ in range(60):
        pace.enter("shop")
    with pytest.raises(ApiError) as refused:
        pace.enter("shop")
    assert (refused.value.http_status, refused.value.retry_after_s) == (429, 1.0)
    pace.enter("desk")
    now = 2.5
    pace.enter("shop")
    pace.enter("shop")
    with pytest.raises(ApiError):
        pace.enter("shop")


def test_a_correction_of_a_cut_answer_is_kept_and_learnt_after_a_restart(base: Path, tmp_path: Path) -> None:
    client = a_served_workspace(tmp_path / "ws", base, num_versions=1)
    a_profile(client.workspace.root, PROFILE, recipe={"max_length": 256})  # finished_only, as it is by default
    with a_server(client.workspace.root) as server:
        wait_for(lambda: server.health()["serving"])
        api: Any = learn_from(server.openai())
        at_limit = api.chat.completions.create(**{**CHAT, "max_tokens": 3})
        left = api.chat.completions.create(**{**CHAT, "max_tokens": 60, "stream": True})
        chunk = next(iter(left))
        left.close()
        wait_for(lambda: client.experiences.list(profile=PROFILE, limit=10)[1:])
        rated = api.feedback(at_limit, "helpful")
        assert rated["class"] == "ambiguous"  # a cut answer is no example, whoever likes it
        server.end()
    with a_server(client.workspace.root) as server:
        api = learn_from(server.openai())
        for answer in (at_limit, chunk):
            assert api.feedback(answer, correction=RIGHT)["is_new"]
    keyed = Keyed(server, client)
    for answer in (at_limit, chunk):
        assert keyed.correction_of(answer.id) == (RIGHT, "local/client")
    client.close()


def test_a_correction_brings_an_answer_to_the_store_that_the_share_left_out(base: Path, tmp_path: Path) -> None:
    client = a_served_workspace(tmp_path / "ws", base, num_versions=1)
    capture = {"finished_only": False, "share": 0.0}
    a_profile(client.workspace.root, PROFILE, recipe={"max_length": 256}, experience={"capture": capture})
    with a_server(client.workspace.root) as server:
        wait_for(lambda: server.health()["serving"])
        api: Any = learn_from(server.openai())
        answer, refused = (api.chat.completions.create(**CHAT, store=store) for store in (None, False))
        with pytest.raises(openai.NotFoundError, match="keeps only a share"):
            api.feedback(answer, "up")
        assert api.feedback(answer, correction=RIGHT)["is_new"]
        with pytest.raises(openai.NotFoundError, match="asked that it is not kept"):
            api.feedback(refused, correction=RIGHT)
    assert [each.key for each in client.experiences.list(profile=PROFILE)] == [answer.id]
    client.close()
