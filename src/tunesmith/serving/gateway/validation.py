"""JSON bodies as pydantic models: what a caller is told of a value that does not fit, in words of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tunesmith.core.errors import did_you_mean, quoted
from tunesmith.serving.gateway.api_errors import ApiError, invalid_parameter

_REFUSED = "refused"


class Told(NamedTuple):
    """What a caller is told of a value that does not fit, after its name; `{value}` is that value."""

    text: str
    of_type: str | None = None
    """Instead, where the type is wrong or the value is missing."""
    code: str = "invalid_value"


class Body(BaseModel):
    """A JSON body. Values are never converted: a number in quotes is not a number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    checked_first: ClassVar[tuple[str, ...]] = ()
    """Parameters whose errors come before those of others, in this order."""

    @classmethod
    def given(cls, said: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters that count."""
        return said

    @classmethod
    def unknown(cls, name: str, path: str) -> ApiError:
        """The error for a parameter that the route at `path` does not know."""
        message = f"unknown parameter {quoted(name)}{did_you_mean(name, cls.model_fields)}"
        return ApiError(400, message, code="unknown_parameter", param=name[:100])


B = TypeVar("B", bound=Body)


def validated(model: type[B], said: Mapping[str, Any], path: str) -> B:
    """The body of a request to the route at `path`; raises ApiError.

    Of several errors an unknown parameter comes before others, then the first in the model's order.
    """
    given, known = model.given(said), model.model_fields
    for name in given:
        if name not in known:  # before pydantic, which would list a million of them
            raise model.unknown(name, path)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _refusal(model, error.errors(include_url=False)) from None


def _refusal(model: type[Body], errors: Sequence[ErrorDetails]) -> ApiError:
    ranks = {name: rank for rank, name in enumerate(model.checked_first)}
    first = min(errors, key=lambda each: ranks.get(str(each["loc"][0]), len(ranks)))
    if first["type"] == _REFUSED:
        error: ApiError = first["ctx"]["error"]
        return error
    name = str(first["loc"][0])
    told = next(each for each in model.model_fields[name].metadata if isinstance(each, Told))
    is_type = first["type"] == "missing" or first["type"].endswith("_type")
    text = told.of_type if is_type and told.of_type is not None else told.text
    return invalid_parameter(name, text.replace("{value}", quoted(str(first["input"]))), told.code)


def refused(error: ApiError) -> PydanticCustomError:
    """For a validator that has more than one thing to tell."""
    return PydanticCustomError(_REFUSED, "refused", {"error": error})


Flag = Annotated[bool | None, Told("is {value}; it must be true or false")]


def _whole_number(value: Any) -> Any:
    """JSON has one kind of number: 2.0 is the whole number 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole(low: int, high: int) -> tuple[Any, ...]:
    """What makes an `int` one between two bounds."""
    told = Told(f"is {{value}}; it must be a whole number from {low} to {high}")
    return Field(ge=low, le=high), BeforeValidator(_whole_number), told


def number(low: float, high: float) -> tuple[Any, ...]:
    """What makes a `float` one between two bounds."""
    told = Told(f"is {{value}}; it must be a number from {low:g} to {high:g}")
    return Field(ge=low, le=high, allow_inf_nan=False), told
