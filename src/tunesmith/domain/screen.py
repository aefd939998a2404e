"""The screens: what is looked for in every row before it may be trained. A suspect is kept aside for a person."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


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


DEFAULT_SCREENS = tuple(screen for screen in Screen if screen not in (Screen.IP_ADDRESS, Screen.CONTRADICTION))
"""IP addresses are part of too many honest examples about networks; and many a question has several good answers."""

ScreenChoice = tuple[Screen, ...] | Literal["default", "none"]


def chosen_screens(choice: ScreenChoice) -> tuple[Screen, ...]:
    """The screens that a setting means, in one order whatever order they were named in."""
    if choice == "default":
        return DEFAULT_SCREENS
    return () if choice == "none" else tuple(screen for screen in Screen if screen in choice)
