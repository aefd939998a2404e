"""Typed options of a target: checked when it is made, so that a profile with a wrong one is refused before training."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationError

from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.section import Section
from tunesmith.profiles.rules.target_limits import option_problem

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
OptionsT = TypeVar("OptionsT", bound="TargetOptions")


def _a_url(text: str) -> str:
    """Scheme, host and port; a path such as /v1 is taken off, a name or password in it is refused."""
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError:
        raise ValueError("is no address such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is no address such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a name or password; put the key into a variable and name it in key_env")
    if parts.query or parts.fragment:
        raise ValueError("must not have a query or a fragment")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def _a_variable(text: str) -> str:
    if not _VARIABLE.match(text):
        raise ValueError("must be the name of an environment variable that holds the key, never the key itself")
    return text


def _a_text(text: str) -> str:
    if not text.strip() or "\x00" in text:
        raise ValueError("must not be empty")
    return text


Url = Annotated[str, AfterValidator(_a_url)]
Variable = Annotated[str, AfterValidator(_a_variable)]
Text = Annotated[str, AfterValidator(_a_text)]


class TargetOptions(Section):
    """What every kind that answers takes."""

    timeout_s: float = Field(default=60.0, gt=0.0, le=3600.0)
    """Longest time for one call."""
    quantization: Text | None = None
    """In what its server holds the base's weights, e.g. q4_1 or awq: parity allows for it. Unset: as trained."""


def read_options(model: type[OptionsT], kind: str, options: dict[str, Any]) -> OptionsT:
    """The options of that kind; raises ConfigError at the first that is unknown or wrong."""
    problem = option_problem(kind, options)
    if problem is not None:
        raise ConfigError(f"targets: {problem}")
    unknown = sorted(set(options) - set(model.model_fields))
    if unknown:
        hint = did_you_mean(unknown[0], model.model_fields)
        raise ConfigError(f"targets: kind {kind} has no option {quoted(unknown[0])}{hint}")
    try:
        return model.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"targets: kind {kind}: {place + ': ' if place else ''}{said}") from None
