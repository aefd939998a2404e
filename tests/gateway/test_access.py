"""Nothing is open by accident: every route × method × credential; Host and Origin; bodies and headers of any size."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from support.gateway import PROFILE, ServerProcess, a_served_workspace, a_server, memory_of
from tunesmith.core.errors import ConfigError, TunesmithError
from tunesmith.profiles.settings import ServeSettings
from tunesmith.serving.gateway.app import ROUTES, allowed_host_names, with_access_control
from tunesmith.serving.gateway.messages import check_messages
from tunesmith.serving.gateway.scopes import Keys, Scope

FULL, READER, RATER = "sk-full-0123456789abcdef", "sk-read-0123456789abcdef", "sk-rate-0123456789abcdef"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
HAS = {FULL: {Scope.READ, Scope.CHAT, Scope.FEEDBACK}, READER: {Scope.READ}, RATER: {Scope.FEEDBACK}}
CHAT = {"model": PROFILE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def keyed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that wants keys, small bodies, and knows one web page."""
    serve = {"key_file": "keys", "allowed_origins": ["https://page.test"], "max_body_bytes": 100_000}
    client = a_served_workspace(
        tmp_path_factory.mktemp("keyed") / "ws", base, serve={**serve, "allowed_hosts": ["box.test"]}, num_versions=0
    )
    keys = client.workspace.root / "keys"
    keys.write_text(f"# ours\n{FULL}\n{READER} read\n{RATER} feedback\n")
    keys.chmod(0o600)
    with a_server(client.workspace.root) as process:
        yield process
    client.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_and_method_opens_only_to_its_scope(keyed: ServerProcess, route: Any) -> None:
    path = route.path.replace("{model}", PROFILE)
    with keyed.http() as http:
        for method in METHODS:
            is_internal = method == route.method or (method, route.method) == ("HEAD", "GET")
            statuses = {}
            for name in ("", "sk-nobody-0123456789abcdef", FULL, READER, RATER, keyed.token):
                headers = {"Content-Type": "application/json", **(bearer(name) if name else {})}
                statuses[name] = http.request(method, path, headers=headers).status_code
            assert statuses.pop("") == 401
            assert statuses.pop("sk-nobody-0123456789abcdef") == 401
            for name, status in statuses.items():
                scopes = HAS.get(name, set(Scope))
                if route.scope not in scopes:
                    assert status == 403, (method, name)
                elif is_internal:
                    assert status in (200, 400), (method, name)  # 400: the body says nothing
                else:
                    assert status == 405, (method, name)


def test_what_is_not_there_is_not_told_to_strangers(keyed: ServerProcess) -> None:
    paths = ["/", "/docs", "/openapi.json", "/v1", "/v1/models/..%2f..%2fetc", "/v1/models/%252e%252e%252f", "/control"]
    with keyed.http() as http:
        for path in [*paths, "/v1/models/a/b", "/v1/chat/completions/"]:
            assert http.get(path).status_code == 401, path
            assert http.get(path, headers=bearer(FULL)).status_code == 404, path


