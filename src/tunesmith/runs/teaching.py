"""What passes between a cycle and the program that answers for a local teacher: its spec, and one answer per prompt."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tunesmith.core.section import Section
from tunesmith.runs.spec import AttemptRef

MAX_TEXT = 200_001
"""Characters of an answer that are handed on: one more than a correction may have, so that it is seen."""


class TeachSpec(Section):
    """spec.json of a local teacher."""

    v: Literal[1] = 1
    kind: Literal["teach"] = "teach"
    attempt: AttemptRef
    model_path: str
    """Absolute folder of the teacher."""
    prompts_path: str
    """JSONL, one prompt per line: {"id", "messages"}; removed by the program as soon as it has read it."""
    num_prompts: int
    context: int
    """Tokens of prompt and answer together that the model can take."""
    max_tokens: int
    temperature: float
    """0 is greedy."""
    timeout_s: float
    """Seconds that one answer may take."""
    seed: int


class Taught(BaseModel):
    """A line of answers.jsonl: an answer and how it ended, or an error; never neither."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    text: str | None = Field(default=None, max_length=MAX_TEXT)
    finish: Literal["stop", "length"] | None = None
    num_in: int = Field(default=0, ge=0)
    error: str | None = Field(default=None, min_length=1, max_length=2000)

    @model_validator(mode="after")
    def _one_of_two(self) -> Taught:
        if (self.text is None) != (self.finish is None) or (self.text is None) == (self.error is None):
            raise ValueError("must hold an answer with its end, or an error")
        return self
