"""Train/serve parity: a truth table with real tiny models, and properties of the comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.native import a_micro_base, a_recipe
from tunesmith.demo.base_model import CHAT_TEMPLATE, byte_tokenizer
from tunesmith.deployment.rules.parity import Parity, compare, tolerance_of
from tunesmith.evaluation.evaluators.probe import probe_prompts, shown_tokens
from tunesmith.models.adapters import load_adapter, new_adapter, save_adapter
from tunesmith.models.chat import ChatFormat
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.programs.readings import MAX_TOKENS, ProbeResult, References, choose_prompts

PROMPTS = (
    ({"role": "user", "content": "hi"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is the capital?"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c" * 40}),
)
FLOAT32 = tolerance_of("embedded", {}, "float32").log_prob


@dataclass(frozen=True)
class Stack:
    """A base with its adapter, as one side of a comparison."""

    base: Path
    adapter: Path
    tokenizer: Any = None
    quantized: bool = False

    def read(self) -> list[ProbeResult]:
        import torch

        chat = ChatFormat(self.tokenizer or load_tokenizer(self.base))
        model = load_base(self.base, torch.device("cpu"))
        if self.quantized:
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and "embed" not in name:
                    step = weight.data.abs().amax(dim=1, keepdim=True) / 7  # four bits
                    weight.data = (weight.data / step).round() * step
        return probe_prompts(load_adapter(model, self.adapter).eval(), chat, PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A base and an adapter that changes what it says."""
    import torch

    root = tmp_path_factory.mktemp("parity")
    base = a_micro_base(root / "base", tied=False)
    model = load_base(base, torch.device("cpu"))
    adapted = new_adapter(model, a_recipe(lora_rank=4, lora_alpha=8.0))
    generator = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.5
    (root / "adapter").mkdir()
    save_adapter(adapted, root / "adapter", "base")
    return Stack(base, root / "adapter")


@pytest.fixture(scope="module")
def references(trained: Stack) -> References:
    readings = tuple(trained.read())
    chat = ChatFormat(load_tokenizer(trained.base))
    return References(
        adapter="a", base="b", dtype="float32", max_tokens=MAX_TOKENS, readings=readings,
        tokens=shown_tokens(chat, readings),
    )  # fmt: skip


def _with_template(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def _with_other_words() -> Any:
    """The same template; two letters have changed places in the vocabulary."""
    tokenizer = byte_tokenizer()
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    words = raw["model"]["vocab"]
    words["a"], words["c"] = words["c"], words["a"]
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(raw))
    return tokenizer


def _other_base(trained: Stack, folder: Path) -> Stack:
    return Stack(a_micro_base(folder / "other", tied=False, seed=1), trained.adapter)


