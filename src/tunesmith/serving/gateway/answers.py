"""Answers in OpenAI's shapes: whole and in chunks, for chat and for text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.core.ids import secret_id
from tunesmith.serving.gateway.parameters import Kind
from tunesmith.serving.generation import GenerationEnd, TokenLogprob

_PREFIX: dict[Kind, str] = {"chat": "chatcmpl", "text": "cmpl"}
_OBJECT: dict[Kind, str] = {"chat": "chat.completion", "text": "text_completion"}


@dataclass(frozen=True)
class Header:
    """What every part of one answer says about itself."""

    id: str
    kind: Kind
    created: int
    model: str
    """The exact version, whatever name was asked for."""
    fingerprint: str
    with_log_probs: bool
    counts_usage: bool
    """Whether chunks carry a `usage`."""

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(_OBJECT[self.kind]), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": choices, **({"usage": usage} if self.counts_usage else {})}

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
    """One answer as it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    num_chars: int = 0
    end: GenerationEnd | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


def new_response_id(kind: Kind) -> str:
    """Nobody can guess it: whoever rates an answer names it by this id."""
    return secret_id(_PREFIX[kind])


def choice_key(response_id: str, index: int) -> str:
    """By which the experience of one choice is found; the first has the response's own id."""
    return response_id if index == 0 else f"{response_id}/{index}"


def fingerprint_of(digest: str | None) -> str:
    return f"fp_{digest[:12]}" if digest else "fp_base"


def whole_choice(header: Header, choice: Choice) -> dict[str, Any]:
    assert choice.end is not None
    ending = {"index": choice.index, "finish_reason": choice.end.finish}
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
    assert choice.end is not None
    said: dict[str, Any] = {"delta": {}} if header.kind == "chat" else {"text": ""}
    return header.chunk([{"index": choice.index, **said, "logprobs": None, "finish_reason": choice.end.finish}])


def usage_of(choices: Sequence[Choice], num_choices: int) -> dict[str, Any]:
    """A prompt that several answers were written to counts once."""
    ends = [choice.end for choice in choices if choice.end is not None]
    num_prompt = sum(end.num_prompt for end in ends[::num_choices])
    num_written = sum(end.num_written for end in ends)
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
