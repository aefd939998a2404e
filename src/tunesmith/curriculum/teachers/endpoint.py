"""Asks any endpoint that speaks OpenAI's chat completions, and believes nothing it says.

One answer takes `timeout_s` at most, however slowly it drips; a body is read up to a limit; redirects are not followed;
what the endpoint asks us to wait is capped. Proxies of the environment are honoured as httpx does, but never for this
machine itself. Neither errors nor logs repeat the key.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.core import http
from tunesmith.core.errors import ConfigError
from tunesmith.curriculum.rules.correction import Reply
from tunesmith.datasets.example import TOOLS
from tunesmith.profiles.sections.curriculum import TeacherSettings

MAX_BYTES = 8 << 20
"""Of a response; the longest answer we would learn is far shorter."""
MAX_TRIES = 3
MAX_WAIT_S = 30.0
"""Between two tries; an endpoint that wants longer is down for us."""
_MAX_TOKENS = 10**9  # more than that was not counted, it was made up
_TRY_AGAIN = frozenset({429, 500, 503, 529})
"""The endpoint says that it did not answer, so nothing was billed. A gateway's 502 or 504 may hide an answer."""
_MAYBE_BILLED = frozenset({408, 502, 504})
_OF_THE_PROMPT = frozenset({400, 413, 422})
_MAX_SHOWN = 160
_CONNECT_S = 10.0

Wait = Callable[[float], bool]
"""Waits so many seconds; True: stop waiting, we are to end."""


class TeacherFailed(Exception):
    """There is no answer."""

    def __init__(self, reason: str, *, may_be_billed: bool, is_about_prompt: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_be_billed = may_be_billed
        """Whether somebody may have worked for it: all that was reserved counts."""
        self.is_about_prompt = is_about_prompt
        """The endpoint works and does not take this prompt: asking again brings the same."""


def key_of(teacher: TeacherSettings, environ: Mapping[str, str]) -> str | None:
    """The key; raises ConfigError where the variable that should hold it does not."""
    if teacher.api_key_env is None:
        return None
    key = environ.get(teacher.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {teacher.api_key_env} (curriculum.teacher.api_key_env) is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"the environment variable {teacher.api_key_env} holds what is no key: one word of ASCII")
    return key


def request_of(teacher: TeacherSettings, prompt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of the call: the messages as they are, and nothing of ours among them."""
    has_tools = bool(prompt) and prompt[0]["role"] == TOOLS
    body: dict[str, Any] = {
        "model": teacher.model,
        "messages": [_on_the_wire(message) for message in prompt[has_tools:]],
        "max_tokens": teacher.max_tokens,
        "temperature": teacher.temperature,
    }
    if has_tools:
        body["tools"] = json.loads(prompt[0]["content"])
    return body


def ask(
    teacher: TeacherSettings, prompt: Sequence[Mapping[str, Any]], key: str | None, wait: Wait | None = None
) -> Reply:
    """The teacher's answer to a prompt; raises TeacherFailed. Asks again only where nothing can have been billed."""
    body = json.dumps(request_of(teacher, prompt), ensure_ascii=False).encode(errors="replace")
    pause = wait or threading.Event().wait
    for number in range(1, MAX_TRIES + 1):
        try:
            response = _send(teacher, body, key)
        except http.NotReached as error:
            problem, wait_s = f"the teacher cannot be reached ({error})", 0.0
        else:
            if response.status not in _TRY_AGAIN:
                return _read(response, key)
            problem, wait_s = _complaint(response, key), response.retry_after_s or 0.0
        if wait_s > MAX_WAIT_S:
            raise TeacherFailed(f"{problem}; it wants us to wait longer than {MAX_WAIT_S:g} s", may_be_billed=False)
        if number == MAX_TRIES or pause(max(wait_s, 0.5 * 4 ** (number - 1))):
            break
    raise TeacherFailed(f"{problem}, {number} times" if number > 1 else problem, may_be_billed=False)


def _send(teacher: TeacherSettings, body: bytes, key: str | None) -> http.Reply:
    """Call once; raises http.NotReached if nobody took the request, TeacherFailed if it may be billed."""
    assert teacher.base_url is not None
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    url = f"{teacher.base_url}/chat/completions"
    try:
        reply = http.post_within(teacher.timeout_s, url, body, headers, limit=MAX_BYTES, connect_s=_CONNECT_S)
    except http.TooSlow:
        raise TeacherFailed(f"no answer within {teacher.timeout_s:g} s", may_be_billed=True) from None
    except http.BrokeOff as error:
        raise TeacherFailed(f"the connection broke off ({error})", may_be_billed=True) from None
    except http.TooLarge:
        raise TeacherFailed(f"the body has more than {MAX_BYTES >> 20} MiB", may_be_billed=True) from None
    if reply.headers.get("content-encoding", "identity").lower() != "identity":
        raise TeacherFailed("the body is compressed, which we did not ask for", may_be_billed=True)
    return reply


def _read(response: http.Reply, key: str | None) -> Reply:
    """The answer in a response that is not worth another try."""
    if response.status != 200:
        raise TeacherFailed(
            _complaint(response, key),
            may_be_billed=response.status in _MAYBE_BILLED or 200 < response.status < 300,
            is_about_prompt=response.status in _OF_THE_PROMPT,
        )
    said = response.json
    if not isinstance(said, dict):
        raise TeacherFailed("the body is no JSON object", may_be_billed=True)
    if said.get("error"):
        raise TeacherFailed(f"200 with an error: {_message(said, key)}", may_be_billed=True)
    choices = said.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        raise TeacherFailed("the body holds no choices[0].message", may_be_billed=True)
    text, finish, usage = message.get("content"), first.get("finish_reason"), said.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return Reply(
        text=text if isinstance(text, str) else "",
        finish=finish if isinstance(finish, str) else None,
        num_in=_count(counts.get("prompt_tokens")),
        num_out=_count(counts.get("completion_tokens")),
    )


def _count(value: Any) -> int | None:
    """None for what cannot be: nobody reads or writes an answer of no tokens."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_TOKENS
    return value if is_count else None


def _complaint(response: http.Reply, key: str | None) -> str:
    said = response.json
    told = _message(said, key) if isinstance(said, dict) else ""
    return f"the teacher answered {response.status}{': ' + told if told else ''}"


def _message(said: Mapping[str, Any], key: str | None) -> str:
    """What an endpoint complains about, cut, printable, and without the key that it may repeat."""
    error = said.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return http.shown(str(text or ""), _MAX_SHOWN, {key or "": "[the key]"})


def _on_the_wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as servers read it: the arguments of a call are a text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [{**call, "function": _as_text(call["function"])} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
