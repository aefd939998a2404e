"""The screens: checks of every row before it may be trained. Suspect rows are quarantined until a person decides."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from tunesmith.core.section import Section


class Screen(StrEnum):
    SECRET = "secret"  # noqa: S105 - the name of a screen
    EMAIL = "email"
    PERSONAL_NUMBER = "personal_number"
    IP_ADDRESS = "ip_address"
    CONTROL_TOKEN = "control_token"  # noqa: S105 - the name of a screen
    HIDDEN_TEXT = "hidden_text"
    INJECTION = "injection"
    BLOB = "blob"
    LINK = "link"
    NEAR_COPY = "near_copy"
    CONTRADICTION = "contradiction"
    EVALUATION_OVERLAP = "evaluation_overlap"
    RARE_TRIGGER = "rare_trigger"
    LENGTH_OUTLIER = "length_outlier"
    LANGUAGE_OUTLIER = "language_outlier"
    SOURCE_LIMIT = "source_limit"
    TEMPLATE_LIMIT = "template_limit"
    DETECTOR = "detector"


_OFF = (Screen.IP_ADDRESS, Screen.CONTRADICTION, Screen.LANGUAGE_OUTLIER, Screen.DETECTOR)
NOT_FOUND = (
    "the screens do not find names, postal addresses, birthdays or what people tell about their lives, "
    "and let known test card numbers pass; "
)
"""What a person must know who decides whether data may be trained on."""
DEFAULT_SCREENS = tuple(screen for screen in Screen if screen not in _OFF)
"""IP addresses are part of too many honest examples about networks; many a question has several good answers; and a
few rows of another language are what a product that is used abroad captures."""

ScreenChoice = tuple[Screen, ...] | Literal["default", "none"]


def blind_spots(detectors: tuple[str, ...]) -> str:
    """What is not searched for, and what to do about it."""
    if detectors:
        return f"beside the screens, {' and '.join(detectors)} looked for personal data; no search finds all of it"
    return NOT_FOUND + "a detector may (data.detectors, docs/screens.md)"


def chosen_screens(choice: ScreenChoice) -> tuple[Screen, ...]:
    """The screens that a setting means, in one order whatever order they were named in."""
    if choice == "default":
        return DEFAULT_SCREENS
    return () if choice == "none" else tuple(screen for screen in Screen if screen in choice)


class ScreenLimits(Section):
    """How much of a dataset may come from one source or template; rows above a limit are quarantined, not deleted."""

    max_per_source: int | None = Field(default=None, ge=1)
    """Most examples from one file; which ones is decided by the hash of their content."""
    max_source_share: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Most that one file may be of the whole; needs so many files that it can be met."""
    max_per_template: int | None = Field(default=None, ge=1)
    """Most examples whose questions begin with the same eight words, numbers not counted; the first ones stay."""
