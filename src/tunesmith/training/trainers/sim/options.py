"""What a sim run can be told, in `trainer.options` of a profile."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from tunesmith.core.errors import ConfigError
from tunesmith.core.section import Section
from tunesmith.runs.rules.task import ErrorClass

Script = Literal[
    "finish",
    "fail",
    "raise",
    "nan_loss",
    "nan_weights",
    "spike",
    "stall",
    "chatter",
    "slow",
    "crash",
    "kill_self",
    "oom_exit",
    "fork",
    "ignore_term",
    "cling",
    "wrong_fingerprint",
    "missing_artifact",
    "exit0_no_result",
    "success_exit_1",
    "two_results",
    "stale_token",
    "garbage_events",
    "half_line",
    "huge_line",
    "step_backwards",
    "escape_path",
    "untrained",
    "no_tokens",
]


class SimOptions(Section):
    steps: int = Field(default=5, ge=1, le=1_000_000)
    """Steps to make."""
    step_s: float = Field(default=0.01, ge=0.0, le=3600.0)
    """How long a step takes; `slow` takes 20 times as long."""
    script: Script = "finish"
    """What goes wrong."""
    at_step: int | None = Field(default=None, ge=1)
    """Before which step it goes wrong; in the middle if unset."""
    fail_attempts: int | None = Field(default=None, ge=0)
    """Only the first so many attempts follow the script; later ones finish."""
    error_class: ErrorClass = ErrorClass.BUG
    """What `fail` fails with."""
    oom_once: bool = False
    """`oom_exit` succeeds once the micro-batches are smaller."""
    tokens_per_step: int = Field(default=100, ge=1)
    """Tokens counted per step."""
    quality: float = Field(default=0.5, ge=-1.0, le=1.0)
    """How good the sim evaluator shall find the adapter; the bare base has 0."""
    eval_script: Literal["crash", "chatter", "wait", "nan", "partial", "error", "wrong_digest"] | None = None
    """What goes wrong when the adapter is evaluated; `wait` waits in its first attempt until it is ended."""

    @property
    def strikes_at(self) -> int:
        return self.at_step if self.at_step is not None else self.steps // 2 + 1

    def in_attempt(self, number: int) -> SimOptions:
        """What this attempt shall do."""
        if self.fail_attempts is not None and number > self.fail_attempts:
            return self.model_copy(update={"script": "finish"})
        return self


def read_options(raw: dict[str, Any]) -> SimOptions:
    try:
        return SimOptions.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"trainer.options.{place}: {first['msg']} (trainer sim)") from None
