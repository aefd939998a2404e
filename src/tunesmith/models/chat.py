"""Conversations as tokens: the base's own chat template decides the text, and which tokens are the assistant's.

A template that marks the assistant's words with ``{% generation %}`` is believed. Any other is asked twice, for the
conversation up to the answer and for the conversation with it: what the second text adds is the answer, with its end
of turn.
Nothing is ever cut: what does not fit is dropped whole by whoever asked, and counted.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import ConfigError, DataError
from tunesmith.models.chat_template import ChatTemplate, Message

_Span = tuple[int, int]
"""Where in the text something begins and ends."""


@dataclass(frozen=True)
class Tokenized:
    """One tokenised conversation; `loss_mask[i]` says whether token i counts in the loss."""

    id: str
    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    num_rewritten: int = 0
    """Answers of weight 1 that are context all the same: the template writes them in another way once others follow."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)


class ChatFormat:
    """How one base model writes conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self._special}
        longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template = ChatTemplate(tokenizer, self._control)
        ends = set(self._turn_ends(*self._template.probe))
        eos = tokenizer.eos_token_id
        if not ends and eos is None:
            raise ConfigError(
                "neither the chat template nor the tokenizer has a token that ends an answer; "
                "set eos_token in the base's tokenizer_config.json"
            )
        self._missing_end: int | None = None if ends else eos
        if (call := self._template.call_probe()) is not None:
            # some templates end a call in another way; only the last token, because another call may follow a call
            ends.update(self._turn_ends(*call)[:1])
        self.stop_ids = frozenset(ends) | ({eos} if eos is not None else frozenset())
        """A generated token out of these ends the answer."""
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.stop_ids)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens in front of an answer to these messages."""
        return self.ids_of(self.prompt_text(messages))

    def ids_of(self, prompt_text: str) -> tuple[int, ...]:
        """The tokens of what the template wrote."""
        return tuple(self._encode(prompt_text))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What the template writes in front of an answer to these messages."""
        self._refuse_forged("a prompt", messages)
        return self._template.render(messages, "a prompt", add_generation_prompt=True)

    def shown(self, token: int) -> str:
        """A token as people read it; the ones that begin a sequence and end an answer are named."""
        text = str(self._tokenizer.convert_ids_to_tokens(token))
        names = {self._tokenizer.bos_token_id: " BOS", **dict.fromkeys(self.stop_ids, " EOS")}
        return f"{text!r}{names.get(token, '')}"

    def raw_prompt(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as it is, control tokens and the tokenizer's own beginning included."""
        return tuple(self._tokenizer(text).input_ids)

    def token_text(self, token: int) -> str:
        """What one token says, special ones too."""
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def text_of(self, ids: Iterable[int]) -> str:
        """What the tokens say, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def tokenize(self, example_id: str, messages: Sequence[Message], *, final_only: bool = False) -> Tokenized:
        """Tokenise a conversation; the loss mask covers every answer, or only the last one."""
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"{example_id}: the conversation does not end with an answer of the assistant")
        self._refuse_forged(example_id, messages)
        wanted = [_is_trained(message) for message in messages]
        if final_only:
            wanted = [False] * (len(messages) - 1) + [True]
        full = self._template.render(messages, example_id)
        find = self._marked if self._template.marks_answers else self._by_prefix
        spans = find(example_id, messages, full, wanted)
        ids, loss_mask = self._encode_spans(example_id, full, spans)
        if self._missing_end is not None and loss_mask and loss_mask[-1]:
            ids, loss_mask = [*ids, self._missing_end], [*loss_mask, True]
        if not any(loss_mask):
            raise DataError(f"{example_id}: the chat template leaves no token of the answer to train on")
        return Tokenized(example_id, tuple(ids), tuple(loss_mask), sum(wanted) - len(spans))

    def _marked(self, example_id: str, messages: Sequence[Message], full: str, wanted: Sequence[bool]) -> list[_Span]:
        """Return the spans of the wanted answers in the text, from the template's assistant mask."""
        mask = self._template.assistant_mask(messages, example_id)
        offsets = self._tokenizer(full, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        runs = [(offsets[start][0], offsets[end - 1][1]) for start, end in _runs(mask)]
        answers = [place for place, message in enumerate(messages) if _is_answer(message)]
        if len(runs) != len(answers):
            raise ConfigError(
                f"the base's chat template marks {len(runs)} answers with {{% generation %}} where {example_id} has "
                f"{len(answers)}; correct the template"
            )
        spans = []
        for place, (start, end) in zip(answers, runs, strict=True):
            if wanted[place]:
                before = self._template.render(messages[:place], example_id, add_generation_prompt=True)
                spans.append((self._with_start(full, before, start, end), self._with_end(full, start, end)))
        return spans

    def _with_start(self, full: str, before: str, start: int, end: int) -> int:
        """Where a marked answer begins: right after `before`, which a server writes; blanks after it belong to it."""
        if full.startswith(before):
            asked = len(before)
        else:  # the template writes a little more when it asks; the header of the turn is the server's all the same
            same = next(
                (place for place, (ours, asks) in enumerate(zip(full, before, strict=False)) if ours != asks), 0
            )
            asked = max((found.end() for found in self._control.finditer(full, 0, same)), default=0)
        is_near = start < asked or not full[asked:start].strip()
        return asked if is_near and asked < end else start

    def _with_end(self, full: str, start: int, end: int) -> int:
        """Many templates close the mark in front of the token that ends the turn: the end of that token."""
        end = min(end, len(full) - len(self._template.suffix_after_last_turn))
        if set(self._encode(full[start:end].rstrip())[-1:]) & self.stop_ids:
            return end
        rest = full[end:]
        found = self._control.match(full, end + len(rest) - len(rest.lstrip()))
        is_end = found is not None and self._tokenizer.convert_tokens_to_ids(found[0]) in self.stop_ids
        return found.end() if found is not None and is_end else end

    def _by_prefix(
        self, example_id: str, messages: Sequence[Message], full: str, wanted: Sequence[bool]
    ) -> list[_Span]:
        """Where the wanted answers lie in the text.

        Some templates write an earlier answer in another way than the last one (they leave its reasoning out), or
        something in front of it: such an answer is context, not something to learn, because the model would never have
        to write it like that.
        """
        spans: list[_Span] = []
        tail = self._template.suffix_after_last_turn
        for place in (place for place, is_wanted in enumerate(wanted) if is_wanted):
            is_last = place == len(messages) - 1
            before = self._template.render(messages[:place], example_id, add_generation_prompt=True)
            whole = full if is_last else self._template.render(messages[: place + 1], example_id)
            whole = whole.removesuffix(tail)
            if whole.startswith(before) and len(whole) > len(before) and full.startswith(whole):
                spans.append((len(before), len(whole)))
            elif is_last:
                raise ConfigError(
                    f"the base's chat template cannot be trained on: for {example_id}, the text in front of the answer "
                    f"(add_generation_prompt) ends with {before[-40:]!r}, but the whole conversation does not begin "
                    "with that text; correct the template, or mark the answer with {% generation %}"
                )
        return spans

    def _encode_spans(self, example_id: str, full: str, spans: Sequence[_Span]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text, and the loss mask of the tokens in the spans."""
        cuts = [0, *itertools.chain.from_iterable(spans), len(full)]
        texts = [full[left:right] for left, right in itertools.pairwise(cuts)]
        if not texts[-1]:
            texts.pop()  # nothing follows the last answer, as usual
        ids: list[int] = []
        loss_mask: list[bool] = []
        for number, piece in enumerate(self._encode_pieces(example_id, texts)):
            ids += piece
            loss_mask += self._up_to_end_of_turn(piece) if number % 2 else [False] * len(piece)
        return ids, loss_mask

    def _encode_pieces(self, example_id: str, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of consecutive texts, cut exactly where a server would cut them: it tokenises the prompt alone."""
        whole = self._encode("".join(texts))
        pieces: list[list[int]] = []
        done, text = 0, ""
        for part in texts[:-1]:
            text += part
            head = self._encode(text)
            if whole[: len(head)] != head:
                break
            pieces.append(whole[done : len(head)])
            done = len(head)
        else:
            return [*pieces, whole[done:]]
        alone = [self._encode(part) for part in texts]
        for part, piece in zip(texts, alone, strict=True):
            if self._tokenizer.decode(piece, clean_up_tokenization_spaces=False) != part:
                raise ConfigError(
                    f"the base's tokenizer joins the answer with the text in front of it ({example_id}), so that no "
                    "token ends where the prompt ends; correct the chat template so that the answer begins a new token"
                )
        return alone

    def _up_to_end_of_turn(self, piece: list[int]) -> list[bool]:
        """Everything but the blank text that a template writes after the token that ends the turn."""
        last = max((place for place, token in enumerate(piece) if token in self._special), default=-1)
        blank = last >= 0 and not self.text_of(piece[last + 1 :]).strip()
        return [place <= last or not blank for place in range(len(piece))]

    def _turn_ends(self, messages: Sequence[Message], said: str) -> list[int]:
        """The special tokens that the template writes after the answer of a tiny conversation, the last one first."""
        whole = self._template.render(messages, "a test conversation").removesuffix(
            self._template.suffix_after_last_turn
        )
        ends: list[int] = []
        for token in reversed(self._encode(whole.rpartition(said)[2])):
            if token in self._special:
                ends.append(token)
            elif ends or self.text_of([token]).strip():
                break
        return ends

    def _refuse_forged(self, what: str, messages: Sequence[Message]) -> None:
        """A control token written in a message would become a real one: a turn that nobody took."""
        for message in messages:
            said = [str(message["content"]), *(str(message.get(key, "")) for key in ("tool_call_id", "name"))]
            if message.get("tool_calls"):
                said.append(json.dumps(message["tool_calls"], ensure_ascii=False))
            for text in said:
                if (found := self._control.search(text)) is not None:
                    role = message["role"]
                    one = "an" if role == "assistant" else "a"
                    raise DataError(f"{what}: {one} {role} message holds the control token {found[0]!r}; remove it")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _is_trained(message: Message) -> bool:
    return _is_answer(message) and message.get("weight", 1) != 0


def _runs(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Return start and end of each stretch of the mask."""
    edges = [index for index in range(len(loss_mask) + 1) if _at(loss_mask, index - 1) != _at(loss_mask, index)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _at(loss_mask: Sequence[bool], index: int) -> bool:
    return 0 <= index < len(loss_mask) and loss_mask[index]
