"""Feedback: what raters say about one experience, whose last word counts, and what that is together.

Pure: what a rating is worth, which corrections stand, and which words read like a complaint.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VALUES = {"helpful": 1.0, "partial": 0.5, "irrelevant": 0.0, "up": 1.0, "down": 0.0}
"""What people say, and what it counts. A score from 0 to 1 may be said as it is."""
IMPLICIT_RATER = "implicit"
LABEL_RATER = "label"
RESERVED_RATERS = frozenset({IMPLICIT_RATER, LABEL_RATER})
"""Not people: the turn after an answer, and the label of an imported line."""
IMPLICIT_CONFIDENCE = 0.3


@dataclass(frozen=True)
class Rating:
    """One rater's rating, comment or correction of one experience."""

    rater: str
    value: float | None = None
    """0 is worst, 1 is best; None: a comment or a correction without a rating."""
    is_implicit: bool = False
    """Concluded from what happened next, not said by anybody about the answer."""
    confidence: float = 1.0
    comment: str | None = None
    correction: str | None = None
    """The answer that should have been given; never there where it is implicit."""
    key_label: str | None = None
    """The API key it came with, where it came over HTTP: then the rater is only a name below that key."""

    @property
    def voice(self) -> tuple[str, str]:
        """Who counts: the API key, whatever rater names it sends; without a key, the rater."""
        return ("rater", rater_key(self.rater)) if self.key_label is None else ("key", self.key_label)

    @property
    def speaker(self) -> tuple[str, str, str]:
        """Whose last word replaces an earlier one: a rater, below a key where there is one."""
        return (*self.voice, rater_key(self.rater))

    @property
    def said_by(self) -> str:
        """The rater as people are shown it: KEY_LABEL/RATER, or RATER."""
        return self.rater if self.key_label is None else f"{self.key_label}/{self.rater}"


@dataclass(frozen=True)
class Feedback:
    """All ratings of one experience, aggregated."""

    mean: float | None = None
    """Of what people said explicitly, the last word of each rater, each voice counted once; None without any."""
    num: int = 0
    """How many voices that is: API keys, and raters without a key."""
    num_corrections: int = 0
    num_complaints: int = 0
    """Implicit ones: a hint at low confidence, which never outweighs what somebody said."""


def value_of(said: str) -> float:
    """The value of a rating as people write it; raises ValueError."""
    word = said.strip().lower()
    if word in VALUES:
        return VALUES[word]
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"write {', '.join(VALUES)}, or a number from 0 to 1")
    return value


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
"""Characters that show nothing, beside those whose category says so."""


def rater_key(rater: str) -> str:
    """Whom a rater's name means: names that differ in case, width or what nobody sees are one rater."""
    folded = unicodedata.normalize("NFKC", _UNSEEN.sub("", rater)).casefold()
    seen = "".join(char for char in folded if char.isspace() or unicodedata.category(char) not in ("Cf", "Cc"))
    return unicodedata.normalize("NFKC", " ".join(_UNSEEN.sub("", seen).split()))


def standing_corrections(ratings: Iterable[Rating]) -> list[Rating]:
    """The corrections that hold, of all ratings of an experience (oldest first); the last one is to be learnt.

    A rater's correction holds until they give another, or rate without one: then it is withdrawn. A comment alone
    changes nothing.
    """
    last_ratings: dict[tuple[str, str, str], Rating] = {}
    for rating in ratings:
        has_one = rating.correction is not None
        if rating.is_implicit or not (has_one or rating.value is not None):
            continue
        last_ratings.pop(rating.speaker, None)  # also where it is said again: the last one said is the last one here
        if has_one:
            last_ratings[rating.speaker] = rating
    return list(last_ratings.values())


def aggregate(ratings: Sequence[Rating]) -> Feedback:
    """The feedback of an experience from all its ratings, oldest first.

    Of each rater only the last word counts. All raters of one API key are one voice, whose value is their mean: rater
    names sent over HTTP cost nothing, so they must not add up.
    """
    said = [rating for rating in ratings if not rating.is_implicit]
    last = {rating.speaker: (rating.voice, rating.value) for rating in said if rating.value is not None}
    voices: dict[tuple[str, str], list[float]] = {}
    for voice, value in last.values():
        voices.setdefault(voice, []).append(value)
    means = [math.fsum(values) / len(values) for values in voices.values()]
    complaints = {rating.voice for rating in ratings if rating.is_implicit}
    mean = math.fsum(means) / len(means) if means else None
    return Feedback(mean, len(means), len(standing_corrections(said)), len(complaints))


_COMPLAINT = re.compile(
    r"\b(?:that(?:['’]s| is| was)|this(?: is| was)|it(?:['’]s| is)|you(?:['’]re| are| were)) "
    r"(?:\w+ ){0,2}(?:wrong|incorrect|false|mistaken|useless|nonsense|rubbish|unhelpful)\b"
    r"|\b(?:not|isn['’]t|wasn['’]t) what i (?:\w+ )?(?:asked|wanted|meant|said|need)"
    r"|\b(?:you|that) (?:did(?:n['’]t| not)|do(?:n['’]t| not)|does(?:n['’]t| not)) "
    r"(?:\w+ )?(?:answer|understand|help|work|read|listen)\b"
    r"|\A\W*(?:no|nope|wrong|incorrect)\b[,.!:; ]+"
    r"(?:that|this|it|you|i (?:said|asked|meant|wanted)|the (?:answer|right))"
    r"|\A\W*(?:wrong|incorrect|nonsense|rubbish|try again|i (?:said|meant|asked (?:for|about)))\b"
    r"|\A\W*(?:das (?:ist|war) (?:\w+ )?(?:falsch|unsinn)|falsch\b)"
    r"|\A\W*(?:c['’]est (?:\w+ )?faux|non,? c['’]est)",
    re.IGNORECASE,
)
_COMPLAINT_CHARS = 400  # complaints come first and short; a long text that quotes one is something else


def complaint_in(text: str) -> str | None:
    """The words by which a turn reads like a complaint about, or a correction of, the answer before it."""
    found = _COMPLAINT.search(text[:_COMPLAINT_CHARS])
    return None if found is None else " ".join(found[0].split())
