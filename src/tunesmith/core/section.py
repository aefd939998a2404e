"""A section of settings: the base of profile, workspace settings and verifier settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

_LARGEST = 1e10  # seconds: three hundred years, and a date so far away can still be written
_LARGEST_WHOLE = 2**53  # beyond it, JSON readers round


class Section(BaseModel):
    """A frozen group of settings that refuses what it does not know, NaN, infinity and absurdly large numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Earlier names of this section's keys: `{earlier: current}`. Both are read, only the current one is documented
    and written; giving both is refused."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # Choices of a field, not a validator of the whole section: behind one of those, strict JSON reads no tuples.
        for name in set(cls.aliases.values()):
            earlier = [old for old, new in cls.aliases.items() if new == name]
            cls.model_fields[name].validation_alias = AliasChoices(name, *earlier)
        if cls.aliases:
            cls.model_rebuild(force=True)

    @field_validator("*", mode="after")
    @classmethod
    def _sane_number(cls, value: Any) -> Any:
        if isinstance(value, float):
            if abs(value) > _LARGEST:
                raise ValueError(f"{value:g} is out of range; must be a number ≤ {_LARGEST:g}")
            return value or 0.0  # -0.0 is the same setting as 0.0
        if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
            raise ValueError(f"{value:.4g} is out of range; must be a whole number ≤ {_LARGEST_WHOLE}")
        return value


Share = Annotated[float, Field(ge=0.0, le=1.0)]
