"""The verifiers that come with tunesmith."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.core.section import Section, Share
from tunesmith.verifiers.base import Finding, Interaction, NoSettings, Verifier
from tunesmith.verifiers.entities import entities_of, missing_from
from tunesmith.verifiers.json_schema import schema_problem, violation
from tunesmith.verifiers.languages import KNOWN, language_of
from tunesmith.verifiers.refusal import REFUSAL

_WORD = re.compile(r"\w+")
_PLACEHOLDER = re.compile(
    r"\{\{[^{}\n]{1,60}\}\}|<(?:your|insert|the)[ _][^<>\n]{1,60}>|\[(?:insert|your)[ _][^\[\]\n]{1,60}\]",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL | re.IGNORECASE)
_NUM_SHOWN = 3
ENTITY_PRESERVATION, ECHO = "entity_preservation", "template_echo"
"""The two that the classes treat in a way of their own."""


def _entity_preservation(interaction: Interaction, settings: NoSettings) -> Finding:
    entities = entities_of(interaction.question)
    if not entities:
        return Finding(None, reason="the question names nothing that must be kept")
    lost = missing_from(entities, interaction.answer)
    score = 1.0 - len(lost) / len(entities)
    return Finding(score, reason=f"the answer lost {_some(lost)}" if lost else "")


def _fabrication(interaction: Interaction, settings: NoSettings) -> Finding:
    """Monitor only: most of what an answer adds is knowledge, not invention."""
    entities = entities_of(interaction.answer)
    if not entities:
        return Finding(None, reason="the answer names nothing")
    new = missing_from(entities, interaction.prompt)
    return Finding(1.0 - len(new) / len(entities), reason=f"not in the prompt: {_some(new)}" if new else "")


class EchoSettings(Section):
    against: Literal["system", "prompt"] = "system"
    """What must not be repeated: the system message, or everything the model had read."""
    num_words: int = Field(default=8, ge=3, le=50)
    """Words in a row that count as repeated."""
    max_share: Share = 0.3
    """Largest share of the answer's words that may be repeated."""


def _template_echo(interaction: Interaction, settings: EchoSettings) -> Finding:
    left = _PLACEHOLDER.search(interaction.answer)
    if left is not None and left[0] not in interaction.question:
        return Finding(0.0, flagged=True, reason=f"the answer holds the placeholder {quoted(left[0], 40)}")
    answer = _words(interaction.answer)
    if len(answer) > 2 and answer == _words(interaction.question):
        return Finding(0.0, flagged=True, reason="the answer repeats the question")
    source = interaction.instructions if settings.against == "system" else interaction.prompt
    share = _repeated_share(answer, _words(source), settings.num_words)
    flagged = share > settings.max_share
    reason = f"{share:.0%} of the answer repeats the {settings.against} text" if flagged else ""
    return Finding(1.0 - share, flagged=flagged, reason=reason)


def _repeated_share(words: list[str], source: list[str], num: int) -> float:
    """Share of the words that stand in a run of `num` words which the source has too."""
    known = {tuple(source[place : place + num]) for place in range(len(source) - num + 1)}
    covered = bytearray(len(words))
    for place in range(len(words) - num + 1):
        if tuple(words[place : place + num]) in known:
            covered[place : place + num] = b"\1" * num
    return sum(covered) / len(words) if words else 0.0


class PaddingSettings(Section):
    max_question_words: int = Field(default=3, ge=1, le=100)
    """Up to so many words, a question without entities is minimal."""
    max_answer_words: int = Field(default=60, ge=1, le=10_000)
    """More words than this in answer to a minimal question are padding."""


def _padded_minimal_input(interaction: Interaction, settings: PaddingSettings) -> Finding:
    question, num = _words(interaction.question), len(_words(interaction.answer))
    if len(question) > settings.max_question_words or entities_of(interaction.question):
        return Finding(None, reason="the question is not minimal")
    if num <= settings.max_answer_words:
        return Finding(1.0)
    reason = f"{num} words in answer to a question of {len(question)}"
    return Finding(settings.max_answer_words / num, flagged=True, reason=reason)


