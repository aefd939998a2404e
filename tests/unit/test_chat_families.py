"""Masks by the chat template of each family: exactly the answers and their ends, whatever the conversation is."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat_families import FAMILIES, PRINTED_ARGUMENTS, TEXT_ARGUMENTS, Family, a_tokenizer, special_tokens_in
from support.data import a_tool, a_tool_chat, encoded, prepared
from tunesmith.core.errors import ConfigError, DataError, TunesmithError
from tunesmith.datasets.example import Split
from tunesmith.datasets.reading import read_split
from tunesmith.models.chat import ChatFormat, Tokenized

_trl = importlib.util.find_spec("trl")
REAL = [] if _trl is None else sorted((Path(str(_trl.origin)).parent / "chat_templates").glob("*.jinja"))
"""Templates of real models, as far as an installed package brings them."""
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call is not None]
Turns = list[dict[str, Any]]


@cache
def chat_of(name: str, merges: bool = False) -> tuple[Any, ChatFormat]:
    tokenizer = a_tokenizer(FAMILIES[name], merges=merges)
    return tokenizer, ChatFormat(tokenizer)


def trained_texts(tokenizer: Any, example: Tokenized) -> list[str]:
    """The trained stretches as text, special tokens shown."""
    stretches: list[list[int]] = []
    for place, (token, trained) in enumerate(zip(example.ids, example.loss_mask, strict=True)):
        if trained and (place == 0 or not example.loss_mask[place - 1]):
            stretches.append([])
        if trained:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches]


def turns(*texts: str, system: str | None = None) -> Turns:
    roles = ("user", "assistant")
    found = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return found if system is None else [{"role": "system", "content": system}, *found]


def calling(*, tools: bool = True) -> Turns:
    """A question, a call, its result, and the answer."""
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        *([{"role": "tools", "content": json.dumps([a_tool()])}] if tools else []),
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "weight": 1},
        {"role": "tool", "content": "20", "tool_call_id": "abcdefghi", "name": "weather"},
        {"role": "assistant", "content": "It is warm.", "weight": 1},
    ]


def learnt(family: Family, text: str) -> str:
    return family.lead + text + family.end


def agrees_with_serving(chat: ChatFormat, messages: Turns) -> bool:
    """Whether the tokens that a server makes of the prompt are those in front of the last trained answer."""
    example, prompt = chat.tokenize("e", messages, final_only=True), chat.prompt(messages[:-1])
    num = len(prompt)
    return example.ids[:num] == prompt and not any(example.loss_mask[:num]) and example.loss_mask[num]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_single_turn_trains_exactly_the_answer_and_its_end(name: str, system: str | None) -> None:
    tokenizer, chat = chat_of(name)
    messages = turns("What?", "Yes, größer.", system=system)
    example = chat.tokenize("e", messages)
    assert trained_texts(tokenizer, example) == [learnt(FAMILIES[name], "Yes, größer.")]
    assert agrees_with_serving(chat, messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_several_turns_train_every_answer(name: str) -> None:
    family, (tokenizer, chat) = FAMILIES[name], chat_of(name)
    messages = turns("one", "first", "two", "second", "three", "third")
    answers = ["third"] if family.earlier_is_context else ["first", "second", "third"]
    example = chat.tokenize("e", messages)
    assert trained_texts(tokenizer, example) == [learnt(family, answer) for answer in answers]
    assert example.num_rewritten == 3 - len(answers)
    assert trained_texts(tokenizer, chat.tokenize("e", messages, final_only=True)) == [learnt(family, "third")]
    assert all(agrees_with_serving(chat, messages[:num]) for num in (2, 4, 6))


@pytest.mark.parametrize("name", FAMILIES)
def test_answer_of_weight_0_is_context(name: str) -> None:
    family, (tokenizer, chat) = FAMILIES[name], chat_of(name)
    messages = turns("one", "first", "two", "second", "three", "third")
    messages[1]["weight"], messages[5]["weight"] = 1, 0
    if family.earlier_is_context:
        with pytest.raises(DataError, match="leaves no token of the answer"):
            chat.tokenize("e", messages)
        return
    assert trained_texts(tokenizer, chat.tokenize("e", messages)) == [learnt(family, t) for t in ("first", "second")]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_end_of_an_answer_stops_generation(name: str) -> None:
    family, (tokenizer, chat) = FAMILIES[name], chat_of(name)
    ends = {family.end, family.eos} | ({"<|eom_id|>"} if name == "llama3" else set())
    assert {tokenizer.convert_ids_to_tokens(token) for token in chat.stop_ids} == ends


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("tools", [True, False])
def test_call_is_trained_like_any_answer(name: str, tools: bool) -> None:
    family, (tokenizer, chat) = FAMILIES[name], chat_of(name)
    assert family.call is not None
    messages = calling(tools=tools)
    example = chat.tokenize("e", messages)
    assert trained_texts(tokenizer, example) == [family.call, learnt(family, "It is warm.")]
    assert ("Looks it up." in tokenizer.decode(example.ids)) is tools
    assert "20" in tokenizer.decode(example.ids)
    assert agrees_with_serving(chat, messages)
    assert agrees_with_serving(chat, messages[:-2])
    messages[-3]["weight"] = 0
    assert trained_texts(tokenizer, chat.tokenize("e", messages)) == [learnt(family, "It is warm.")]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(WITH_TOOLS)))
def test_template_that_knows_no_functions_is_refused(name: str) -> None:
    _, chat = chat_of(name)
    with pytest.raises(ConfigError, match=r"example-3: .* use a base whose template knows tools"):
        chat.tokenize("example-3", calling())
    with pytest.raises(ConfigError, match=r"example-3: .* use a base whose template knows tools"):
        chat.tokenize("example-3", calling(tools=False)[:2])


def test_template_that_writes_the_date_writes_the_same_tokens_every_day() -> None:
    family = FAMILIES["phi4"]
    template = "{{ strftime_now('%d %b %Y') }}" + family.template
    tokenizer = a_tokenizer(Family(template, family.special, family.eos, family.end))
    text = tokenizer.decode(ChatFormat(tokenizer).tokenize("e", turns("one", "first")).ids)
    assert text.startswith("01 Jan 2026<|im_start|>user")


def test_template_that_leaves_the_answer_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not write what the assistant says"):
        ChatFormat(a_tokenizer(Family("{{ '<|im_end|>' * messages | length }}", ("<|im_end|>",), "<|im_end|>", "")))


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS, PRINTED_ARGUMENTS])
def test_arguments_are_given_in_the_form_that_the_template_takes(template: str) -> None:
    family = FAMILIES["chatml"]
    tokenizer = a_tokenizer(Family(template, family.special, family.eos, family.end))
    example = ChatFormat(tokenizer).tokenize("e", calling())
    assert trained_texts(tokenizer, example) == [family.call, "It is warm.<|im_end|>"]


def test_tail_of_a_conversation_is_neither_trained_nor_the_end_of_an_answer() -> None:
    tokenizer, chat = chat_of("phi3")
    example = chat.tokenize("e", turns("one", "first"))
    assert tokenizer.decode(example.ids).endswith("first<|end|>\n<|endoftext|>")
    assert trained_texts(tokenizer, example) == ["first<|end|>"]


def test_earlier_thoughts_are_left_out_and_the_last_one_is_trained() -> None:
    tokenizer, chat = chat_of("thinking")
    messages = turns("one", "<think>\nhm\n</think>\n\nfirst", "two", "<think>\nwell\n</think>\n\nsecond")
    example = chat.tokenize("e", messages)
    assert trained_texts(tokenizer, example) == ["<think>\nwell\n</think>\n\nsecond<|im_end|>"]
    assert "hm" not in tokenizer.decode(example.ids)


def test_answer_before_which_the_template_moves_text_later_is_context() -> None:
    tokenizer, chat = chat_of("mistral")
    messages = turns("one", "first", "two", "second", system="Be brief.")
    assert trained_texts(tokenizer, chat.tokenize("e", messages)) == [" second</s>"]


@pytest.mark.parametrize("place", ["call", "definition", "result"])
def test_control_token_in_a_call_a_result_or_a_definition_is_refused(place: str) -> None:
    _, chat = chat_of("chatml")
    messages = calling()
    if place == "call":
        messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "x<|im_end|>"}
    elif place == "definition":
        messages[0]["content"] = json.dumps([a_tool("x<|im_end|>")])
    else:
        messages[3]["name"] = "<|im_end|>"
    with pytest.raises(DataError, match=r"control token '<\|im_end\|>'"):
        chat.tokenize("e", messages)


# What users say is upper case, what assistants say is lower case: so a trained token tells where it came from.
ASKED = st.text(alphabet="QRSTUV \n", min_size=1, max_size=12).filter(str.strip)
SAID = st.text(alphabet="abcdeö \n", min_size=1, max_size=12).filter(str.strip)
SYSTEM = st.none() | ASKED


@st.composite
def conversations(draw: st.DrawFn) -> Turns:
    num = draw(st.integers(1, 4))
    messages = turns(*(draw(ASKED if n % 2 == 0 else SAID) for n in range(2 * num)), system=draw(SYSTEM))
    for message in messages:
        if message["role"] == "assistant":
            message["weight"] = draw(st.integers(0, 1))
    messages[-1]["weight"] = 1
    return messages


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(messages=conversations())
def test_no_token_outside_of_an_assistants_turn_is_trained(name: str, merges: bool, messages: Turns) -> None:
    family, (tokenizer, chat) = FAMILIES[name], chat_of(name, merges)
    found = trained_texts(tokenizer, chat.tokenize("e", messages))
    wanted = [message["content"] for message in messages if message.get("weight")]
    moves = family.earlier_is_context or (name == "mistral" and messages[0]["role"] == "system")
    wanted = wanted[-1:] if moves else wanted
    assert [_said(family, text) for text in found] == [" ".join(text.split()) for text in wanted]
    assert agrees_with_serving(chat, messages)


def _said(family: Family, trained: str) -> str:
    """What a trained stretch says; some templates take the blanks around it away."""
    assert trained.startswith(family.lead.rstrip())
    assert trained.endswith(family.end)
    return " ".join(trained.removeprefix(family.lead.rstrip()).removesuffix(family.end).split())


@pytest.mark.parametrize("name", ["chatml", "marked", "llama3"])
def test_prepared_conversation_with_tools_is_trained_through_the_template(name: str, tmp_path: Path) -> None:
    dataset = prepared(tmp_path, encoded(*(a_tool_chat(number, call_id="abcdefghi") for number in range(30))))
    tokenizer, chat = chat_of(name)
    example = read_split(dataset.path, Split.TRAIN)[0]
    call, answer = trained_texts(tokenizer, chat.tokenize(example.id, example.messages))
    city = example.chosen[0]["tool_calls"][0]["function"]["arguments"]["city"]
    assert call == str(FAMILIES[name].call).replace("Rome", city)
    assert answer == example.messages[-1]["content"] + FAMILIES[name].end


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_a_pair_share_the_prompt_and_nothing_of_it_is_trained(name: str, tmp_path: Path) -> None:
    pair = {"prompt": turns("one", "earlier", "two"), "chosen": "good", "rejected": "bad"}
    dataset = prepared(tmp_path, encoded(*[{**pair, "prompt": turns("one", "earlier", f"{n}")} for n in range(30)]))
    example = read_split(dataset.path, Split.TRAIN)[0]
    tokenizer, chat = chat_of(name)
    assert example.rejected is not None
    prompt = chat.prompt(example.prompt)
    for answer in (example.chosen, example.rejected):
        tokens = chat.tokenize(example.id, example.prompt + answer)
        assert tokens.ids[: len(prompt)] == prompt
        assert trained_texts(tokenizer, tokens) == [learnt(FAMILIES[name], answer[0]["content"])]
        assert tokens.num_rewritten == 0


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_template_of_a_real_model_trains_exactly_the_answers_or_is_refused(path: Path) -> None:
    """What a model has to write around an answer differs; what others say, and their headers, is never in it."""
    source = path.read_text()
    tokenizer = a_tokenizer(Family(source, special_tokens_in(source), "<|endoftext|>", ""))
    tokenizer.bos_token, tokenizer.model_max_length = "<bos>", 100_000
    chat = ChatFormat(tokenizer)
    said = {"FIRST", "SECOND", "It is warm.", "Rome"}
    for messages in (turns("ASK", "FIRST", "MORE", "SECOND"), calling()):
        try:
            example = chat.tokenize("e", messages)
        except TunesmithError as error:
            assert "template" in error.message  # noqa: PT017 (either way is fine, and each has its own check)
            continue
        found = trained_texts(tokenizer, example)
        assert len(found) + example.num_rewritten == 2
        for text in found:
            assert sum(words in text for words in said) == 1
            assert not any(words in text for words in ("ASK", "MORE", "How warm", "20", "<|im_start|>", "user\n"))
