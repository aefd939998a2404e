"""Capture: an interaction becomes an experience with scores, suspicions and a class, in one transaction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, TypedDict

from tunesmith.core.errors import DataError, UsageError, did_you_mean, quoted
from tunesmith.core.files import canonical_json, sha256_text
from tunesmith.core.strict_json import check_storable, storable
from tunesmith.core.visible_text import says_nothing
from tunesmith.datasets.example import BadRow
from tunesmith.datasets.messages import ANSWER_CODES, MessageChecker, makes_calls
from tunesmith.datasets.screens.rows import ROW_SCREENS, RowScreens
from tunesmith.experience import rate
from tunesmith.experience.queries import experiences
from tunesmith.experience.rate import add_rating
from tunesmith.experience.rules.classes import Assessment, assess
from tunesmith.experience.rules.experience import Context, ExperienceState, next_turn_after
from tunesmith.experience.rules.feedback import IMPLICIT_CONFIDENCE, IMPLICIT_RATER, Feedback, Rating, complaint_in
from tunesmith.profiles.sections.experience import ExperiencePolicy
from tunesmith.profiles.sections.screens import Screen
from tunesmith.store.database import Tx
from tunesmith.verifiers.base import UNFINISHED, Finding, Interaction
from tunesmith.verifiers.registry import monitors_among, verify

_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name")
_MAX_TEXT = 500  # of a field of the context, and of a comment made from a next turn
_MAX_REFERENCE = 200_000
_FIRST_YEAR, _LAST_YEAR = 1970, 2200


@dataclass(frozen=True)
class CaptureRules:
    """A profile's settings for captured experiences."""

    policy: ExperiencePolicy
    control_tokens: tuple[str, ...] = ()
    """What its base model reads as such."""
    screens: tuple[Screen, ...] = ()
    """What every text is searched for; a suspect is quarantined."""
    detectors: tuple[str, ...] = ()
    """Installed detectors that search it too."""
    max_bad_share: float = 0.0
    """How much of a file may be bad before nothing of it is imported."""


@dataclass(frozen=True)
class Capture:
    """One interaction as an application or a file tells it."""

    messages: Sequence[Mapping[str, Any]]
    """A conversation that ends with the model's answer."""
    key: str | None = None
    """Names it for ever in its profile; unset: the hash of conversation, session and adapter."""
    next_turn: str | None = None
    """What the person said after the answer, where that is known already."""
    context: Context = field(default_factory=Context)
    ratings: tuple[Rating, ...] = ()
    """What is known about it from the start, e.g. the label of an imported line."""
    is_cut: bool = False
    """A limit, a stop sequence or a lost connection ended the answer. It is kept for the correction it may get."""
    key_label: str | None = None
    """The API key that `tunesmith serve` gave the answer to; None: it was not served over HTTP."""


@dataclass(frozen=True)
class CaptureResult:
    """The id of the captured experience."""

    id: str
    is_new: bool
    """False: this key was there, and nothing has changed."""


@dataclass(frozen=True)
class CheckedCapture:
    """A validated and assessed capture, ready to be stored."""

    messages: list[dict[str, Any]]
    key: str
    capture: Capture
    assessment: Assessment


def check(capture: Capture, rules: CaptureRules) -> CheckedCapture:
    """Validate, verify, screen and class an interaction; raises DataError or UsageError with what is wrong with it."""
    # an answer of `tunesmith serve`, or a cut one, is stored even if it is empty: a person may correct it
    for_correction = capture.is_cut or capture.key_label is not None
    messages = _checked_messages(capture.messages, rules.policy.capture.max_chars, for_correction)
    context = capture.context
    for name, value in vars(context).items():
        if value is not None and name != "captured_at":
            _check_text(value, name, _MAX_REFERENCE if name == "reference" else _MAX_TEXT)
    key = capture.key
    if key is None:
        key = sha256_text(canonical_json([messages, context.session, context.served_by]))
    _check_text(key, "key", _MAX_TEXT)
    if capture.next_turn is not None:
        _check_text(capture.next_turn, "next_turn", _MAX_REFERENCE)
    for rating in capture.ratings:
        rate.check(rating)
    _check_instant(context.captured_at)
    findings = verify(Interaction(messages, context.reference), rules.policy.wanted)
    if (problem := _why_no_example(capture, messages, rules.policy)) is not None:
        findings[UNFINISHED] = Finding(None, True, f"the answer {problem}, so only a correction of it is learnt")
    # An unfinished answer is never learnt, so only its prompt is screened; else a suspect answer would keep its
    # correction in quarantine. Pairs are screened again when assembled.
    suspicions = suspicions_in(messages[:-1] if UNFINISHED in findings else messages, rules)
    assessment = assess(findings, suspicions, Feedback(), rules.policy.classes, monitors=monitors_among(findings))
    return CheckedCapture(messages, key, capture, assessment)


