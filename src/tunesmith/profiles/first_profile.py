"""The profile that `tunesmith init --base … --task …` writes: short, with a reason beside every line.

It holds what differs from the defaults and what a person will want to see first; `example.yaml.sample` has every key.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from tunesmith.profiles.profile import HardwareTier, Role
from tunesmith.profiles.rules.first_profile import Shares
from tunesmith.profiles.rules.lock import ArchitectureLock

_COMMENT_AT = 42
_WIDTH = 118
_UNITS = ((1e9, " billion"), (1e6, " million"), (1e3, " thousand"), (0, ""))


@dataclass(frozen=True)
class FirstProfile:
    """Everything that the file says."""

    task: str
    role: Role
    base_path: str
    """As it stands in the file: relative to the workspace if the base lies in it, else absolute."""
    revision: str | None
    """Of a base that was fetched."""
    architecture: ArchitectureLock
    num_parameters: int
    tier: HardwareTier
    device: str
    """How the tier was found, in words."""
    memory_gb: float | None
    """None: what the tier is known to have."""
    memory: str
    """The memory plan, in words."""
    max_length: int
    max_tokens: int
    shares: Shares
    num_new: int
    """New experiences that open a round."""
    min_new: int
    window: str
    time_zone: str
    target: str
    """Kind of the target."""

    @property
    def model(self) -> str:
        """The base in words."""
        unit, name = next(each for each in _UNITS if self.num_parameters >= each[0])
        size = f"{self.num_parameters / (unit or 1):.3g}{name}"
        return f"{self.architecture.architecture}, {size} parameters, with a chat template"

    def text(self) -> str:
        """The YAML file."""
        lock, shares = self.architecture, self.shares
        rows: list[tuple[str, str] | str] = [
            f"# Profile {self.task}, written by `tunesmith init`. Change what you like, then: "
            f"tunesmith profile check {self.task}",
            "# Every key there is: profiles/example.yaml.sample. What holds now, and who said it: "
            f"tunesmith config explain {self.task}",
            ("name: " + _scalar(self.task), "applications ask for this model"),
            ("role: " + _scalar(self.role.value), " | ".join(Role)),
            "",
            ("base:", "used where it lies, never copied; once used, changed files are refused"),
            f"  path: {_scalar(self.base_path)}",
            *([f"  revision: {_scalar(self.revision)}"] if self.revision is not None else []),
            (
                f"  family: {_scalar(lock.family)}",
                self.model,
            ),
            (f"  context: {lock.context}", "tokens, the model's own limit"),
            "",
            ("hardware:", self.device),
            (f"  tier: {_scalar(self.tier.value)}", " | ".join(HardwareTier)),
            *([(f"  memory_gb: {self.memory_gb:g}", "what the device has")] if self.memory_gb is not None else []),
            f"  # a run on the longest examples needs {self.memory}",
            f"  # again, with your data: tunesmith plan {self.task} examples.jsonl",
            "recipe:",
            (f"  max_length: {self.max_length}", "tokens; longer examples are dropped and counted, never cut"),
            "",
            *self._about_shares(),
            "data:",
            (f"  heldout_share: {shares.heldout:g}", "of prompts, never trained on; the gate judges by them"),
            (f"  validation_share: {shares.validation:g}", "of prompts, to choose the best checkpoint"),
            "gate:",
            (f"  min_cases: {shares.min_cases}", "held-out cases; with fewer, nothing goes live"),
            "experience:",
            (f"  mix: {{min_new: {self.min_new}}}", "new examples to train on; with fewer, no round is made"),
            "campaign:",
            (f"  window: {self.window}", "when a round may open; 00:00-24:00: always"),
            f"  time_zone: {_scalar(self.time_zone)}",
            "",
            "answers:",
            (f"  max_tokens: {self.max_tokens}", "of an answer whose request names no limit"),
            "targets:",
            *self._target(),
        ]  # fmt: skip
        return "\n".join(row if isinstance(row, str) else _row(*row) for row in rows) + "\n"

    def _about_shares(self) -> list[str]:
        cases = self.shares.expected_cases(self.num_new)
        return [
            f"# A round opens once {self.num_new} new answers can be learnt: about {cases} of them are held out, and "
            f"the gate wants {self.shares.min_cases}.",
            "# With thousands of prompts, heldout_share 0.1 and min_cases 50 are better. The first run that trains "
            "decides the",
            f"# shares for good; later, `tunesmith profile lock {self.task} --new-split` changes them for new prompts.",
        ]

    def _target(self) -> list[tuple[str, str] | str]:
        if self.target == "embedded":
            return [("  - {name: here, kind: embedded}", "`tunesmith serve`; it must run when a version goes live")]
        about = "a link to what is live: .tunesmith/live/" + self.task + "/current"
        return [("  - {name: directory, kind: directory}", about)]


def _row(text: str, comment: str) -> str:
    """A line of YAML and its comment, which goes above it where both are too long for one line."""
    beside = f"{text:<{_COMMENT_AT - 2}}  # {comment}"
    if len(beside) <= _WIDTH:
        return beside
    indent = text[: len(text) - len(text.lstrip())]
    return f"{indent}# {comment}\n{text}"


def _scalar(value: str) -> str:
    """A text as YAML reads it back, on one line."""
    if not value.isprintable() or _is_number(value):
        return yaml.safe_dump(value, width=100_000, default_style='"').removesuffix("\n")
    return yaml.safe_dump(value, width=100_000, allow_unicode=True).removesuffix("\n").removesuffix("\n...")


def _is_number(value: str) -> bool:
    """Whether some reader of YAML takes it for a number: 1e5 is one for ours, and not for the one that writes here."""
    try:
        float(value)
    except ValueError:
        return False
    return True
