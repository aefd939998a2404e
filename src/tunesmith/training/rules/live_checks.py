"""Live checks: rules over an attempt's raw metrics. First version: numbers that can never become good again."""

from __future__ import annotations

import math

from tunesmith.programs.protocol import LiveCheckFailure, Metrics


def broken_numbers(metrics: Metrics) -> LiveCheckFailure | None:
    """A non-finite loss or gradient norm, or a step that trained no token."""
    for name in ("loss", "grad_norm"):
        value = metrics.values.get(name)
        if value is not None and not math.isfinite(value):
            return LiveCheckFailure("non_finite", f"{name} is {value} at step {metrics.step}")
    if metrics.values.get("tokens", 1.0) == 0.0:
        return LiveCheckFailure("no_trainable_tokens", f"step {metrics.step} trained no token")
    return None
