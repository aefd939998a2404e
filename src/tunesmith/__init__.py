"""tunesmith keeps a model that you own getting better from its own use, and never lets it get worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunesmith.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    """`from tunesmith import Client` without paying for it in programs that only need a part."""
    if name == "Client":
        from tunesmith.client import Client

        return Client
    raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")
