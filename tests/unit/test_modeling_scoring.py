"""Loss over the assistant's tokens: right by definition, and the same however cases are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.native import a_micro_base, small_rows
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.generation import Sampling, answer_all
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.models.packs import packed, single
from tunesmith.models.scoring import batches_by_count, evaluating, mean_nlls, span_log_probs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_micro_base(tmp_path_factory.mktemp("scoring") / "base")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_base(folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(folder))


@pytest.fixture(scope="module")
def examples(chat: ChatFormat) -> list[Tokenized]:
    return [chat.tokenize(f"e{number}", row["messages"]) for number, row in enumerate(small_rows(12))]


def test_loss_is_the_mean_of_minus_log_probability_of_trained_tokens(
    model: Any, chat: ChatFormat, examples: list[Tokenized]
) -> None:
    example = examples[5]
    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=torch.tensor([example.ids])).logits[0].double(), dim=-1)
    expected = [
        -float(logs[place - 1, token])
        for place, (token, trained) in enumerate(zip(example.ids, example.loss_mask, strict=True))
        if trained
    ]
    found = mean_nlls(model, [example], chat.pad_id, [[0]])
    assert found is not None
    assert found[0] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_loss_does_not_depend_on_the_batch(model: Any, chat: ChatFormat, examples: list[Tokenized]) -> None:
    lengths = [len(example) for example in examples]
    alone = mean_nlls(model, examples, chat.pad_id, [[index] for index in range(len(examples))])
    for batches in (batches_by_count(lengths, 5), batches_by_count(lengths, 2)):
        assert mean_nlls(model, examples, chat.pad_id, batches) == pytest.approx(alone, rel=1e-5)


def test_scoring_stops_when_told(model: Any, chat: ChatFormat, examples: list[Tokenized]) -> None:
    heard: list[int] = []

    def on_batch(done: int) -> bool:
        heard.append(done)
        return done < 4

    assert mean_nlls(model, examples, chat.pad_id, batches_by_count([1] * 12, 2), on_batch) is None
    assert heard == [2, 4]


def test_sums_carry_gradients_only_when_asked(folder: Path, chat: ChatFormat, examples: list[Tokenized]) -> None:
    trainable = load_base(folder, torch.device("cpu"))
    trainable.requires_grad_(True)
    batch = packed([single(example) for example in examples[:2]])
    assert span_log_probs(trainable, batch).requires_grad
    with evaluating(trainable):
        assert not span_log_probs(trainable, batch).requires_grad


def test_greedy_answers_equal_those_of_transformers(model: Any, chat: ChatFormat) -> None:
    prompts = [chat.prompt(row["messages"][:1]) for row in small_rows(5)]
    ours = answer_all(model, chat, prompts, 12)
    for prompt, answer in zip(prompts, ours, strict=True):
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                do_sample=False,
            )[0, len(prompt) :].tolist()
        stopped = next((place for place, token in enumerate(theirs) if token in chat.stop_ids), None)
        assert answer.text == chat.text_of(theirs[:stopped])
        assert answer.finished == (stopped is not None)


def test_sampled_answer_depends_on_seed_and_key_alone(model: Any, chat: ChatFormat) -> None:
    prompts = [chat.prompt(row["messages"][:1]) for row in small_rows(6)]
    keys = [f"case-{number}" for number in range(6)]

    def sampled(indices: list[int], seed: int) -> list[str]:
        answers = answer_all(
            model,
            chat,
            [prompts[index] for index in indices],
            10,
            sampling=Sampling(1.0, seed),
            keys=[keys[index] for index in indices],
        )
        return [answer.text for answer in answers]

    together = sampled([0, 1, 2, 3, 4, 5], seed=1)
    assert sampled([5, 3], seed=1) == [together[5], together[3]]
    assert sampled([0, 1, 2, 3, 4, 5], seed=2) != together
    assert len(set(together)) > 1


def test_answer_ends_at_the_end_of_turn(model: Any, chat: ChatFormat) -> None:
    """A random model hardly stops by itself, so the most likely first token is declared to be a stop."""
    prompt = chat.prompt(small_rows(1)[0]["messages"][:1])
    with torch.no_grad():
        first = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    usual = chat.stop_ids
    chat.stop_ids = usual | {first}
    try:
        answer = answer_all(model, chat, [prompt], 10)[0]
    finally:
        chat.stop_ids = usual
    assert (answer.text, answer.finished) == ("", True)
