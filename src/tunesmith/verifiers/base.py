"""The contract of a verifier: a deterministic check of one interaction, with a score in 0..1 or a flag, and a reason.

A profile names its verifiers under `experience.verifiers`. A verifier has no state, reads no clock and no file, and
costs microseconds, because it checks every captured answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.core.section import Section


@dataclass(frozen=True)
class Interaction:
    """A conversation that ends with the model's answer, and the answer that was expected, where that is known."""

    messages: Sequence[Mapping[str, Any]]
    reference: str | None = None

    @property
    def answer(self) -> str:
        return str(self.messages[-1].get("content") or "") if self.messages else ""

    @property
    def question(self) -> str:
        """What the person said last."""
        said = [message for message in self.messages[:-1] if message["role"] == "user"]
        return str(said[-1].get("content") or "") if said else ""

    @property
    def instructions(self) -> str:
        """What the template around the question says."""
        return "\n".join(str(message.get("content") or "") for message in self.messages if message["role"] == "system")

    @property
    def prompt(self) -> str:
        """Everything that the model had read before it answered."""
        return "\n".join(str(message.get("content") or "") for message in self.messages[:-1])


@dataclass(frozen=True)
class Finding:
    """What a verifier says."""

    score: float | None
    """0 is worst, 1 is best; None: it does not apply to this interaction."""
    flagged: bool = False
    """Something is wrong, whatever the score."""
    reason: str = ""


@dataclass(frozen=True)
class Verifier:
    name: str
    says: str
    """What it looks at, in one line."""
    settings: type[Section]
    """Its settings in a profile; unknown keys are refused. `NoSettings` if there are none."""
    look: Callable[[Interaction, Any], Finding]
    """Called with the interaction and an instance of `settings`; the same input always gives the same finding."""
    monitors_only: bool = False
    """Its score is kept and shown, and never decides a class."""


class NoSettings(Section):
    """Nothing to set."""


UNFINISHED = "unfinished"
"""Found by capture, not by a verifier: the answer was cut short, or is empty. It is never gold, whoever likes it."""
