"""Train/serve parity: what the trainer's stack reads and writes for a prompt, and what a target does with the same.

Compared, in this order, and the first that differs is told for each prompt: the tokens of the prompt, the tokens of the
greedy answer, where it ends, how likely each token was. What a server does not tell is not compared; what it tells must
suffice to compare the answers. Two stacks add up numbers in another order, so where two tokens are about as likely
(within twice the tolerance) either may be written: from there on the answers are two answers, and no longer compared.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.programs.readings import ProbeResult, References

_SHOWN_TOKENS = 4
_SHOWN_TEXT = 200
_SHOWN_LINES = 24
_SHOWN_PROBLEMS = 3

SAME_STACK = frozenset({"embedded"})
"""Kinds of target that compute with the library that trained: transformers and peft."""
_FLOAT32 = 1e-3
_HALF = 0.05
_OTHER_ENGINE = 0.15
_QUANTIZED = 0.5
_WHOLE = frozenset({"none", "f32", "fp32", "float32", "f16", "fp16", "float16", "bf16", "bfloat16"})


@dataclass(frozen=True)
class Tolerance:
    """Most by which the log-probability of a token may differ, and why that much."""

    log_prob: float
    why: str


@dataclass(frozen=True)
class Parity:
    """What came of a comparison: no problems, or each with what differs."""

    problems: tuple[str, ...]
    num_prompts: int
    num_tokens: int
    """Tokens of answers that were compared and are the same."""
    max_difference: float | None
    """Largest difference of a log-probability; None where the target tells none."""

    @property
    def is_same(self) -> bool:
        return not self.problems

    @property
    def told(self) -> str:
        """The problems, as a refusal tells them."""
        more = len(self.problems) - _SHOWN_PROBLEMS
        return "\n".join([*self.problems[:_SHOWN_PROBLEMS], *([f"and {more} more prompts differ"] if more > 0 else [])])


def tolerance_of(kind: str, options: Mapping[str, Any], dtype: str, chosen: float | None = None) -> Tolerance:
    """By how much a kind of target may differ; `chosen` is the target's own `parity_tolerance`."""
    if chosen is not None:
        return Tolerance(chosen, "parity_tolerance of the target")
    quantized = str(options.get("quantization") or "none").lower()
    if quantized not in _WHOLE:
        return Tolerance(_QUANTIZED, f"weights in {quantized}")
    if kind not in SAME_STACK:
        return Tolerance(_OTHER_ENGINE, "another engine")
    if dtype == "float32":
        return Tolerance(_FLOAT32, "the same libraries in float32")
    return Tolerance(_HALF, f"the same libraries in {dtype}")


def compare(references: References, readings: Sequence[ProbeResult], tolerance: float) -> Parity:
    """Whether a target reads and writes as the trainer's stack does."""
    expected = references.readings
    if not expected:
        return Parity(("there is not one reference to compare with",), 0, 0, None)
    asked = [[dict(message) for message in reading.messages] for reading in expected]
    if [[dict(message) for message in reading.messages] for reading in readings] != asked:
        problem = f"it was asked about {len(expected)} prompts and answered about {len(readings)}, or about others"
        return Parity((problem,), len(expected), 0, None)
    problems: list[str] = []
    found = [_Pair(ours, theirs, references, tolerance) for ours, theirs in zip(expected, readings, strict=True)]
    for number, pair in enumerate(found, start=1):
        difference = pair.problem()
        if difference is not None:
            problems.append(f"prompt {number} of {len(expected)}: {difference}")
    num_tokens = sum(pair.num_tokens for pair in found)
    if not problems and num_tokens == 0:
        problems.append(
            "not one token of the answers could be compared: at the first of each, two are about as likely; "
            "set a smaller parity_tolerance for the target"
        )
    largest = max((each for pair in found for each in pair.differences), default=None)
    return Parity(tuple(problems), len(expected), num_tokens, largest)