@pytest.mark.parametrize("value", ["", "Bearer", "Basic abc", "Bearer a b", "Bearer \u00e4", "Bearer " + "x" * 600])
def test_a_malformed_key_is_refused_also_where_none_is_needed(
    keyed: ServerProcess, server: ServerProcess, value: str
) -> None:
    for process in (keyed, server):
        with process.http() as http:
            answer = http.get("/v1/models", headers={"Authorization": value.encode("latin-1")})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_an_empty_key_is_refused(server: ServerProcess) -> None:
    answer = raw(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \r\n\r\n")
    assert b" 401 " in answer.split(b"\r\n")[0]


def test_a_megabyte_of_key_is_refused_quickly(keyed: ServerProcess) -> None:
    begun = time.monotonic()
    answer = raw(keyed, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"x" * (1 << 20))
    assert b" 401 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - begun < 2.0


def test_the_clients_typed_errors_come_of_wrong_keys(keyed: ServerProcess) -> None:
    with pytest.raises(openai.AuthenticationError):
        keyed.openai(api_key="sk-nobody-0123456789abcdef").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        keyed.openai(api_key=READER).chat.completions.create(**CHAT)
    assert keyed.openai(api_key=READER).models.list().data


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        "127.0.0.1.evil.test",
        "evil.test:80",
        "",
        "[::2]",
        "localhost@evil.test",
        "[::1]evil",
        "127.0.0.1:80@evil",
        "localhost:",
        "localhost:1:2",
        "[::1",
        "localhost/x",
        "::1",
    ],
)
def test_a_foreign_host_is_refused(server: ServerProcess, host: str) -> None:
    with server.http() as http:
        answer = http.get("/healthz", headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"


def test_loopback_names_and_allowed_hosts_are_answered_whatever_the_port(keyed: ServerProcess) -> None:
    with keyed.http(headers=bearer(FULL)) as http:
        for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:5", "box.test", "box.test:8080"):
            assert http.get("/healthz", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize("origin", ["https://evil.test", "null", "http://page.test", "https://page.test.evil.test"])
def test_a_web_page_that_is_not_allowed_is_refused_with_any_method(keyed: ServerProcess, origin: str) -> None:
    with keyed.http(headers={**bearer(FULL), "Origin": origin}) as http:
        for method in ("GET", "POST", "OPTIONS"):
            answer = http.request(method, "/v1/chat/completions", json=CHAT)
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_browser_that_hides_its_page_is_refused(server: ServerProcess) -> None:
    with server.http() as http:
        assert http.get("/healthz", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        assert http.get("/healthz", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_an_allowed_page_is_told_so_and_no_other(keyed: ServerProcess) -> None:
    with keyed.http(headers={"Origin": "https://page.test"}) as http:
        asked = http.options("/v1/chat/completions", headers={"Access-Control-Request-Method": "POST"})
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == "https://page.test"
        answer = http.get("/v1/models", headers=bearer(FULL))
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.test"
    with keyed.http(headers=bearer(FULL)) as http:
        assert "access-control-allow-origin" not in http.get("/v1/models").headers


def test_an_allowed_page_may_send_what_the_stock_javascript_client_sends(keyed: ServerProcess) -> None:
    sent = "authorization,content-type,idempotency-key,openai-organization,openai-project,user-agent,x-stainless-arch"
    wished = f"{sent},x-stainless-helper-method,x-stainless-retry-count,x-stainless-timeout,x-evil,x-stainless-\u00e9"
    with keyed.http(headers={"Origin": "https://page.test"}) as http:
        asked = http.options(
            "/v1/chat/completions",
            headers={"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wished.encode()},
        )
        allowed = {name.strip() for name in asked.headers["access-control-allow-headers"].split(",")}
        exposed = http.get("/v1/models", headers=bearer(FULL)).headers["access-control-expose-headers"]
    assert {*sent.split(","), "x-stainless-retry-count", "x-stainless-helper-method"} <= allowed
    assert all(name.isascii() and name != "x-evil" for name in allowed)
    assert "x-request-id" in exposed


@pytest.mark.parametrize(("num_bytes", "status"), [(60_000, 200), (66_000, 431), (70_000, 431)])
def test_headers_beyond_64_kib_are_refused_also_where_they_come_at_once(
    server: ServerProcess, num_bytes: int, status: int
) -> None:
    where = urlsplit(server.url)
    lines = [f"GET /healthz HTTP/1.1\r\nHost: {where.netloc}\r\nX-Pad: {'x' * num_bytes}\r\n\r\n"]
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as wire:
        wire.sendall("".join(lines).encode())
        first = wire.recv(200)
    assert int(first.split()[1]) in {status, 400 if status == 431 else status}, first


def test_a_route_without_a_scope_keeps_the_server_from_starting() -> None:
    async def open_door(request: Request) -> Response:
        return Response()

    app = FastAPI(openapi_url=None)
    app.add_api_route("/v1/secret", open_door, response_model=None)
    with pytest.raises(TunesmithError, match="/v1/secret' declares no scope"):
        with_access_control(app, Keys.of("token", None))


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("", 0o600, "holds no key"),
        ("short\n", 0o600, "line 1"),
        (f"{FULL} control\n", 0o600, "line 1 gives a scope"),
        (f"{FULL} read chat\n", 0o600, "line 1 has words too many"),
        (f"{FULL} any_answer\n", 0o600, "line 1 gives any_answer without feedback"),
        (f"{FULL} read,chatt\n", 0o600, "line 1 gives a scope"),
        (f"# ours\n{FULL}\n{FULL} read\n", 0o600, "line 3 has the same key as line 2"),
        (f"{FULL} label=local\n", 0o600, "line 1 has a label"),
        (f"{FULL} label=key-0123456789ab\n", 0o600, "line 1 has a label"),
        (f"{FULL} label=\x1b[31m\n", 0o600, "line 1 has a label"),
        (f"{FULL}\u00e9\n", 0o600, "line 1 does not begin with a key"),
        (f"{FULL}\n", 0o644, "chmod 600"),
    ],
)
def test_a_key_file_that_is_wrong_is_refused(tmp_path: Path, content: str, mode: int, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=reason) as refused:
        Keys.of("token", path)
    assert not any(word in str(refused.value) for word in (FULL, "control", "chatt", "\x1b"))


def test_a_key_file_that_is_missing_or_no_text_is_named_whole_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"{path} does not exist; write one key a line into it and run chmod 600"):
        Keys.of("token", path)
    path.write_bytes(b"\xff\xfe" + FULL.encode())
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path} is no text in UTF-8; write one key a line into it"):
        Keys.of("token", path)


def test_a_key_file_that_is_swapped_while_it_is_opened_is_judged_by_what_is_read(tmp_path: Path) -> None:
    path, others = tmp_path / "keys", tmp_path / "others"
    for file, mode in ((path, 0o600), (others, 0o666)):
        file.write_text("sk-0123456789abcdef")
        file.chmod(mode)

    def swap(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]) == str(path) and others.exists():
            others.replace(path)

    sys.addaudithook(swap)  # called just before any file is opened; there is no way to take it away again
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.of("token", path)
    assert not others.exists()


