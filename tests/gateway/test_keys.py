"""An answer belongs to the API key that asked: ids that nobody guesses, feedback by its owner, one voice per key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.responses import Response

from support.gateway import CHAT, PROFILE, ServerProcess, a_served_workspace, a_server
from support.workspaces import a_profile, wait_for
from tunesmith.client import Client
from tunesmith.experience.queries import candidates
from tunesmith.openai import learn_from
from tunesmith.serving.gateway.admission import RateLimiter
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.idempotency import IdempotencyCache
from tunesmith.serving.gateway.scopes import derived_label

SHOP, DESK, NEW_SHOP, BACKEND, NAMELESS, TESTER = (
    f"sk-{name}-0123456789abcdef" for name in ("shop", "desk", "new", "all", "x", "test")
)
KEYS = f"""
{SHOP} label=shop
{DESK} read,chat,feedback label=desk
{NEW_SHOP} label=shop
{BACKEND} read,feedback,any_answer label=backend
{NAMELESS}
{TESTER} chat,any_version label=tester
"""
RIGHT = "Hello, how can I help?"


@dataclass
class Keyed:
    server: ServerProcess
    client: Client

    apis: dict[str, Any] = field(default_factory=dict)

    def api(self, key: str) -> Any:
        if key not in self.apis:
            self.apis[key] = learn_from(self.server.openai(api_key=key))
        return self.apis[key]

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
        keyed = Keyed(process, client)
        yield keyed
        for api in keyed.apis.values():
            api.close()
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
    # whether the id exists is not told
    told = unknown[1]["error"]["message"].replace("chatcmpl-none", "ID")
    assert stolen[1]["error"]["message"].replace(answer.id, "ID") == told
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
    assert (rated["is_new"], rated["correction"]) == (True, True)
    assert keyed.correction_of(answer.id) == (RIGHT, "backend/ann")


def test_keys_with_one_label_are_one_caller_and_a_key_without_one_has_its_own(keyed: Keyed) -> None:
    answer = keyed.ask(SHOP)
    keyed.api(SHOP).feedback(answer, "up")
    again = keyed.api(NEW_SHOP).feedback(answer, "up")
    assert (again["is_new"], again["correction"]) == (False, False)
    history = keyed.client.experiences.show(f"{PROFILE}:{answer.id}").events
    assert {event.actor for event in history if event.action == "rated"} == {"key:shop"}
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
    pace = RateLimiter(60, clock=lambda: now)
    for _ in range(60):
        pace.acquire("shop")
    with pytest.raises(ApiError) as refused:
        pace.acquire("shop")
    assert (refused.value.http_status, refused.value.retry_after_s) == (429, 1.0)
    pace.acquire("desk")
    now = 2.5
    pace.acquire("shop")
    pace.acquire("shop")
    with pytest.raises(ApiError):
        pace.acquire("shop")


def test_a_correction_of_a_cut_answer_is_kept_and_learnt_after_a_restart(base: Path, tmp_path: Path) -> None:
    client = a_served_workspace(tmp_path / "ws", base, num_versions=1)
    a_profile(client.workspace.root, PROFILE, recipe={"max_length": 256})  # finished_only, as it is by default
    with a_server(client.workspace.root) as server:
        wait_for(lambda: server.health()["serving"])
        api: Any = learn_from(server.api)
        at_limit = api.chat.completions.create(**{**CHAT, "max_tokens": 3})
        left = api.chat.completions.create(**{**CHAT, "max_tokens": 60, "stream": True})
        chunk = next(iter(left))
        left.close()
        wait_for(lambda: client.experiences.list(profile=PROFILE, limit=10)[1:])
        rated = api.feedback(at_limit, "helpful")
        assert rated["class"] == "ambiguous"  # a cut answer is no example, whoever likes it
        server.end()
    with a_server(client.workspace.root) as server:
        api = learn_from(server.api)
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
        api: Any = learn_from(server.api)
        answer, refused = (api.chat.completions.create(**CHAT, store=store) for store in (None, False))
        with pytest.raises(openai.NotFoundError, match="captures only a share"):
            api.feedback(answer, "up")
        assert api.feedback(answer, correction=RIGHT)["is_new"]
        with pytest.raises(openai.NotFoundError, match="opted out of capture"):
            api.feedback(refused, correction=RIGHT)
    assert [each.key for each in client.experiences.list(profile=PROFILE)] == [answer.id]
    client.close()


def test_a_version_that_never_went_live_needs_a_scope_of_its_own(keyed: Keyed) -> None:
    """And whoever lacks it is not told which versions there are."""
    told = set()
    for name in ("support@v2", "support@v99"):
        with pytest.raises(openai.NotFoundError) as refused:
            keyed.ask(SHOP, model=name)
        with pytest.raises(openai.NotFoundError):
            keyed.api(SHOP).models.retrieve(name)
        told.add(str(refused.value).replace(name, "NAME"))
    assert len(told) == 1
    assert keyed.ask(SHOP, model="support@v1").model == "support@v1"
    assert keyed.ask(SHOP, model="support@base").model == "support@base"
    assert keyed.ask(TESTER, model="support@v2").model == "support@v2"


@pytest.mark.parametrize("session", ["s" * 501, "a\x1b[31mb", "caf\u00e9".encode(), b"\xff"])
def test_a_session_that_could_not_be_kept_as_it_is_is_refused(keyed: Keyed, session: str | bytes) -> None:
    with keyed.server.http(headers={"Authorization": f"Bearer {SHOP}"}) as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers={"X-Tunesmith-Session": session})  # type: ignore[dict-item]
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "body", [{"user": "u\u202eu"}, {"metadata": {"session": "s" * 501}}, {"metadata": {"template": "\x07"}}]
)
def test_names_in_a_body_that_could_not_be_kept_are_refused(keyed: Keyed, body: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="characters"):
        keyed.ask(SHOP, **body)


@pytest.mark.parametrize("name", ["X-Tunesmith-Consent", "X-Tunesmith-Session", "Idempotency-Key"])
def test_a_header_that_is_read_once_is_not_taken_twice(keyed: Keyed, name: str) -> None:
    headers = [("Authorization", f"Bearer {SHOP}"), (name, "yes"), (name, "no")]
    with keyed.server.http() as http:
        answer = http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert (answer.status_code, "several" in answer.text) == (400, True)


def test_every_response_has_a_request_id_and_the_log_names_the_key(keyed: Keyed) -> None:
    with keyed.server.http(headers={"Authorization": f"Bearer {SHOP}"}) as http:
        own = http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "order-17:a.b"})
        assert own.headers.get_list("x-request-id") == ["order-17:a.b"]
        for bad in ("x" * 129, "a b", "a\x1b[31m", "\u00e9".encode()):
            made = http.get("/healthz", headers={"X-Request-Id": bad}).headers["x-request-id"]
            assert made.startswith("req-")
        for path in ("/v1/models", "/nothing"):
            assert http.get(path).headers["x-request-id"] != made
    with keyed.server.http() as http:
        assert http.get("/healthz").headers["x-request-id"].startswith("req-")
        assert http.post("/v1/chat/completions", content=b"{").headers["x-request-id"]
    assert keyed.ask(DESK)._request_id.startswith("req-")
    log = wait_for(lambda: (text := keyed.server.log.read_text()) and "order-17:a.b" in text and text)
    line = next(line for line in log.splitlines() if "order-17:a.b" in line)
    assert 'key="shop"' in line
    assert "status=200" in line
    assert not any(key in log for key in (SHOP, DESK, NAMELESS))


def test_a_key_taken_out_of_the_file_stops_working_and_a_bad_file_closes_the_server(base: Path, tmp_path: Path) -> None:
    client = a_served_workspace(tmp_path / "ws", base, serve={"key_file": "keys"}, num_versions=0)
    path = client.workspace.root / "keys"

    def write(text: str, mode: int = 0o600) -> None:
        fresh = path.with_name("fresh")
        fresh.write_text(text)
        fresh.chmod(mode)
        fresh.replace(path)

    write(f"{SHOP} label=shop\n{DESK} label=desk\n")
    with a_server(client.workspace.root) as server, server.http() as http:

        def status(key: str) -> int:
            return http.get("/healthz", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status(SHOP), status(DESK)) == (200, 200)
        write(f"{SHOP} label=shop\n")
        wait_for(lambda: status(DESK) == 401, 5.0)
        assert status(SHOP) == 200
        for text, mode in (("short\n", 0o600), (f"{SHOP}\n", 0o644), ("", 0o600)):
            write(text, mode)
            wait_for(lambda: status(SHOP) == 503, 5.0)
            assert status(server.token) == 200
            write(f"{SHOP} label=shop\n{DESK} read label=desk\n")
            wait_for(lambda: (status(SHOP), status(DESK)) == (200, 200), 5.0)
        path.unlink()
        wait_for(lambda: status(DESK) == 503, 5.0)
        log = server.log.read_text()
    assert 'removed=["desk"]' in log
    assert "keys_unusable" in log
    assert not any(key in log for key in (SHOP, DESK))
    client.close()


def test_answers_held_for_repeats_are_bounded_in_bytes() -> None:
    cache = IdempotencyCache()
    for number in range(100):
        with cache.entry({"idempotency-key": str(number)}, "/", {}) as record:
            record.store(Response(b"x" * (1 << 20)))
        assert cache.num_bytes <= 64 << 20
    with cache.entry({"idempotency-key": "99"}, "/", {}) as record:
        assert record.answer is not None
    with cache.entry({"idempotency-key": "0"}, "/", {}) as record:
        assert record.answer is None


def test_an_answer_that_was_too_large_to_hold_is_not_held_uncounted_when_it_is_written_again() -> None:
    cache = IdempotencyCache()
    for num_bytes in ((1 << 20) + 1, 1 << 20):
        with cache.entry({"idempotency-key": "a"}, "/", {}) as record:
            record.store(Response(b"x" * num_bytes))
    with cache.entry({"idempotency-key": "a"}, "/", {}) as record:
        assert (record.num_bytes, cache.num_bytes) == (0, 0)


def test_healthz_quotes_no_profile_file_to_a_key(keyed: Keyed) -> None:
    (keyed.client.workspace.profiles_dir / "broken.yaml").write_text("SECRET: 1\n")
    told = wait_for(lambda: keyed.server.health()["problems"].get("broken"))
    assert "SECRET" in told  # to the server's own token
    with keyed.server.http(headers={"Authorization": f"Bearer {SHOP}"}) as http:
        answer = http.get("/healthz")
    assert "profile check" in answer.json()["problems"]["broken"]
    assert "SECRET" not in answer.text
