"""`pending.json`: its schema, and how the bytes that another program wrote become a request, or a reason against it."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tunesmith.core import strict_json
from tunesmith.core.errors import DataError, did_you_mean, quoted
from tunesmith.core.files import canonical_json, sha256_text

MAX_REQUEST = 1 << 16
_MAX_METADATA = 16
_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Line = Annotated[str, Field(min_length=1, max_length=200)]
Key = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,31}$")]


class DropRequest(BaseModel):
    """One request for a round."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    v: Literal[1]
    id: str = Field(pattern=_ID)
    """Names this request for ever: the same id with the same content again gets the same answer, and no second run."""
    campaign: Line | None = None
    """Name or id of a campaign."""
    profile: Line | None = None
    """Stands for the campaign of this profile whose overrides hold."""
    data: Line | None = None
    """A JSONL file inside the folder; null: what was captured, as in every other round."""
    data_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """If given, the data must have this hash: it was copied whole."""
    asked_by: Annotated[str, Field(min_length=1, max_length=100)] = "another program"
    """Who asks, in its own words; recorded, never believed."""
    metadata: dict[Key, Line] = Field(default_factory=dict)
    """Recorded with the run, e.g. a ticket's number."""

    @field_validator("v", mode="before")
    @classmethod
    def _a_number(cls, value: Any) -> Any:
        if type(value) is not int:  # true and 1.0 equal 1 in Python
            raise ValueError("must be the number 1")
        return value

    @field_validator("campaign", "profile", "data", "asked_by")
    @classmethod
    def _printable(cls, value: str | None) -> str | None:
        if value is not None and not (value.isprintable() and value.strip()):
            raise ValueError("must be printable, and more than blanks")
        return value

    @field_validator("metadata")
    @classmethod
    def _few_printable(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > _MAX_METADATA:
            raise ValueError(f"must have at most {_MAX_METADATA} entries")
        for text in value.values():
            cls._printable(text)
        return value

    @field_validator("data")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is None:
            return value
        parts = value.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError("must be a relative path inside the folder, without '..'")
        if PurePosixPath(value).suffix != ".jsonl":
            raise ValueError("must be a .jsonl file")
        return value

    @model_validator(mode="after")
    def _one_campaign(self) -> DropRequest:
        if self.campaign is not None and self.profile is not None:
            raise ValueError("names both a campaign and a profile; name one of them")
        if self.data_sha256 is not None and self.data is None:
            raise ValueError("data_sha256 without data")
        return self

    @property
    def digest(self) -> str:
        """Of the content: two requests with one id must have the same."""
        return sha256_text(canonical_json(self.model_dump(mode="json")))

    def idempotency_key(self, folder: Path) -> str:
        """Of the run that it opens; two folders may well take the same id."""
        return f"file-drop:{sha256_text(str(folder))[:16]}:{self.id}"


class Unreadable(DataError):
    """A request that cannot be one; `request_id` is its id if that much could be read."""

    def __init__(self, message: str, request_id: str | None = None, *, may_be_incomplete: bool = False) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.may_be_incomplete = may_be_incomplete
        """The file may be half-written by a program that does not rename it into place."""


def parse_request(data: bytes) -> DropRequest:
    """Strict: UTF-8, no NaN, no key twice, no unknown key. Raises Unreadable."""
    value = _object(data)
    said = value.get("id")
    request_id = said if isinstance(said, str) and re.fullmatch(_ID, said) else None
    for key in value:
        if key == "overrides":
            raise Unreadable("a request changes no settings; set them in the profile or the campaign", request_id)
        if key not in DropRequest.model_fields:
            raise Unreadable(f"unknown key {quoted(key)}{did_you_mean(key, DropRequest.model_fields)}", request_id)
    try:
        return DropRequest.model_validate(value)
    except ValidationError as error:
        raise Unreadable(_first(error), request_id) from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(data.decode(), _stands_twice, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise Unreadable("it is not UTF-8", may_be_incomplete=True) from None
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except _Wrong as error:
        raise Unreadable(str(error)) from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}", may_be_incomplete=True) from None
    if not isinstance(value, dict):
        raise Unreadable("it is not a JSON object")
    return value


class _Wrong(ValueError):
    """JSON that no later byte can mend."""


def _stands_twice(key: str) -> _Wrong:
    return _Wrong(f"the key {quoted(key)} stands there twice")


def _refuse_constant(name: str) -> Any:
    raise _Wrong(f"{name} is not JSON")


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    place = ".".join(map(str, detail["loc"]))
    said = detail["msg"].removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    if detail["type"] == "missing":
        return f"the key '{place}' is missing"
    return f"{place}: {said}" if place else said