def test_a_key_file_may_begin_with_a_byte_order_mark_and_end_its_lines_as_windows_does(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfsk-0123456789abcdef label=shop\r\nsk-fedcba9876543210 label=desk\r\n")
    path.chmod(0o600)
    keys = Keys.of("token", path)
    labels = [keys.caller_of(f"Bearer sk-{key}").label for key in ("0123456789abcdef", "fedcba9876543210")]
    assert labels == ["shop", "desk"]


BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b"null", 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"model": "\xff"}', 400, "invalid_json"),
    (b"[" * 40_000, 400, "invalid_json"),
    (b'{"a":' * 18_000 + b"1" + b"}" * 4_000, 400, "invalid_json"),
    (b'{"model": "support", "model": "base", "messages": []}', 400, "invalid_json"),
    (b'{"model": "support", "temperature": NaN}', 400, "invalid_json"),
    (b'{"model": "support", "temperature": 1e999, "messages": []}', 400, "invalid_json"),
    (b'{"model": "support", "messages": "hi"}', 400, "invalid_value"),
    (b'{"model": 7, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_model"),
    (b'{"model": "support", "messages": [{"role": "user", "content": "\\u0000"}]}', 400, "invalid_value"),
    (b'{"model": "support", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json"),
    (b'{"model": "support", "messages": [{"role": "wizard", "content": "x"}]}', 400, "invalid_value"),
    (b'{"model": "support", "messages": [{"role": "user"}]}', 400, "invalid_value"),
    (
        b'{"model": "support", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        400,
        "unsupported_content",
    ),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_bad_body_is_refused_at_once_with_its_reason(
    server: ServerProcess, body: bytes, status: int, code: str
) -> None:
    begun = time.monotonic()
    with server.http() as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert time.monotonic() - begun < 1.0


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"temperature": True}, {"top_p": 1.5}, {"n": 0}, {"n": 1.5},
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 10**30}, {"max_tokens": 5, "max_completion_tokens": 5},
        {"stop": ["a", "b", "c", "d", "e"]}, {"stop": ""}, {"stop": [1]}, {"seed": "x"}, {"seed": 2**70},
        {"stream": "yes"}, {"stream_options": {"include_usage": True}}, {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21}, {"metadata": {"a": 1}}, {"user": 5}, {"frequency_penalty": 3},
        {"functions": [{"name": "f"}]}, {"audio": {"voice": "x"}}, {"modalities": ["audio"]},
        {"lora_path": "/etc/passwd"}, {"api_base": "http://evil.test"}, {"chat_template": "{{ 1 }}"},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(server: ServerProcess, wish: dict[str, Any]) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, **wish})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] in wish


CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP: Any = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"name": {}}, "name"), ({"name": "a\0b"}, "name"), ({"name": 10**40}, "name"), ({"name": "x" * 600}, "name"),
        ({"tool_call_id": 10**40}, "tool_call_id"), ({"tool_call_id": [1]}, "tool_call_id"),
        ({"tool_calls": DEEP}, "tool_calls[0]"), ({"tool_calls": "f"}, "tool_calls"),
        ({"tool_calls": [CALL] * 200}, "tool_calls"), ({"tool_calls": [10**40]}, "tool_calls[0]"),
        ({"tool_calls": [{**CALL, "id": 10**40}]}, "tool_calls[0].id"),
        ({"tool_calls": [{**CALL, "more": 1}]}, "tool_calls[0].more"),
        ({"tool_calls": [{**CALL, "type": "shell"}]}, "tool_calls[0].type"),
        ({"tool_calls": [{**CALL, "function": {"name": "f", "arguments": DEEP}}]}, "tool_calls[0].function.arguments"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_stands_beside_a_messages_content_is_checked(
    server: ServerProcess, wish: dict[str, Any], param: str
) -> None:
    message = {"role": "assistant", "content": "x", **wish}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, "messages": [message, *CHAT["messages"]]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"messages[0].{param}"


def test_a_call_as_an_answer_told_it_passes_the_checks() -> None:
    message = {"role": "assistant", "content": None, "name": "bot", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    kept = [{"role": "assistant", "content": "", "name": "bot", "tool_calls": [CALL]}, result]
    assert list(check_messages([message, result])) == kept


@pytest.mark.parametrize("value", [DEEP, [{"a": 10**40}]], ids=["deep", "large"])
def test_what_is_only_passed_on_can_be_passed_on(server: ServerProcess, value: Any) -> None:
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, "tools": value})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_wrong_content_types_are_refused(server: ServerProcess) -> None:
    with server.http() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
            assert answer.status_code == 415, kind
        zipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert http.post("/v1/chat/completions", content=b"x", headers=zipped).status_code == 415