def _why_no_example(capture: Capture, messages: Sequence[Mapping[str, Any]], policy: ExperiencePolicy) -> str | None:
    """Why an answer is kept for its correction alone; None: it is an answer like others."""
    if _is_blank(messages[-1]):
        return "is empty"
    if messages[-1].get("content") != capture.messages[-1].get("content"):
        return "held characters that no database stores"
    return "was cut short" if capture.is_cut and policy.capture.finished_only else None


def store(tx: Tx, profile: str, checked: CheckedCapture, rules: CaptureRules, *, actor: str) -> CaptureResult:
    """Store a checked interaction, and what it says about the answer before it. Durable once `tx` has committed."""
    capture, context = checked.capture, checked.capture.context
    experience_id, is_new = experiences.add(
        tx,
        profile,
        checked.key,
        checked.messages,
        actor=actor,
        context=context,
        assessment=checked.assessment,
        key_label=capture.key_label,
    )
    if not is_new and experiences.get(tx, experience_id).state is ExperienceState.FORGOTTEN:
        # it keeps no more feedback, and the caller did nothing wrong
        return CaptureResult(experience_id, False)
    if is_new and context.session is not None and rules.policy.capture.implicit_feedback:
        _hear_complaint_about_the_last(tx, experience_id, checked, rules, actor)
    if capture.next_turn is not None and rules.policy.capture.implicit_feedback:
        _hear_complaint(tx, experience_id, capture.next_turn, rules, actor)
    for rating in capture.ratings:
        add_rating(tx, experience_id, rating, rules.policy.classes, actor=actor)
    return CaptureResult(experience_id, is_new)


def _hear_complaint_about_the_last(
    tx: Tx, experience_id: str, checked: CheckedCapture, rules: CaptureRules, actor: str
) -> None:
    """This conversation goes on from an earlier experience: what the person said in between may be a complaint."""
    if not any(message["role"] == "user" and complaint_in(str(message["content"])) for message in checked.messages):
        return
    last = experiences.last_before(tx, experiences.get(tx, experience_id))
    if last is None or last.state is ExperienceState.FORGOTTEN:
        return
    said = next_turn_after(Interaction(last.messages).answer, checked.messages)
    if said is not None:
        _hear_complaint(tx, last.id, said, rules, actor)


def _hear_complaint(tx: Tx, experience_id: str, said: str, rules: CaptureRules, actor: str) -> None:
    """A hint at low confidence. What the person said becomes a comment, never a correction: it is no answer."""
    if complaint_in(said) is None:
        return
    rating = Rating(
        rater=IMPLICIT_RATER,
        value=0.0,
        is_implicit=True,
        confidence=IMPLICIT_CONFIDENCE,
        comment=said[:_MAX_TEXT],
    )
    add_rating(tx, experience_id, rating, rules.policy.classes, actor=actor)


