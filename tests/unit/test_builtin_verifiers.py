"""Each verifier on what it must catch and on what it must leave alone; all of them on anything at all."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.rules.experience import next_turn_after
from tunesmith.verifiers.base import Finding, Interaction
from tunesmith.verifiers.entities import entities_of, missing_from
from tunesmith.verifiers.json_schema import schema_problem, violation
from tunesmith.verifiers.languages import language_of
from tunesmith.verifiers.registry import VERIFIERS, settings_of, verify

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ALL_SETTINGS: dict[str, dict[str, Any]] = {name: {} for name in VERIFIERS} | {"json_schema": {"schema": SCHEMA}}


def an_interaction(question: str, answer: str, system: str = "", reference: str | None = None) -> Interaction:
    head = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Interaction([*head, *turns], reference)


def found(name: str, interaction: Interaction, **settings: Any) -> Finding:
    return verify(interaction, {name: settings or ALL_SETTINGS[name]})[name]


def test_entities_are_numbers_names_codes_addresses_and_quotes() -> None:
    text = 'Please move order AB-1234 of Maria Lopez (maria@example.org) to 2024-05-03, 1,250 EUR, and say "thank you".'
    assert set(entities_of(text)) == {
        "ab-1234", "maria lopez", "maria@example.org", "2024-05-03", "1250", "eur", "thank you",
    }  # fmt: skip


def test_entity_is_missing_where_it_is_only_part_of_another_word() -> None:
    assert missing_from(("42", "ann"), "142 bananas and channel 421") == ("42", "ann")
    assert missing_from(("42", "1250"), "It is 42, or 1,250.") == ()


@pytest.mark.parametrize(
    ("answer", "score"),
    [("Order 17 goes to Rome on 3 May.", 1.0), ("Order 17 goes there.", 0.25), ("Done.", 0.0)],
)
def test_entity_preservation_is_the_share_kept(answer: str, score: float) -> None:
    assert found("entity_preservation", an_interaction("Send order 17 to Rome on 3 May", answer)).score == score


def test_entity_preservation_does_not_apply_where_nothing_is_named() -> None:
    assert found("entity_preservation", an_interaction("how are you today", "Fine.")).score is None


def test_fabrication_is_scored_and_never_flagged() -> None:
    finding = found("fabrication", an_interaction("When was it built?", "It was built in 1889 by Gustave Eiffel."))
    assert finding.score == 0.0
    assert not finding.flagged
    assert VERIFIERS["fabrication"].monitors_only


def test_template_echo_flags_repeated_instructions_placeholders_and_the_question_itself() -> None:
    system = "You are a helpful assistant of the shop and you always answer in one short sentence only."
    assert found("template_echo", an_interaction("Where?", system, system)).flagged
    assert found("template_echo", an_interaction("Greet her.", "Dear {{customer_name}}, welcome.")).flagged
    assert found("template_echo", an_interaction("What is the price of it?", "what is the PRICE of it")).flagged
    clean = found("template_echo", an_interaction("Where?", "In the shop, on the second floor.", system))
    assert (clean.flagged, clean.score) == (False, 1.0)


def test_template_echo_leaves_a_rewriter_alone_that_keeps_the_words_of_the_person() -> None:
    text = "the quick brown fox jumps over the lazy dog near the river bank today"
    assert not found("template_echo", an_interaction(f"Correct this: {text}", f"{text}!")).flagged
    assert found("template_echo", an_interaction(f"Correct this: {text}", f"{text}!"), against="prompt").flagged


def test_padding_is_a_long_answer_to_next_to_nothing() -> None:
    long = "word " * 80
    assert found("padded_minimal_input", an_interaction("ok", long)).flagged
    assert found("padded_minimal_input", an_interaction("ok", "Good.")).score == 1.0
    assert found("padded_minimal_input", an_interaction("Explain to me how a bicycle works", long)).score is None
    assert found("padded_minimal_input", an_interaction("Explain 1984", long)).score is None


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ('{"city": "Rome", "days": [1, 2], "unit": "C"}', None),
        ('{"city": "Rome"} and more', "is not JSON"),
        ('{"days": [1]}', "city is missing"),
        ('{"city": 5}', "city is no string"),
        ('{"city": "R"}', "minLength"),
        ('{"city": "Rome", "town": 1}', "not among the properties"),
        ('{"city": "Rome", "days": [1, 0]}', "days[1] is 0, minimum is 1"),
        ('{"city": "Rome", "days": [1, true]}', "days[1] is no integer"),
        ('{"city": "Rome", "days": [1, 2, 3, 4]}', "maxItems"),
        ('{"city": "Rome", "unit": "K"}', "allowed values"),
        ('{"city": "Rome", "city": "Oslo"}', "twice"),
        ("NaN", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("", "is not JSON"),
    ],
)
def test_json_schema_names_the_place_that_is_wrong(answer: str, problem: str | None) -> None:
    said = violation(answer, SCHEMA)
    assert said is None if problem is None else problem in str(said)
    assert found("json_schema", an_interaction("?", answer)).flagged is (problem is not None)


def test_json_schema_in_a_fence_only_where_allowed() -> None:
    interaction = an_interaction("?", '```json\n{"city": "Rome"}\n```')
    assert found("json_schema", interaction).flagged
    assert not found("json_schema", interaction, schema=SCHEMA, allow_fence=True).flagged


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"typ": "object"}, "did you mean 'type'?"),
        ({"type": "text"}, "makes no sense"),
        ({"properties": {"a": {"pattern": ".*"}}}, "a: keyword 'pattern' is not checked here"),
        ({"items": [1]}, "makes no sense"),
        ({"required": "city"}, "makes no sense"),
    ],
)
def test_json_schema_with_a_keyword_that_would_not_be_checked_is_refused(schema: Any, problem: str) -> None:
    assert problem in str(schema_problem(schema))
    with pytest.raises(ValueError, match="schema: "):
        settings_of("json_schema", {"schema": schema})


def test_exact_match_needs_a_reference() -> None:
    assert found("exact_match", an_interaction("1 + 1?", "2")).score is None
    assert found("exact_match", an_interaction("1 + 1?", " 2\n", reference="2")).score == 1.0
    assert found("exact_match", an_interaction("1 + 1?", "3", reference="2")).flagged
    assert found("exact_match", an_interaction("?", "YES", reference="yes"), ignore_case=True).score == 1.0


def test_length_is_flagged_on_both_sides() -> None:
    assert found("length", an_interaction("?", " ")).flagged
    assert found("length", an_interaction("?", "abcdef"), max_chars=3).score == 0.5
    assert found("length", an_interaction("?", "abc"), max_chars=3) == Finding(1.0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The house is on the hill and it was built with care.", "en"),
        ("Das Haus ist auf dem Hügel und es war nicht teuer.", "de"),
        ("La maison est sur la colline et elle est très belle.", "fr"),
        ("Дом стоит на холме.", "ru"),
        ("これは日本語の文章です。", "ja"),
        ("这是一句中文。", "zh"),
        ("42", None),
        ("", None),
    ],
)
def test_language_is_told_where_it_can_be(text: str, code: str | None) -> None:
    assert language_of(text) == code


def test_language_of_the_answer_must_be_that_of_the_question_or_the_one_named() -> None:
    german = "Das ist der Weg, und er ist nicht lang."
    assert found("language", an_interaction("Where is the way, and how long is it?", german)).flagged
    assert found("language", an_interaction("Where is the way, and how long is it?", german), expected="de").score == 1
    assert found("language", an_interaction("Where is the way, and how long is it?", "42")).score is None


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("jsonschema", {}, "no verifier 'jsonschema'; did you mean 'json_schema'?"),
        ("length", {"max_char": 3}, "length has no setting 'max_char'; did you mean 'max_chars'?"),
        ("length", {"max_chars": 0}, "max_chars: "),
        ("length", {"max_chars": "3"}, "max_chars: "),
        ("length", {"min_chars": 9, "max_chars": 3}, "min_chars is more than max_chars"),
        ("language", {"expected": "xx"}, "no language 'xx'"),
        ("json_schema", {}, "schema: field required"),
    ],
)
def test_unknown_verifiers_and_settings_are_refused_with_the_nearest(name: str, settings: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        settings_of(name, settings)
    assert problem in str(caught.value)


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=100), st.none() | st.text(max_size=50))
def test_every_verifier_is_total_deterministic_and_scores_from_0_to_1(q: str, a: str, s: str, ref: str | None) -> None:
    interaction = an_interaction(q, a, s, ref)
    findings = verify(interaction, ALL_SETTINGS)
    assert findings == verify(interaction, ALL_SETTINGS)
    for finding in findings.values():
        assert finding.score is None or 0.0 <= finding.score <= 1.0
        assert finding.reason or not finding.flagged


@pytest.mark.parametrize("piece", ["A", "1", "a-1", "((", '"', "the ", "{{", "x@x.", "1,1", "https://", "é", "Aa "])
def test_a_hostile_text_costs_little(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    begun = time.process_time()
    verify(an_interaction(text, text, text), ALL_SETTINGS)
    assert time.process_time() - begun < 3.0


def test_next_turn_is_found_in_whole_conversations_and_in_single_turns() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "no!"), ("assistant", "c")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert next_turn_after("b", messages) == "no!"
    assert next_turn_after("c", messages) is None
    assert next_turn_after("b", messages[2:]) == "no!"
    assert next_turn_after("other", messages) is None
