"""Two lines for an application that uses the `openai` client: rate answers, and let tunesmith keep them.

    from tunesmith.openai import learn_from
    client = learn_from(OpenAI(base_url="http://127.0.0.1:8321/v1", api_key="any"))

    answer = client.chat.completions.create(model="support", messages=[…])
    client.feedback(answer, "helpful")

`tunesmith serve` keeps its answers itself. For any other endpoint, name the workspace and the profile: then every chat
answer is kept through `client.capture`, after it was given, and never in its way:

    client = learn_from(OpenAI(), workspace="~/tuning", profile="support")

Imports next to nothing; not even `openai`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.core.visible_text import says_nothing
from tunesmith.serving.generation import was_cut

C = TypeVar("C")


def learn_from(client: C, *, workspace: str | Path | None = None, profile: str | None = None) -> C:
    """The same client, with `feedback`; with `workspace` and `profile` its chat answers are kept as well.

    Works for `OpenAI` and `AsyncOpenAI` alike; of the latter, `feedback` is awaited.
    """
    if (workspace is None) != (profile is None):
        raise ValueError("give both workspace and profile to keep the answers of another endpoint, or neither")
    is_async = inspect.iscoroutinefunction(client.post)  # type: ignore[attr-defined]
    if workspace is not None and profile is not None:
        keeper = _Keeper(workspace, profile)
        completions = client.chat.completions  # type: ignore[attr-defined]
        ask = completions.create
        completions.create = _async_create(ask, keeper) if is_async else _create(ask, keeper)
        client.feedback = keeper.feedback_later if is_async else keeper.feedback  # type: ignore[attr-defined]
        client.flush = keeper.flush  # type: ignore[attr-defined]
    else:
        client.feedback = _Sender(client).send  # type: ignore[attr-defined]
    return client


class _Sender:
    """Feedback about answers of `tunesmith serve`, over the same connection as everything else."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def send(
        self,
        answer: Any,
        rating: str | float | None = None,
        *,
        comment: str | None = None,
        correction: str | None = None,
        rater: str | None = None,
        choice: int = 0,
    ) -> Any:
        """`answer`: what the client returned, or its id. `rating`: helpful, partial, irrelevant, up, down, 0 to 1."""
        said = {
            "rating": rating,
            "comment": comment,
            "correction": correction,
            "rater": rater,
            "choice": choice or None,
        }
        body = {"response_id": _id_of(answer), **{name: value for name, value in said.items() if value is not None}}
        return self._client.post("/feedback", body=body, cast_to=object)


class _Keeper:
    """Keeps the answers of an endpoint that is not ours; a workspace that is not there is an error at once."""

    def __init__(self, workspace: str | Path, profile: str) -> None:
        from tunesmith.client import Client  # now, so that the first answer does not wait for it

        self._client = Client(Path(workspace).expanduser())
        self._profile = profile

    def keep(
        self, wishes: Mapping[str, Any], answer_id: str, model: str, texts: Mapping[int, str], whole: Set[int]
    ) -> None:
        """Never raises: what cannot be kept is counted by the queue. An endpoint may give its answers no id.

        Answers that are not `whole` are kept for the corrections they may get; they are never learnt themselves.
        """
        try:
            messages: Sequence[Mapping[str, Any]] = [dict(message) for message in wishes.get("messages", ())]
            for index, text in texts.items():
                key = answer_id if index == 0 or not answer_id else f"{answer_id}/{index}"
                is_cut = index not in whole or says_nothing(text)
                said = [*messages, {"role": "assistant", "content": text}]
                self._client.capture(
                    self._profile, said, key=key or None, served_by=model, source="openai", is_cut=is_cut
                )
        except Exception:
            return  # the application asked for an answer, and has it

    def feedback(
        self,
        answer: Any,
        rating: str | float | None = None,
        *,
        comment: str | None = None,
        correction: str | None = None,
        rater: str | None = None,
        choice: int = 0,
    ) -> Any:
        """As of `tunesmith serve`; durable when it returns."""
        self._client.capture.flush()
        key = _id_of(answer) if choice == 0 else f"{_id_of(answer)}/{choice}"
        name = f"{self._profile}:{key}"
        return self._client.feedback.add(name, rating, rater=rater, comment=comment, correction=correction)

    async def feedback_later(self, answer: Any, rating: str | float | None = None, **more: Any) -> Any:
        """In a thread: it waits for the disk."""
        import asyncio

        return await asyncio.to_thread(self.feedback, answer, rating, **more)

    def flush(self, timeout_s: float = 10.0) -> Any:
        """Wait until what was answered is kept; the counts."""
        return self._client.capture.flush(timeout_s)