@dataclass
class _Pair:
    """One prompt in both stacks; `problem` compares them and counts what was compared."""

    ours: ProbeResult
    theirs: ProbeResult
    references: References
    tolerance: float
    num_tokens: int = 0
    differences: list[float] = field(default_factory=list)

    def problem(self) -> str | None:
        """The first that differs, or None."""
        return self._of_prompt() or (self._of_text() if self.theirs.answer_ids is None else self._of_tokens())

    def _of_prompt(self) -> str | None:
        ours, theirs = self.ours, self.theirs
        if ours.prompt_ids is not None and theirs.prompt_ids is not None:
            if ours.prompt_ids == theirs.prompt_ids:
                return None
            return self._prompt_difference(ours.prompt_ids, theirs.prompt_ids)
        same_text = ours.prompt_text is None or theirs.prompt_text in (None, ours.prompt_text)
        num = ours.num_prompt if ours.num_prompt is not None else len(ours.prompt_ids or ())
        if not same_text or (theirs.num_prompt is not None and theirs.num_prompt != num):
            return self._prompt_difference((), (), f"{num} tokens became {theirs.num_prompt or 'others'}")
        return None

    def _prompt_difference(self, ours: tuple[int, ...], theirs: tuple[int, ...], counted: str = "") -> str:
        """The diff of what the templates wrote; where that is the same, the tokens around the first difference."""
        before, after = self.ours.prompt_text, self.theirs.prompt_text
        if before is not None and after is not None and before != after:
            return f"the chat template writes another prompt\n{_diff(before, after)}"
        if not ours and not theirs:
            return f"the prompt is read as other tokens: {counted}; is a token missing that begins the sequence?"
        if theirs == ours[1:]:
            return f"the token that begins the sequence is missing: {self._named(ours[0])}"
        if theirs[1:] == ours and theirs[0] == ours[0]:
            return f"the token that begins the sequence, {self._named(ours[0])}, is there twice"
        place = _first_difference(ours, theirs)
        return (
            f"the tokenizer reads the same prompt as other tokens, from token {place + 1} on\n"
            f"- trained with: {self._around(ours, place)}\n+ served with:  {self._around(theirs, place)}"
        )

    def _of_tokens(self) -> str | None:
        ours, theirs = self.ours.answer_ids or (), self.theirs.answer_ids or ()
        for place in range(max(len(ours), len(theirs))):
            if place >= len(theirs) and place == len(ours) - 1 and self.ours.finish == self.theirs.finish == "stop":
                break  # some servers do not tell the token that ended the answer
            mine, other = (ids[place] if place < len(ids) else None for ids in (ours, theirs))
            if mine != other and not self._is_tie(place):
                return self._answer_difference(place, mine, other)
            if mine != other:  # about as likely here, so it must be about as likely there
                return self._likelihood(place, more=(self.ours.margins or ())[place])
            problem = self._likelihood(place)
            if problem is not None:
                return problem
            self.num_tokens += 1
        return self._of_end()

    def _of_text(self) -> str | None:
        """A server that tells no tokens: its text must be ours, as far as no tie comes first."""
        ours, theirs = self.ours, self.theirs
        starts = ours.starts or tuple(0 for _ in ours.answer_ids or ())
        tie = next((starts[place] for place in range(len(starts)) if self._is_tie(place)), None)
        # an answer cut within a character ends with a mark for it, or without
        mine, other = (reading.answer_text.rstrip("\N{REPLACEMENT CHARACTER}") for reading in (ours, theirs))
        if mine != other:
            if tie is None or _first_difference(mine, other) < tie:
                return f"another answer\n{_diff(mine, other)}"
            self.num_tokens += sum(1 for start in starts if start < tie)
            return None
        num = len(ours.log_probs or ())
        if theirs.log_probs is not None and len(theirs.log_probs) in (num, num - 1):
            for place in range(len(theirs.log_probs)):
                problem = self._likelihood(place)
                if problem is not None:
                    return problem
        self.num_tokens += len(starts)
        return self._of_end()

    def _of_end(self) -> str | None:
        ours, theirs = self.ours.finish, self.theirs.finish
        if ours == theirs:
            return None
        last = self._named((self.ours.answer_ids or (0,))[-1])
        if ours == "stop":
            return f"the answer ends with {last}, and the target does not end it there: its end of turn is another one"
        return "the target ends the answer where it goes on: its end of turn is another one"

    def _likelihood(self, place: int, more: float = 0.0) -> str | None:
        ours, theirs = self.ours.log_probs, self.theirs.log_probs
        if ours is None or theirs is None or place >= len(ours) or place >= len(theirs):
            return None
        difference = abs(ours[place] - theirs[place])
        if not difference <= self.tolerance + more:  # NaN is within nothing
            token = self._named((self.ours.answer_ids or (0,) * len(ours))[place])
            return (
                f"token {place + 1} of the answer, {token}, has log-probability {theirs[place]:.5f} instead of "
                f"{ours[place]:.5f}: {difference:.2g} apart, and {self.tolerance:.2g} is allowed; "
                "are these the same weights, with the same scale, in the same precision?"
            )
        self.differences.append(difference)
        return None

    def _is_tie(self, place: int) -> bool:
        margins = self.ours.margins
        return margins is not None and place < len(margins) and margins[place] <= 2 * self.tolerance

    def _answer_difference(self, place: int, mine: int | None, other: int | None) -> str:
        ours = "nothing more" if mine is None else self._named(mine)
        theirs = "nothing more" if other is None else self._named(other)
        margins = self.ours.margins
        by = f", which is likelier than any other by {margins[place]:.3g}" if margins and place < len(margins) else ""
        return (
            f"another answer: its token {place + 1} is {theirs} instead of {ours}{by}\n"
            f"- trained: {_cut(self.ours.answer_text)!r}\n+ served:  {_cut(self.theirs.answer_text)!r}"
        )

    def _named(self, token: int) -> str:
        text = self.references.tokens.get(token)
        return f"token {token}" if text is None else f"{text} ({token})"

    def _around(self, ids: tuple[int, ...], place: int) -> str:
        low, high = max(0, place - _SHOWN_TOKENS), place + _SHOWN_TOKENS + 1
        shown = [self._named(token) for token in ids[low:high]]
        return " ".join([*(["…"] if low else []), *(shown or ["nothing"]), *(["…"] if high < len(ids) else [])])


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    pairs = zip(ours, theirs, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def _diff(ours: str, theirs: str) -> str:
    """A unified diff around what differs, short enough to be read in a listing."""
    same = max(0, _first_difference(ours, theirs) - _SHOWN_TEXT // 2)
    lead = "…" if same else ""
    before, after = (f"{lead}{_cut(text[same:])}".splitlines() or [""] for text in (ours, theirs))
    lines = difflib.unified_diff(before, after, "trained with", "served with", lineterm="", n=1)
    return "\n".join(list(lines)[:_SHOWN_LINES])


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…"