class SchemaSettings(Section):
    must_be: dict[str, Any] = Field(alias="schema")
    """The JSON schema of the answer; see `verifiers/json_schema.py` for the keywords."""
    allow_fence: bool = False
    """Whether the JSON may stand in a Markdown code block."""

    @field_validator("must_be")
    @classmethod
    def _usable(cls, value: dict[str, Any]) -> dict[str, Any]:
        problem = schema_problem(value)
        if problem is not None:
            raise ValueError(problem)
        return value


def _json_schema(interaction: Interaction, settings: SchemaSettings) -> Finding:
    fenced = _FENCE.match(interaction.answer) if settings.allow_fence else None
    problem = violation(fenced[1] if fenced else interaction.answer, settings.must_be)
    return Finding(1.0) if problem is None else Finding(0.0, flagged=True, reason=problem[:200])


class MatchSettings(Section):
    ignore_case: bool = False
    """Whether capitals make no difference."""
    ignore_blanks: bool = True
    """Whether several blanks, and those at both ends, make no difference."""


def _exact_match(interaction: Interaction, settings: MatchSettings) -> Finding:
    if interaction.reference is None:
        return Finding(None, reason="no reference answer is known")
    texts = [interaction.answer, interaction.reference]
    if settings.ignore_blanks:
        texts = [" ".join(text.split()) for text in texts]
    if settings.ignore_case:
        texts = [text.casefold() for text in texts]
    if texts[0] == texts[1]:
        return Finding(1.0)
    return Finding(0.0, flagged=True, reason="the answer is not the reference")


class LengthSettings(Section):
    min_chars: int = Field(default=1, ge=0)
    """Fewest characters of an answer, without blanks at its ends."""
    max_chars: int = Field(default=20_000, ge=1)
    """Most characters of an answer."""

    @model_validator(mode="after")
    def _in_order(self) -> LengthSettings:
        if self.min_chars > self.max_chars:
            raise ValueError("min_chars is more than max_chars")
        return self


def _length(interaction: Interaction, settings: LengthSettings) -> Finding:
    num = len(interaction.answer.strip())
    if settings.min_chars <= num <= settings.max_chars:
        return Finding(1.0)
    if num < settings.min_chars:
        return Finding(
            num / settings.min_chars, flagged=True, reason=f"{num} characters, min_chars is {settings.min_chars}"
        )
    return Finding(
        settings.max_chars / num, flagged=True, reason=f"{num} characters, max_chars is {settings.max_chars}"
    )


class LanguageSettings(Section):
    expected: str = "same"
    """`same` as the question's, or a code such as en."""

    @field_validator("expected")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("same", *KNOWN):
            raise ValueError(f"no language {quoted(value)}{did_you_mean(value, ('same', *KNOWN))}")
        return value


def _language(interaction: Interaction, settings: LanguageSettings) -> Finding:
    wanted = language_of(interaction.question) if settings.expected == "same" else settings.expected
    found = language_of(interaction.answer)
    if wanted is None or found is None:
        return Finding(None, reason="too little text to tell its language")
    if wanted == found:
        return Finding(1.0)
    return Finding(0.0, flagged=True, reason=f"the answer is in {found}, not in {wanted}")


BUILTIN = (
    Verifier(ENTITY_PRESERVATION, "share of the question's numbers, names and codes that the answer keeps", NoSettings,
             _entity_preservation),
    Verifier("fabrication", "share of the answer's numbers, names and codes that were in the prompt", NoSettings,
             _fabrication, monitors_only=True),
    Verifier(ECHO, "whether the answer repeats its template, or leaves a placeholder in it", EchoSettings,
             _template_echo),
    Verifier("padded_minimal_input", "whether it is a long answer to next to nothing", PaddingSettings,
             _padded_minimal_input),
    Verifier("json_schema", "whether the answer is JSON of the schema", SchemaSettings, _json_schema),
    Verifier("exact_match", "whether the answer is the reference", MatchSettings, _exact_match),
    Verifier("length", "whether the answer's length lies within limits", LengthSettings, _length),
    Verifier("language", "whether the answer is in the language expected", LanguageSettings, _language),
    REFUSAL,
)  # fmt: skip


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _some(entities: tuple[str, ...]) -> str:
    shown = ", ".join(quoted(entity, 40) for entity in entities[:_NUM_SHOWN])
    return f"{shown} and {len(entities) - _NUM_SHOWN} more" if len(entities) > _NUM_SHOWN else shown