def _create(ask: Callable[..., Any], keeper: _Keeper) -> Callable[..., Any]:
    def create(*words: Any, **wishes: Any) -> Any:
        answer = ask(*words, **wishes)
        if wishes.get("stream"):
            return _Stream(answer, _Heard(keeper, wishes))
        _keep_whole(keeper, wishes, answer)
        return answer

    return create


def _async_create(ask: Callable[..., Awaitable[Any]], keeper: _Keeper) -> Callable[..., Awaitable[Any]]:
    async def create(*words: Any, **wishes: Any) -> Any:
        answer = await ask(*words, **wishes)
        if wishes.get("stream"):
            return _AsyncStream(answer, _Heard(keeper, wishes))
        _keep_whole(keeper, wishes, answer)
        return answer

    return create


class _Heard:
    """What has come of a stream; kept once it has ended."""

    def __init__(self, keeper: _Keeper, wishes: Mapping[str, Any]) -> None:
        self._keeper, self._wishes = keeper, wishes
        self._texts: dict[int, list[str]] = {}
        self._finished: set[int] = set()
        self._id: str = ""
        self._model: str = ""

    def hear(self, chunk: Any) -> None:
        self._id, self._model = getattr(chunk, "id", None) or self._id, getattr(chunk, "model", None) or self._model
        for choice in getattr(chunk, "choices", None) or ():
            text = getattr(choice.delta, "content", None)
            if text:
                self._texts.setdefault(choice.index, []).append(text)
            if _is_by_itself(choice, self._wishes):
                self._finished.add(choice.index)

    def end(self) -> None:
        texts = {index: "".join(parts) for index, parts in self._texts.items()}
        self._texts = {}  # closing a stream that has ended keeps nothing again
        if texts:
            self._keeper.keep(self._wishes, self._id, self._model, texts, self._finished)


class _Wrapped:
    """A stream that is listened to; everything else of it is as it was."""

    def __init__(self, stream: Any, heard: _Heard) -> None:
        self._stream, self._heard = stream, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Stream(_Wrapped):
    def __iter__(self) -> Iterator[Any]:
        try:
            for chunk in self._stream:
                self._heard.hear(chunk)
                yield chunk
        finally:  # also where the application stops listening
            self._heard.end()

    def __next__(self) -> Any:
        try:
            chunk = next(self._stream)
        except StopIteration:
            self._heard.end()
            raise
        self._heard.hear(chunk)
        return chunk

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Also where the application has heard enough: the rest was cut off."""
        self._stream.close()
        self._heard.end()


class _AsyncStream(_Wrapped):
    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for chunk in self._stream:
                self._heard.hear(chunk)
                yield chunk
        finally:
            self._heard.end()

    async def __aenter__(self) -> _AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._stream.close()
        self._heard.end()


def _keep_whole(keeper: _Keeper, wishes: Mapping[str, Any], answer: Any) -> None:
    choices = getattr(answer, "choices", None) or ()
    texts = {
        each.index: each.message.content or "" for each in choices if not getattr(each.message, "tool_calls", None)
    }
    if texts:
        whole = {each.index for each in choices if _is_by_itself(each, wishes)}
        keeper.keep(wishes, answer.id or "", answer.model or "", texts, whole)


def _is_by_itself(choice: Any, wishes: Mapping[str, Any]) -> bool:
    """An answer that a limit or a stop text cut is no example of a whole one."""
    told = {name: getattr(choice, name) for name in ("stop_reason",) if hasattr(choice, name)}
    return bool(choice.finish_reason == "stop" and not was_cut(told, has_stops=bool(wishes.get("stop"))))


def _id_of(answer: Any) -> str:
    """Of an answer, one of its chunks, or the id itself."""
    found = answer if isinstance(answer, str) else getattr(answer, "id", None)
    if not isinstance(found, str) or not found:
        raise TypeError("give what the client returned (an answer or one of its chunks), or its id")
    return found
