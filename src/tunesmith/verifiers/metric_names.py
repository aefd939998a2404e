"""Names of the metrics that verifiers measure on generated answers: `verifier:NAME` and `verifier:NAME:sampled`."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "verifier:"
SAMPLED = ":sampled"


def metric_names(verifier: str) -> tuple[str, str]:
    """The metric over greedy answers, and the one over answers at `evaluation.temperature`."""
    return f"{PREFIX}{verifier}", f"{PREFIX}{verifier}{SAMPLED}"


def verifier_of(metric: str) -> str | None:
    """The verifier that a metric is about; None where no verifier measures it."""
    if not metric.startswith(PREFIX):
        return None
    return metric.removeprefix(PREFIX).removesuffix(SAMPLED)


def is_sampled(metric: str) -> bool:
    return metric.endswith(SAMPLED)


def verifiers_among(metrics: Iterable[str]) -> list[str]:
    """The verifiers that these metrics are about, each once."""
    found = (verifier_of(metric) for metric in metrics)
    return list(dict.fromkeys(name for name in found if name is not None))
