"""What the demo's evaluation says, task by task: the old one and the new one, strict and format-blind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tunesmith.client import Client
from tunesmith.client.views import RunDetail
from tunesmith.core.errors import DataError
from tunesmith.core.files import json_lines
from tunesmith.evaluation.rules.comparison import paired_interval
from tunesmith.programs.protocol import CaseScore, Scores


@dataclass(frozen=True)
class TaskScore:
    """One score of one task, before and after, with the interval of the gain."""

    task: str
    n: int
    name: str
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True)
class ExampleAnswer:
    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class DemoScores:
    scores: tuple[TaskScore, ...]
    examples: tuple[ExampleAnswer, ...]


@dataclass(frozen=True)
class _Case:
    prompt: str
    expected: str
    before: CaseScore
    after: CaseScore

    @property
    def task(self) -> str:
        return "new" if re.search(r"\d", self.prompt) else "old"


def read_outcome(client: Client, detail: RunDetail) -> DemoScores:
    """Read the evaluation's own files; nothing is measured a second time."""
    if detail.evaluation is None:
        raise DataError(f"run {detail.run.id} was not evaluated: {detail.run.reason}")
    scores_file = client.workspace.data_dir / detail.evaluation.scores_path
    scores = Scores.model_validate_json(scores_file.read_bytes()).by_subject
    lines = json_lines((scores_file.parent / "cases.jsonl").read_bytes())
    cases = [
        _Case(case["messages"][-2]["content"], case["messages"][-1]["content"], before, after)
        for case, before, after in zip(lines, scores["baseline"], scores["candidate"], strict=True)
    ]
    tasks = sorted({case.task for case in cases})
    table = tuple(_score(task, name, measure, cases) for task in tasks for name, measure in _MEASURES)
    new = [case for case in cases if case.task == tasks[0]][:3]
    examples = [
        ExampleAnswer(c.prompt, c.before.answers["exact_match_greedy"], c.after.answers["exact_match_greedy"])
        for c in new
    ]
    return DemoScores(table, tuple(examples))


def _score(task: str, name: str, measure: Callable[[_Case, CaseScore], float], cases: list[_Case]) -> TaskScore:
    mine = [case for case in cases if case.task == task]
    before = [measure(case, case.before) for case in mine]
    after = [measure(case, case.after) for case in mine]
    gains = [late - early for early, late in zip(before, after, strict=True)]
    low, high = paired_interval(gains, 0.95, seed=1)
    return TaskScore(task, len(mine), name, sum(before) / len(mine), sum(after) / len(mine), low, high)


def _same_numbers(case: _Case, score: CaseScore) -> float:
    """Right year, month and day in that order, whatever stands around them: a score that is blind to format."""
    return float(_numbers(score.answers["exact_match_greedy"]) == _numbers(case.expected))


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d{1,9}", text)]


_MEASURES: tuple[tuple[str, Callable[[_Case, CaseScore], float]], ...] = (
    ("exact, greedy", lambda case, score: score.values["exact_match_greedy"]),
    ("exact, sampled", lambda case, score: score.values["exact_match_sampled"]),
    ("right in any format", _same_numbers),
)
