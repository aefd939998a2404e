"""What an engine is started with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.core.section import Section


class EngineSpec(Section):
    """One base model, where it computes, and how much at once."""

    base: str
    """Folder of the base: tokenizer, template, settings, and its weights unless `weights` says where they are."""
    digest: str | None = None
    """Of the base; another content is refused."""
    weights: str | None = None
    """Folder of a fully tuned model's weights, which answers instead of the base."""
    weights_digest: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch: int = Field(default=32, ge=1)
    threads: int | None = Field(default=None, ge=1)
    """Threads of one computation; unset: as many as torch likes."""