def _checked_messages(given: Any, max_chars: int, for_correction: bool) -> list[dict[str, Any]]:
    """The messages as they are stored. `for_correction`: whatever a model wrote, its prompt can still be corrected."""
    if not isinstance(given, list | tuple):
        raise UsageError('messages is no list; give a list of {"role": …, "content": …}')
    listed = [dict(message) if isinstance(message, Mapping) else message for message in given]
    texts: list[str] = []
    begins_with_tools = bool(listed) and isinstance(listed[0], dict) and listed[0].get("role") == "tools"
    try:
        judged = [*listed[:-1], {**listed[-1], "content": "…"}] if for_correction and _is_blank(listed[-1]) else listed
        shape = MessageChecker().check(judged[begins_with_tools:], "messages", "", texts)
    except BadRow as bad:
        raise DataError(f"{bad.field} {bad.problem}; {bad.fix}") from None
    if shape[-1] not in ANSWER_CODES:
        raise DataError(
            "messages does not end with an assistant message, so there is no answer to keep; "
            "what the person said next goes into next_turn"
        )
    num_chars = sum(map(len, texts))
    if num_chars > max_chars:
        raise DataError(f"the conversation has {num_chars} characters, experience.capture.max_chars is {max_chars}")
    messages = [{name: message[name] for name in _KEPT if name in message} for message in listed]
    if for_correction and isinstance(answer := messages[-1].get("content"), str):
        messages[-1]["content"] = storable(answer)
    for text in _texts_in(messages):
        check_storable(text, "a message")
    return messages


def _is_blank(message: Any) -> bool:
    """Whether it is an answer without a word: a model may end at once, and a person may still say what was right."""
    is_answer = isinstance(message, dict) and message.get("role") == "assistant" and not makes_calls(message)
    return is_answer and isinstance(said := message.get("content"), str) and says_nothing(said)


def _texts_in(value: Any) -> Iterator[str]:
    """Every text inside messages; how deep they may be nested was checked before."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.items() if isinstance(value, Mapping) else value:
            yield from _texts_in(list(inner) if isinstance(inner, tuple) else inner)


def _check_instant(captured_at: Any) -> None:
    if captured_at is None:
        return
    if not isinstance(captured_at, datetime) or captured_at.tzinfo is None:
        raise UsageError("captured_at is no instant with a time zone; give one, e.g. datetime.now(UTC)")
    if not _FIRST_YEAR <= captured_at.year < _LAST_YEAR:
        raise UsageError(
            f"captured_at is in the year {captured_at.year}; give the instant it happened, or leave it out"
        )


def _check_text(text: Any, name: str, limit: int) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{name} is no text; write it as one")
    if not text or len(text) > limit:
        raise UsageError(f"{name} is empty or longer than {limit} characters; shorten it, or leave it out")
    check_storable(text, name)


def suspicions_in(messages: Sequence[Mapping[str, Any]], rules: CaptureRules) -> list[str]:
    """Why an interaction may be an attack, or hold what nobody should learn; never repeats a secret."""
    texts = [text for message in messages for text in _texts_in({**message, "role": ""})]
    screened = RowScreens([name for name in rules.screens if name in ROW_SCREENS], rules.detectors).look(texts)
    found = {f"{each.screen}: {each.reason} ({each.excerpt})": None for each in screened}
    if rules.control_tokens:
        pattern = re.compile("|".join(map(re.escape, sorted(rules.control_tokens, key=len, reverse=True))))
        for token in sorted({match[0] for text in texts for match in pattern.finditer(text)}):
            found[f"control_token: a text holds {quoted(token)}, a control token of the base model"] = None
    return list(found)


_CONTEXT = frozenset(field.name for field in fields(Context))


class About(TypedDict, total=False):
    """What may be said about an interaction beside its messages: see `Capture` and `Context`."""

    key: str | None
    next_turn: str | None
    source: str | None
    session: str | None
    served_by: str | None
    template: str | None
    task_type: str | None
    reference: str | None
    captured_at: datetime | None
    is_cut: bool


def capture_of(messages: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> Capture:
    """A capture from what the caller says about it."""
    known = {"key", "next_turn", "is_cut", *_CONTEXT}
    for name in about:
        if name not in known:
            raise UsageError(f"an experience has no {quoted(name)}{did_you_mean(name, known)}")
    context = {"source": "api", **{name: value for name, value in about.items() if name in _CONTEXT}}
    is_cut = about.get("is_cut", False)
    if not isinstance(is_cut, bool):
        raise UsageError(f"is_cut is {quoted(repr(is_cut))}; give True or False")
    return Capture(messages, about.get("key"), about.get("next_turn"), Context(**context), is_cut=is_cut)


@dataclass(frozen=True)
class AddedView:
    """What came of adding an experience."""

    id: str
    is_new: bool
    class_name: str
    reasons: tuple[str, ...]
