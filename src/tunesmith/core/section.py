"""A section of settings: the base of profile, workspace settings and verifier settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

_LARGEST = 1e10  # seconds: three hundred years, and a date so far away can still be written
_LARGEST_WHOLE = 2**53  # beyond it, JSON readers round


class Section(BaseModel):
    """A frozen group of settings that refuses what it does not know, NaN, infinity and absurdly large numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


def doc_of(section: type[Section], field: str) -> str:
    """What the text below a field says it is for."""
    return next((docs[field] for owner in section.__mro__ if field in (docs := _docs(owner))), "")


@cache
def _docs(owner: type) -> dict[str, str]:
    """Read from the source when it is asked for: done for every class as it is made, it was half of all imports."""
    if not issubclass(owner, Section):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in pairwise(tree.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(below.value.value))
    return found