def _wrong_alpha(trained: Stack, folder: Path) -> Stack:
    shutil.copytree(trained.adapter, folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    return Stack(trained.base, folder / "adapter")


def _silent(readings: Sequence[ProbeResult], *names: str) -> list[ProbeResult]:
    """As a server that does not tell so much."""
    return [reading.model_copy(update=dict.fromkeys(names)) for reading in readings]


# what serves, and what the refusal must show
Make = Callable[[Stack, Path], Stack]
WRONG: dict[str, tuple[Make, tuple[str, ...]]] = {
    "another chat template": (
        lambda trained, _: Stack(
            trained.base, trained.adapter, _with_template(CHAT_TEMPLATE.replace("'<|' +", "'\n<|' +"))
        ),
        ("chat template writes another prompt", "--- trained with", "+++ served with", "<|user|>"),
    ),
    "another tokenizer": (
        lambda trained, _: Stack(trained.base, trained.adapter, _with_other_words()),
        ("tokenizer reads the same prompt as other tokens", "- trained with:", "+ served with:", "'<|user|>'"),
    ),
    "no token that begins": (
        lambda trained, _: Stack(
            trained.base, trained.adapter, _with_template(CHAT_TEMPLATE.replace("{{ '<|begin|>' }}", ""))
        ),
        ("begins the sequence is missing", "'<|begin|>' BOS (1)"),
    ),
    "another base": (_other_base, ("answer",)),
    "wrong alpha": (_wrong_alpha, ("answer",)),
    "four bits": (lambda trained, _: Stack(trained.base, trained.adapter, quantized=True), ("answer",)),
}


def test_parity_of_the_same_stack_is_exact(trained: Stack, references: References) -> None:
    found = compare(references, trained.read(), FLOAT32)
    assert (found.problems, found.num_prompts) == ((), 3)
    assert found.num_tokens == sum(len(reading.answer_ids or ()) for reading in references.readings) > 10
    assert found.max_difference == 0.0


@pytest.mark.parametrize("name", WRONG)
def test_parity_with_what_differs_is_refused_with_the_difference(
    trained: Stack, references: References, tmp_path: Path, name: str
) -> None:
    make, words = WRONG[name]
    readings = make(trained, tmp_path).read()
    if name == "no token that begins":
        readings = _silent(readings, "prompt_text")  # most servers tell tokens or text, seldom both
    found = compare(references, readings, FLOAT32)
    assert found.problems
    assert all(word in found.told for word in words), found.told


def test_parity_of_a_wrong_scale_shows_in_log_probabilities_where_the_words_are_the_same(
    trained: Stack, references: References, tmp_path: Path
) -> None:
    """Even a scale off by little more than the tolerance is found."""
    shutil.copytree(trained.adapter, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": 1.02 * config["lora_alpha"]}))
    found = compare(references, Stack(trained.base, tmp_path / "adapter").read(), FLOAT32)
    assert found.problems
    assert "log-probability" in found.told
    assert "0.001 is allowed" in found.told


@pytest.mark.parametrize("name", ["another base", "wrong alpha"])
def test_parity_with_a_server_that_tells_only_text_still_finds_other_weights(
    trained: Stack, references: References, tmp_path: Path, name: str
) -> None:
    silent = ("prompt_text", "prompt_ids", "num_prompt", "answer_ids", "log_probs", "margins", "starts")
    assert compare(references, _silent(trained.read(), *silent), FLOAT32).problems == ()
    found = compare(references, _silent(WRONG[name][0](trained, tmp_path).read(), *silent), FLOAT32)
    assert found.problems
    assert "another answer" in found.told


def test_parity_with_other_readings_than_were_asked_for_is_refused(trained: Stack, references: References) -> None:
    readings = trained.read()
    for wrong in ([], readings[:2], [*readings, readings[0]], [readings[1], readings[0], readings[2]]):
        assert "or about others" in compare(references, wrong, 1.0).told
    assert compare(references.model_copy(update={"readings": ()}), [], 1.0).problems


def a_reading(**changes: Any) -> ProbeResult:
    fields: dict[str, Any] = {
        "messages": PROMPTS[0],
        "prompt_text": "<s>hi",
        "prompt_ids": (1, 7, 8),
        "num_prompt": 3,
        "answer_ids": (5, 6, 2),
        "answer_text": "ab",
        "log_probs": (-0.1, -0.2, -0.3),
        "margins": (2.0, 3.0, 4.0),
        "starts": (0, 1, 2),
        "finish": "stop",
    }
    return ProbeResult(**{**fields, **changes})


def parity_of(served: ProbeResult, trained: ProbeResult | None = None, tolerance: float = 0.1) -> Parity:
    tokens = {1: "'<s>' BOS", 2: "'</s>' EOS", 5: "'a'", 6: "'b'"}
    references = References(
        adapter="a", base="b", dtype="float32", max_tokens=4, readings=(trained or a_reading(),), tokens=tokens
    )
    return compare(references, [served], tolerance)


# what the target tells → what the refusal says, None: it is the same
READINGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "all the same": ({}, None),
    "within the tolerance": ({"log_probs": (-0.19, -0.2, -0.39)}, None),
    "beyond the tolerance": ({"log_probs": (-0.1, -0.31, -0.3)}, "token 2 of the answer, 'b' (6), has log-probability"),
    "end not told": ({"answer_ids": (5, 6), "log_probs": (-0.1, -0.2)}, None),
    "end missed": ({"answer_ids": (5, 6, 9), "finish": "length"}, "its token 3 is token 9 instead of '</s>' EOS (2)"),
    "ended early": ({"answer_ids": (5, 2), "log_probs": (-0.1, -0.2)}, "instead of 'b' (6)"),
    "cut, not ended": ({"answer_ids": (5, 6), "log_probs": None, "finish": "length"}, "nothing more"),
    "BOS twice": ({"prompt_ids": (1, 1, 7, 8), "prompt_text": None}, "is there twice"),
    "BOS missing": ({"prompt_ids": (7, 8), "prompt_text": None}, "'<s>' BOS (1)"),
    "fewer tokens counted": ({"prompt_ids": None, "prompt_text": None, "num_prompt": 2}, "3 tokens became 2"),
    "text with another end": ({"answer_ids": None, "log_probs": None, "finish": "length"}, "end of turn"),
    "text cut within a character": ({"answer_ids": None, "log_probs": None, "answer_text": "ab\ufffd"}, None),
    "text that differs": ({"answer_ids": None, "answer_text": "ax"}, "another answer"),
}


@pytest.mark.parametrize("name", READINGS)
def test_parity_of_one_reading_by_what_differs(name: str) -> None:
    changes, word = READINGS[name]
    found = parity_of(a_reading(**changes))
    if word is None:
        assert (found.problems, found.num_tokens) == ((), len(changes.get("answer_ids") or (1,) * 3))
    else:
        assert word in found.told


def test_parity_stops_at_a_tie_and_never_before_it() -> None:
    """Where two tokens are about as likely, either may be written; what comes after is another answer."""
    tied = a_reading(margins=(2.0, 0.15, 4.0))
    other = a_reading(answer_ids=(5, 9, 9, 9), answer_text="axx", log_probs=(-0.1, -0.2, -9.0, -9.0), finish="length")
    assert parity_of(other, tied).problems == ()
    assert parity_of(other, tied, tolerance=0.05).problems, "the margin is more than twice the tolerance"
    unlikely = other.model_copy(update={"log_probs": (-0.1, -2.0, -9.0, -9.0)})
    assert "log-probability" in parity_of(unlikely, tied).told, "there it is not about as likely"
    before = a_reading(answer_ids=(9, 6, 2), answer_text="xb")
    assert parity_of(before, tied).problems, "the first token was no tie"
    told_as_text = {"answer_ids": None, "log_probs": None}
    assert parity_of(a_reading(answer_text="axx", **told_as_text), tied).problems == ()
    assert parity_of(a_reading(answer_text="xb", **told_as_text), tied).problems


def test_parity_where_nothing_could_be_compared_is_refused() -> None:
    tied = a_reading(margins=(0.0, 0.0, 0.0))
    found = parity_of(a_reading(answer_ids=(9,), log_probs=(-0.1,)), tied)
    assert "not one token" in found.told


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)


