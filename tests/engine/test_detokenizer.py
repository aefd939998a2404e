"""Text comes in whole characters, without stop texts; tokens are picked by the row's own taste and luck."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from support.engine import asking
from tunesmith.demo.base_model import byte_tokenizer
from tunesmith.models.chat import ChatFormat
from tunesmith.serving.engine.detokenizer import IncrementalDetokenizer
from tunesmith.serving.engine.sampling import SamplingParams, sample

CHAT = ChatFormat(byte_tokenizer())


def tokens_of(text: bytes) -> list[int]:
    """One token per byte, whether or not the bytes are text."""
    letters = {CHAT.raw_prompt(chr(number))[0]: number for number in range(128)}
    by_byte = {number: token for token, number in letters.items()}
    for char in (chr(number) for number in range(128, 0x900)):
        for byte, token in zip(char.encode(), CHAT.raw_prompt(char), strict=True):
            by_byte[byte] = token
    for char in "€😀\U0010ffff":
        for byte, token in zip(char.encode(), CHAT.raw_prompt(char), strict=True):
            by_byte[byte] = token
    return [by_byte[byte] for byte in text]


def written(text: bytes, *stops: str) -> tuple[list[str], IncrementalDetokenizer]:
    writer = IncrementalDetokenizer(CHAT.text_of, stops)
    pieces = []
    for token in tokens_of(text):
        pieces.append(writer.add(token))
        if writer.is_stopped:
            return pieces, writer
    return [*pieces, writer.finish()], writer


def test_characters_of_several_tokens_come_whole() -> None:
    text = "naïve € — 😀 ok"
    pieces, _ = written(text.encode())
    assert "".join(pieces) == text
    assert "😀" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_do_not_hold_the_rest_back() -> None:
    pieces, _ = written(b"a" + b"\xbf" * 40 + b"b")
    assert "".join(pieces)[0] == "a"
    assert "".join(pieces)[-1] == "b"
    assert len([piece for piece in pieces if piece]) > 3


def test_an_answer_cut_inside_a_character_shows_that_something_is_missing() -> None:
    pieces, _ = written("x€".encode()[:-1])
    assert "".join(pieces).startswith("x")
    assert "€" not in "".join(pieces)


@pytest.mark.parametrize("stop", ["END", "€!", "x"])
def test_stop_text_over_several_tokens_ends_the_answer_before_it(stop: str) -> None:
    pieces, writer = written(f"before {stop} after".encode(), "never", stop)
    assert writer.is_stopped
    assert "".join(pieces) == "before "


def test_beginning_of_a_stop_text_is_held_back_until_it_is_none() -> None:
    writer = IncrementalDetokenizer(CHAT.text_of, ("STOP",))
    said = [writer.add(token) for token in tokens_of(b"a STO")]
    assert said == ["a", " ", "", "", ""]
    assert writer.add(tokens_of(b"x")[0]) == "STOx"
    assert writer.finish() == ""


def test_first_of_two_stop_texts_decides() -> None:
    pieces, _ = written(b"one two three", "three", "two")
    assert "".join(pieces) == "one "


def test_same_seed_draws_the_same_whoever_is_beside_it() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))

    def params(*seeds: int) -> list[SamplingParams]:
        return [SamplingParams.of(asking("x", temperature=1.3, top_p=0.9, seed=seed)) for seed in seeds]

    alone = [sample(logits[2:3], params(7))[0].token]
    beside = [picked.token for picked in sample(logits, [*params(1, 2), *params(7), *params(3, 4)])]
    assert beside[2] == alone[0]
    mine = params(7)
    series = [sample(logits[2:3], mine)[0].token for _ in range(20)]
    other = params(8)
    assert len(set(series)) > 1
    assert series != [sample(logits[2:3], other)[0].token for _ in range(20)]


def test_top_p_leaves_only_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.3, 0.15]]))
    sampling = [SamplingParams.of(asking("x", temperature=1.0, top_p=0.7, seed=1))]
    drawn = {sample(logits, sampling)[0].token for _ in range(200)}
    assert drawn == {1, 2}
    sampling = [SamplingParams.of(asking("x", temperature=1.0, top_p=0.0, seed=1))]
    assert {sample(logits, sampling)[0].token for _ in range(20)} == {1}


def test_penalties_push_away_what_was_written_and_leave_log_probs_alone() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    sampling = [SamplingParams.of(asking("x", presence_penalty=1.0, top_logprobs=2))]
    first, second = sample(logits, sampling)[0], sample(logits, sampling)[0]
    assert (first.token, second.token) == (0, 1)
    log_probs = torch.log_softmax(logits.double(), dim=-1)[0].tolist()
    assert second.log_prob == pytest.approx(log_probs[1])
    assert [token for token, _ in second.top] == [0, 1]
    assert [value for _, value in second.top] == pytest.approx(log_probs[:2])


def test_frequency_penalty_grows_with_every_use() -> None:
    logits = torch.tensor([[3.0, 0.0]])
    sampling = [SamplingParams.of(asking("x", frequency_penalty=2.0))]
    assert [sample(logits, sampling)[0].token for _ in range(3)] == [0, 0, 1]


def test_pieces_add_up_to_the_whole_with_a_tokenizer_that_spells_in_words_and_bytes() -> None:
    """As older families spell: a blank is part of the word behind it, and the first one is not shown."""
    tokenizer = ["▁the", "▁sun", "▁", "s", "ets", ",", "▁naïve", "!"]
    vocabulary = {word: number for number, word in enumerate([*tokenizer, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    luck = random.Random(2)
    for _ in range(200):
        ids: list[int] = []
        for _ in range(luck.randint(1, 60)):
            if luck.random() < 0.4:
                char = luck.choice("€é😀ß漢\n")
                ids += [vocabulary[f"<0x{byte:02X}>"] for byte in char.encode()]
            else:
                ids.append(luck.randrange(len(tokenizer)))
        writer = IncrementalDetokenizer(core.decode, ())
        pieces = [writer.add(token) for token in ids]
        assert "".join([*pieces, writer.finish()]) == core.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)
