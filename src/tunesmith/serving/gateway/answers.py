"""OpenAI response bodies, complete and in chunks, and the HTTP responses that send them (JSON, server-sent events)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from tunesmith.core.ids import secret_id
from tunesmith.serving.gateway.api_errors import error_body
from tunesmith.serving.gateway.bodies import ClientDisconnected
from tunesmith.serving.gateway.schemas import Kind
from tunesmith.serving.generation import GenerationEnd, GenerationRequest, TextDelta, TokenLogprob

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
_UNREAD_S = 30.0
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PREFIX: dict[Kind, str] = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECT: dict[Kind, str] = {"chat": "chat.completion", "text": "text_completion"}


@dataclass(frozen=True)
class Header:
    """The fields that all parts of one answer share."""

    id: str
    kind: Kind
    created: int
    model: str
    """The exact version, whichever name was requested."""
    fingerprint: str
    with_log_probs: bool
    counts_usage: bool
    """Whether chunks carry a `usage`."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(_OBJECT[self.kind]), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": choices, **({"usage": usage} if self.counts_usage else {})}

    @property
    def names(self) -> dict[str, str]:
        """What the answer of an upstream server is given instead of its own."""
        return {"id": self.id, "model": self.model, "system_fingerprint": self.fingerprint}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass
class Choice:
    """One answer as it grows, whoever writes it."""

    index: int
    request: GenerationRequest
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    num_chars: int = 0
    finish: str | None = None
    """The finish reason, once there is one."""
    was_cut: bool = False
    """A stop sequence of the caller ended it."""
    has_text: bool = False
    """Some text was sent, or that the text is empty."""
    num_prompt: int = 0
    num_written: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ended_by_itself(self) -> bool:
        """The model ended the answer: neither a limit nor a stop sequence cut it."""
        return self.finish == "stop" and not self.was_cut

    @property
    def conversation(self) -> list[dict[str, Any]] | None:
        """The messages before the answer; None for a prompt of tokens, whose text is unknown."""
        if self.request.messages is not None:
            return [dict(message) for message in self.request.messages]
        prompt = self.request.prompt
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else None

    def add(self, part: TextDelta | GenerationEnd) -> None:
        """What the embedded engine says next."""
        if isinstance(part, TextDelta):
            self.texts.append(part.text)
            self.num_chars += len(part.text)
            self.tokens.extend(part.tokens)
            self.has_text = self.has_text or bool(part.text)
        else:
            self.finish, self.was_cut, self.has_text = part.finish, part.stopped_by == "text", True
            self.num_prompt, self.num_written = part.num_prompt, part.num_written


def new_response_id(kind: Kind) -> str:
    """A new id that cannot be guessed: feedback names an answer by it."""
    return secret_id(_PREFIX[kind])


def choice_key(response_id: str, index: int) -> str:
    """The key of the experience of one choice; the first choice has the id of the response."""
    return response_id if index == 0 else f"{response_id}/{index}"


def fingerprint_of(digest: str | None) -> str:
    return f"fp_{digest[:12]}" if digest else "fp_base"


def whole_choice(header: Header, choice: Choice) -> dict[str, Any]:
    ending = {"index": choice.index, "finish_reason": choice.finish}
    if header.kind == "chat":
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {**ending, "message": message, "logprobs": _chat_log_probs(header, choice.tokens)}
    return {**ending, "text": choice.text, "logprobs": _text_log_probs(header, choice.tokens, 0)}


def first_chunk(header: Header, index: int) -> dict[str, Any]:
    """A chat's stream begins with the role."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    return header.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])


def piece_chunk(header: Header, choice: Choice, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    piece: dict[str, Any] = {"index": choice.index, "finish_reason": None}
    if header.kind == "chat":
        piece |= {"delta": {"content": text}, "logprobs": _chat_log_probs(header, tokens)}
    else:
        piece |= {"text": text, "logprobs": _text_log_probs(header, tokens, choice.num_chars)}
    return header.chunk([piece])


def last_chunk(header: Header, choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {}} if header.kind == "chat" else {"text": ""}
    return header.chunk([{"index": choice.index, **said, "logprobs": None, "finish_reason": choice.finish}])


def usage_of(choices: Sequence[Choice], num_choices: int) -> dict[str, Any]:
    """Token counts; a prompt with several choices counts once."""
    num_prompt = sum(choice.num_prompt for choice in choices[::num_choices])
    num_written = sum(choice.num_written for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


def _chat_log_probs(header: Header, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not header.with_log_probs:
        return None
    content = [
        {
            **_token(token.text, token.log_prob),
            "top_logprobs": [_token(text, log_prob) for _, text, log_prob in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode(errors="replace"))}


def _text_log_probs(header: Header, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
    if not header.with_log_probs:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": [{text: log_prob for _, text, log_prob in token.top} for token in tokens],
        "text_offset": offsets,
    }


class JsonAnswer(Response):
    """A JSON response; `after` is called once it was sent."""

    def __init__(self, body: Mapping[str, Any], *, status: int = 200, after: Callable[[], None] | None = None) -> None:
        super().__init__(orjson.dumps(body), status_code=status, media_type="application/json")
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        if self._after is not None:
            self._after()


class SseAnswer(Response):
    """A stream of server-sent events. An error in the middle becomes an error object, and `[DONE]` is left out."""

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        *,
        end: Callable[[], Awaitable[None]],
        after: Callable[[bool], None],
    ) -> None:
        super().__init__()
        self._events = events
        self._end = end
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _SSE})
            is_whole = await cancel_on_disconnect(receive, self._write(send))
        except (ClientDisconnected, OSError):
            pass
        finally:
            await self._end()  # also if the stream was never started
            self._after(is_whole)

    async def _write(self, send: Any) -> bool:
        """True if the complete answer was sent."""
        last = b"data: [DONE]\n\n"
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await _send(send, b"data: " + orjson.dumps(event) + b"\n\n")
        except (ClientDisconnected, OSError):
            raise
        except Exception as error:
            last = b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        await _send(send, last, more=False)
        return last.endswith(b"[DONE]\n\n")


async def _send(send: Any, body: bytes, *, more: bool = True) -> None:
    """A client that reads nothing for this long counts as disconnected, so that it does not hold capacity."""
    try:
        async with asyncio.timeout(_UNREAD_S):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        raise ClientDisconnected from None


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnected as soon as the client disconnects."""
    running = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({running, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnected
        return running.result()
    finally:
        for task in (running, disconnect):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
