"""What a model card must admit: what was not measured, what is little, what nobody knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.lineage.rules.card import code, plain

FEW_CASES = 200
"""Fewer cases than this leave wide intervals: half of a share of 0.5 is about 7 points at 95 %."""
_SMALL_DATA = 200


def limits_of(facts: Mapping[str, Any]) -> list[str]:
    """One sentence or two for each limit; never empty."""
    return [
        *_of_measurement(facts["report"], facts["baseline"], facts["min_cases"]),
        *_of_the_verdict(facts["decision"], is_forced=facts["is_forced"]),
        *_of_data(facts),
        *_of_what_is_known(facts),
        "Not measured: safety, refusals, bias, facts that the data does not cover, other languages, and any input that "
        "does not look like the held-out cases.",
    ]


def _of_measurement(report: Mapping[str, Any] | None, baseline: str | None, min_cases: int | None) -> list[str]:
    if report is None:
        return ["Nothing was measured: nobody knows whether this version is better than what it was made from."]
    num = report["num_cases"]
    lines = []
    if num < FEW_CASES:
        wanted = "" if min_cases is None else f" (its gate asked for {min_cases})"
        lines.append(f"Few cases: {num} held-out cases{wanted}. Small differences cannot be seen.")
    lines.append(
        "The held-out cases come from the same sources as the training data. They show how well it does this task, not "
        "how it does others."
    )
    if baseline == "the bare base":
        lines.append("It was compared with the bare base only, not with another tuned version.")
    unclear = [each["metric"] for each in report["comparisons"] if _is_unclear(each)]
    if unclear:
        lines.append(f"No measurable difference in {', '.join(map(code, unclear))}: the interval includes 0.")
    worse = [each["metric"] for each in report["comparisons"] if each["high"] is not None and each["high"] < 0]
    if worse:
        lines.append(f"Measurably worse in {', '.join(map(code, worse))}.")
    broken = [each["metric"] for each in report["comparisons"] if each.get("problem")]
    if broken:
        lines.append(f"Without numbers: {', '.join(map(code, broken))}.")
    if report.get("established") is None:
        lines.append("Old skills were not measured on their own: there were no cases of earlier, proven datasets.")
    return lines


def _is_unclear(each: Mapping[str, Any]) -> bool:
    return each["low"] is not None and each["high"] is not None and each["low"] <= 0 <= each["high"]


def _of_the_verdict(decision: str | None, *, is_forced: bool) -> list[str]:
    lines = ["A person put it live past the gate."] if is_forced else []
    if decision == "reject":
        lines.append("The gate rejected it. Do not serve it without a reason of your own.")
    elif decision == "hold":
        lines.append("The gate held it: the evidence did not allow a decision.")
    return lines


def _of_data(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if facts["num_train"] < _SMALL_DATA:
        lines.append(f"Little data: {facts['num_train']} training examples.")
    members = facts["members"]
    if members is not None and members["answered_by"]:
        num = sum(members["answered_by"].values())
        lines.append(
            f"{num:,} of its {members['num']:,} experiences were answered by earlier versions of this model or its "
            "base; what they got wrong and nobody corrected may have been learnt."
        )
    if facts["forgotten_since"]:
        lines.append("It learnt from examples that were forgotten later; the weights may still hold traces of them.")
    if not facts["data_is_there"]:
        lines.append("Its dataset's report cannot be read any more.")
    return lines


def _of_what_is_known(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if not facts["has_licence"]:
        lines.append("The licence of the base is unknown to tunesmith, so the licence of this version is too.")
    if not facts["has_libraries"]:
        lines.append("The library versions of the training are unknown; only their fingerprint was kept.")
    if facts["dirty"] == "yes":
        lines.append("The workspace had uncommitted changes when the run was submitted.")
    elif facts["dirty"] not in (None, "no"):
        lines.append(f"Whether the workspace had uncommitted changes is {plain(facts['dirty'])}.")
    return lines