def test_two_gigabytes_are_refused_before_they_are_read(keyed: ServerProcess) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {FULL}\r\nContent-Length: {2 << 30}\r\n\r\n"
    )
    assert b" 413 " in raw(keyed, head.encode() + b"[" * 1000).split(b"\r\n")[0]


def test_a_body_without_a_length_ends_at_the_limit(keyed: ServerProcess) -> None:
    num_sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal num_sent
        for _ in range(100_000):
            num_sent += 1
            yield b" " * 10_000

    before = memory_of(keyed)
    with keyed.http(headers={**bearer(FULL), "Content-Type": "application/json"}) as http:
        try:
            answer = http.post("/v1/chat/completions", content=chunks())
            assert answer.status_code == 413
        except httpx2.HTTPError:
            pass  # it hung up while we were still sending
    assert num_sent < 2_000
    assert memory_of(keyed) - before < 50 << 20


def test_queries_that_no_route_takes_are_refused(server: ServerProcess) -> None:
    with server.http() as http:
        for query in ("limit=-1", "after=forged", "limit=1e9"):
            answer = http.get(f"/v1/models?{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/feedback"])
def test_a_query_beside_a_body_is_refused(server: ServerProcess, path: str) -> None:
    with server.http() as http:
        answer = http.post(f"{path}?stream=true", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


def test_a_request_with_two_lengths_is_refused_and_hung_up_on(server: ServerProcess) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    answer = raw(server, head)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b"connection: close" in answer.lower()


def test_head_is_get_without_its_body(server: ServerProcess) -> None:
    with server.http() as http:
        answer = http.head("/healthz")
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


def test_a_version_has_one_name(server: ServerProcess) -> None:
    with server.http() as http:
        assert http.get(f"/v1/models/{PROFILE}@v1").status_code == 200
        assert http.get(f"/v1/models/{PROFILE}@v01").status_code == 404


@pytest.mark.parametrize(("host", "is_name"), [("127.0.0.2", True), ("box.test", True), ("0.0.0.0", False)])
def test_a_server_may_be_asked_as_what_it_listens_on(host: str, is_name: bool) -> None:
    assert (host in allowed_host_names(ServeSettings(host=host))) is is_name


def test_what_is_no_http_is_answered_with_one_line(server: ServerProcess) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"\r\n\r\nhello\r\n\r\n"):
        answer = raw(server, nonsense)
        assert not answer or b"400" in answer.split(b"\r\n")[0]
    assert server.health()["status"] == "ok"


def test_errors_tell_nothing_about_the_machine(server: ServerProcess) -> None:
    with server.http() as http:
        for answer in (
            http.post("/v1/chat/completions", json={**CHAT, "model": "x" * 500}),
            http.post("/v1/feedback", json={"response_id": "nobody", "rating": "up"}),
            http.get("/nothing"),
        ):
            assert answer.status_code == 404
            assert str(server.root) not in answer.text
            assert "Traceback" not in answer.text
            assert len(answer.text) < 1000


def test_no_key_is_in_the_log_or_in_sight_of_other_users(keyed: ServerProcess) -> None:
    served_profiles = [keyed.log.read_text()]
    served_profiles += [Path(f"/proc/{keyed.process.pid}/{name}").read_text() for name in ("environ", "cmdline")]
    for secret in (FULL, READER, RATER, keyed.token):
        assert not [served for served in served_profiles if secret in served]
    (about,) = (keyed.root / ".tunesmith" / "serve").glob("*.json")
    assert about.stat().st_mode & 0o077 == 0


def raw(server: ServerProcess, data: bytes) -> bytes:
    """What comes back for bytes on the wire."""
    where = urlsplit(server.url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80), timeout=5) as wire:
        answer = b""
        with contextlib.suppress(OSError):
            wire.sendall(data)
        with contextlib.suppress(OSError):  # it hung up already; what it said is still there
            while b"\r\n\r\n" not in answer and (part := wire.recv(65536)):
                answer += part
        return answer
