"""Every evaluator by name: ours, and what installed packages add under the entry-point group `tunesmith.evaluators`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tunesmith.core.errors import ConfigError, did_you_mean, quoted
from tunesmith.core.plugins import load_plugins
from tunesmith.evaluation.evaluators import command, exact_match, format_blind, heldout_loss, verified
from tunesmith.evaluation.evaluators.base import EvaluatorInfo, Metric
from tunesmith.profiles.sections.evaluation import EvaluationSettings
from tunesmith.verifiers.metric_names import verifier_of
from tunesmith.verifiers.registry import find_verifier

GROUP = "tunesmith.evaluators"
EVALUATORS: dict[str, EvaluatorInfo] = {
    evaluator.name: evaluator
    for evaluator in (heldout_loss.EVALUATOR, exact_match.EVALUATOR, format_blind.EVALUATOR, *verified.EVALUATORS)
}
"""Ours, by name; every verifier of ours is one."""


def find_metric(name: str, settings: EvaluationSettings | None = None) -> Metric:
    """The metric of that name; raises ConfigError with the nearest known one if no evaluator measures it.

    `settings` say what the profile's own program measures.
    """
    return next(metric for metric in evaluator_of(name, settings).metrics if metric.name == name)


def evaluator_of(metric: str, settings: EvaluationSettings | None = None) -> EvaluatorInfo:
    """The evaluator that measures this metric; raises ConfigError if there is none, or if there are two."""
    of_profile = [] if settings is None else _measuring(metric, [command.evaluator_of_command(settings)])
    found = (
        _measuring(metric, EVALUATORS.values())
        or _verifying(metric)
        or of_profile
        or _measuring(metric, _installed().values())
    )
    if metric == "perplexity":
        raise ConfigError(
            "evaluation.metrics: perplexity is e to the power of heldout_loss, so it would decide the same; "
            "name heldout_loss, and `run show` prints both"
        )
    if not found:
        known = [each.name for info in (*EVALUATORS.values(), *_installed().values()) for each in info.metrics]
        raise ConfigError(f"evaluation.metrics: no evaluator measures {quoted(metric)}{did_you_mean(metric, known)}")
    if len(found) > 1:
        both = " and ".join(sorted(quoted(info.name) for info in found))
        raise ConfigError(
            f"evaluation.metrics: the installed evaluators {both} both measure {quoted(metric)}; uninstall one of them"
        )
    return found[0]


def evaluators_of(
    metrics: Iterable[str], settings: EvaluationSettings | None = None
) -> list[tuple[EvaluatorInfo, tuple[str, ...]]]:
    """The evaluators to run with the metrics wanted of each: ours first, whatever the order of the metrics.

    What ours measure then does not depend on which others run after them.
    """
    wanted = {name: evaluator_of(name, settings) for name in metrics}
    order = [*EVALUATORS, *sorted({info.name for info in wanted.values()} - set(EVALUATORS))]
    chosen = {info.name: info for info in wanted.values()}
    return [
        (chosen[name], tuple(metric.name for metric in chosen[name].metrics if metric.name in wanted))
        for name in order
        if name in chosen
    ]


def _measuring(metric: str, evaluators: Iterable[EvaluatorInfo]) -> list[EvaluatorInfo]:
    return [info for info in evaluators if metric in {each.name for each in info.metrics}]


def _verifying(metric: str) -> list[EvaluatorInfo]:
    """The evaluator of an installed verifier."""
    name = verifier_of(metric)
    verifier = None if name is None else find_verifier(name)
    return [] if verifier is None else _measuring(metric, [verified.evaluator_of_verifier(verifier)])


@cache
def _installed() -> dict[str, EvaluatorInfo]:
    found = load_plugins(GROUP, EvaluatorInfo, "evaluator")
    for name in sorted(set(found) & {*EVALUATORS, command.NAME}):
        raise ConfigError(f"an installed package brings an evaluator {name!r}, which is one of ours; uninstall it")
    return found
