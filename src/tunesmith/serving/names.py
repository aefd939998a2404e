"""Names of models in requests: a profile, one of its versions, or its base."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.core.errors import NotFound, quoted
from tunesmith.core.ids import is_name

BASE = "base"
"""`PROFILE@base` asks the profile's base model without any adapter."""
_MAX_DIGITS = 9


@dataclass(frozen=True)
class ModelName:
    """What a request asks for: a profile's live version, one exact version, or the bare base."""

    profile: str
    version: int | None = None
    is_base: bool = False

    @property
    def is_live(self) -> bool:
        return self.version is None and not self.is_base


def parse_model(text: str) -> ModelName:
    """`support` is what is live, `support@v7` exactly that, `support@base` the base model; raises NotFound."""
    profile, at, rest = text.partition("@")
    if is_name(profile):
        if not at:
            return ModelName(profile)
        if rest == BASE:
            return ModelName(profile, is_base=True)
        digits = rest.removeprefix("v")
        is_number = digits.isascii() and digits.isdecimal() and not digits.startswith("0")
        if rest.startswith("v") and is_number and len(digits) <= _MAX_DIGITS:
            return ModelName(profile, int(digits))
    raise NotFound(f"no model {quoted(text)}; ask for PROFILE, PROFILE@v7 or PROFILE@{BASE}")
