"""Conversations as tokens: the base's own chat template decides the text, and which tokens are the assistant's.

A template that marks the assistant's words with ``{% generation %}`` is believed. Any other is asked twice, for the
conversation up to the answer and for the conversation with it: what comes on top is the answer, end of turn included.
Nothing is ever cut: what does not fit is dropped whole by whoever asked, and counted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import ConfigError, DataError

Message = Mapping[str, Any]
"""role and content; an answer of weight 0 is context, every other answer is trained."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenized:
    """One conversation, ready for the model; `trained[i]` says whether the model must learn to write token i."""

    id: str
    ids: tuple[int, ...]
    trained: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


class ChatFormat:
    """How one base model writes conversations."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the base model has no chat template; add its chat_template.jinja to the base folder, then lock again"
            )
        self._tokenizer = tokenizer
        self._marks_answers = _GENERATION.search(str(tokenizer.chat_template)) is not None
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self._special}
        longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        ends = self._turn_ends()
        eos = tokenizer.eos_token_id
        if not ends and eos is None:
            raise ConfigError(
                "neither the chat template nor the tokenizer has a token that ends an answer; "
                "set eos_token in the base's tokenizer_config.json"
            )
        self._missing_end: int | None = None if ends else eos
        self.stop_ids = frozenset(ends) | ({eos} if eos is not None else frozenset())
        """A generated token out of these ends the answer."""
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.stop_ids)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens in front of an answer to these messages."""
        self._refuse_forged("a prompt", messages)
        return tuple(self._encode(self._render(messages, "a prompt", add_generation_prompt=True)))

    def text_of(self, ids: Iterable[int]) -> str:
        """What the tokens say, special ones left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def tokenize(self, example_id: str, messages: Sequence[Message], *, final_only: bool = False) -> Tokenized:
        """The whole conversation with the assistant's tokens marked: every answer, or only the last one."""
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"{example_id}: the conversation does not end with an answer of the assistant")
        self._refuse_forged(example_id, messages)
        wanted = [_is_trained(message) for message in messages]
        if final_only:
            wanted = [False] * (len(messages) - 1) + [True]
        if self._marks_answers:
            ids, trained = self._by_marks(example_id, messages, wanted)
        else:
            ids, trained = self._by_prefix(example_id, messages, wanted)
        if self._missing_end is not None and trained and trained[-1]:
            ids, trained = [*ids, self._missing_end], [*trained, True]
        if not any(trained):
            raise DataError(f"{example_id}: the chat template leaves no token of the answer to train on")
        return Tokenized(example_id, tuple(ids), tuple(trained))

    def _by_marks(
        self, example_id: str, messages: Sequence[Message], wanted: Sequence[bool]
    ) -> tuple[list[int], list[bool]]:
        try:
            marked = self._tokenizer.apply_chat_template(
                _plain(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # whatever the template raises, it is about this conversation
            raise _refusal(example_id, error) from None
        ids, trained = list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]]
        for place in range(1, len(ids)):  # many templates close the mark in front of the token that ends the turn
            is_after = trained[place - 1] and not trained[place] and ids[place - 1] not in self.stop_ids
            trained[place] = trained[place] or (is_after and ids[place] in self._special)
        runs = _runs(trained)
        answers = [is_wanted for is_wanted, message in zip(wanted, messages, strict=True) if _is_answer(message)]
        if len(runs) != len(answers):
            raise ConfigError(
                f"the base's chat template marks {len(runs)} answers with {{% generation %}} where {example_id} has "
                f"{len(answers)}; correct the template"
            )
        for (start, end), is_wanted in zip(runs, answers, strict=True):
            trained[start:end] = [is_wanted] * (end - start)
        return ids, trained

    def _by_prefix(
        self, example_id: str, messages: Sequence[Message], wanted: Sequence[bool]
    ) -> tuple[list[int], list[bool]]:
        full = self._render(messages, example_id)
        cuts = [0]
        for start, end in self._answers(example_id, messages, full, wanted):
            cuts += [start, end]
        cuts.append(len(full))
        texts = [full[left:right] for left, right in itertools.pairwise(cuts)]
        if not texts[-1]:
            texts.pop()  # nothing follows the last answer, as usual
        ids: list[int] = []
        trained: list[bool] = []
        for number, piece in enumerate(self._encode_pieces(example_id, texts)):
            ids += piece
            trained += self._up_to_end_of_turn(piece) if number % 2 else [False] * len(piece)
        return ids, trained

    def _answers(
        self, example_id: str, messages: Sequence[Message], full: str, wanted: Sequence[bool]
    ) -> list[tuple[int, int]]:
        """Where the wanted answers lie in the text.

        Some templates write an earlier answer in another way than the last one (they leave its reasoning out): such an
        answer is context, not something to learn, because the model would never have to write it like that.
        """
        spans: list[tuple[int, int]] = []
        for place in (place for place, is_wanted in enumerate(wanted) if is_wanted):
            is_last = place == len(messages) - 1
            before = self._render(messages[:place], example_id, add_generation_prompt=True)
            whole = full if is_last else self._render(messages[: place + 1], example_id)
            if whole.startswith(before) and len(whole) > len(before) and full.startswith(whole):
                spans.append((len(before), len(whole)))
            elif is_last:
                raise ConfigError(
                    f"the base's chat template cannot be trained on: for {example_id}, the text in front of the answer "
                    f"(add_generation_prompt) ends with {before[-40:]!r}, but the whole conversation does not begin "
                    "with that text; correct the template, or mark the answer with {% generation %}"
                )
        return spans

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

    def _turn_ends(self) -> set[int]:
        """The special tokens that the template writes right after an answer; asked once with a tiny conversation."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        before = self._encode(self._render(messages[:1], "a test conversation", add_generation_prompt=True))
        after = self._encode(self._render(messages, "a test conversation"))[len(before) :]
        ends: set[int] = set()
        for token in reversed(after):
            if token in self._special:
                ends.add(token)
            elif ends or self.text_of([token]).strip():
                break
        return ends

    def _refuse_forged(self, what: str, messages: Sequence[Message]) -> None:
        """A control token written in a message would become a real one: a turn that nobody took."""
        for message in messages:
            if (found := self._control.search(str(message["content"]))) is not None:
                raise DataError(f"{what}: a {message['role']} message holds the control token {found[0]!r}; remove it")

    def _render(self, messages: Sequence[Message], what: str, *, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    _plain(messages),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:  # whatever the template raises, it is about this conversation
            raise _refusal(what, error) from None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _is_trained(message: Message) -> bool:
    return _is_answer(message) and message.get("weight", 1) != 0


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What a template may see: our weights are not for it."""
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _runs(trained: Sequence[bool]) -> list[tuple[int, int]]:
    """Where the marked stretches begin and end."""
    edges = [place for place in range(len(trained) + 1) if _at(trained, place - 1) != _at(trained, place)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _at(trained: Sequence[bool], place: int) -> bool:
    return 0 <= place < len(trained) and trained[place]


def _refusal(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what}: the base's chat template refuses the conversation ({type(error).__name__}: {error}); "
        "change the conversation, or the template"
    )