@given(answer=TOKENS, prompt=TOKENS, shifts=st.lists(st.floats(-1, 1), min_size=6, max_size=6))
def test_parity_holds_exactly_within_the_tolerance(
    answer: tuple[int, ...], prompt: tuple[int, ...], shifts: list[float]
) -> None:
    log_probs = tuple(-0.5 for _ in answer)
    same = {"answer_ids": answer, "prompt_ids": prompt, "margins": tuple(3.0 for _ in answer), "starts": None}
    trained = a_reading(log_probs=log_probs, **same)
    moved = tuple(value + shift for value, shift in zip(log_probs, shifts, strict=False))
    found = parity_of(a_reading(log_probs=moved, **same), trained)
    largest = max(abs(a - b) for a, b in zip(log_probs, moved, strict=True))
    assert found.is_same == (largest <= 0.1)
    if found.is_same:
        assert (found.num_tokens, found.max_difference) == (len(answer), pytest.approx(largest))


@given(prompt=TOKENS, other=TOKENS)
def test_parity_never_passes_another_prompt(prompt: tuple[int, ...], other: tuple[int, ...]) -> None:
    found = parity_of(a_reading(prompt_ids=other), a_reading(prompt_ids=prompt))
    assert found.is_same == (prompt == other)
    assert found.is_same or found.told


@given(answer=TOKENS, other=TOKENS, margins=st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_parity_passes_another_answer_only_from_a_tie_on(
    answer: tuple[int, ...], other: tuple[int, ...], margins: list[float]
) -> None:
    def reading(ids: tuple[int, ...]) -> ProbeResult:
        leads = tuple(margins[: len(ids)])
        return a_reading(answer_ids=ids, margins=leads, log_probs=None, finish="length", starts=None)

    found = parity_of(reading(other), reading(answer))
    pairs = list(zip(answer, other, strict=False))
    place = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(answer), len(other)))
    is_tie = place > 0 and place < len(answer) and margins[place] <= 0.2
    assert found.is_same == (answer == other or is_tie)


def test_tolerance_is_stated_by_kind_and_a_chosen_one_is_named() -> None:
    kinds = {kind: tolerance_of(kind, {}, "float32").log_prob for kind in ("embedded", "vllm", "llamacpp", "ollama")}
    assert kinds == {"embedded": 1e-3, "vllm": 0.15, "llamacpp": 0.15, "ollama": 0.15}
    assert tolerance_of("embedded", {}, "bfloat16").log_prob == 0.05
    quantized = tolerance_of("llamacpp", {"quantization": "Q4_K_M"}, "float32")
    assert (quantized.log_prob, "q4_k_m" in quantized.why) == (0.5, True)
    chosen = tolerance_of("vllm", {}, "float32", 0.3)
    assert (chosen.log_prob, chosen.why) == (0.3, "parity_tolerance of the target")


def test_prompts_are_chosen_over_all_lengths_with_a_conversation_among_them() -> None:
    asked: list[Any] = [[{"role": "user", "content": "x" * number}] for number in range(1, 101)]
    asked.insert(40, [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}])
    asked.append([{"role": "user", "content": "y", "tool_calls": []}])
    chosen = choose_prompts(asked)
    assert len(chosen) == 6
    lengths = [len(messages[-1]["content"]) for messages in chosen]
    assert (min(lengths), max(lengths)) == (1, 100)
    assert sum(len(messages) > 1 for messages in chosen) == 1
    assert all(set(message) == {"role", "content"} for messages in chosen for message in messages)
    assert choose_prompts(list(reversed(asked))) == chosen, "the order of the cases decides nothing"
    assert choose_prompts([asked[-1]]) == [tuple(asked[-1])], "better an odd one than none"
    assert choose_prompts([]) == []
