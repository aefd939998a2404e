"""Outliers: what the base finds far more surprising than the rest of a dataset is shown, or kept aside in a new one."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import Refused, UsageError
from tunesmith.core.files import read_manifest
from tunesmith.datasets.example import Example, Message, Split
from tunesmith.datasets.prepare import publish_dataset
from tunesmith.datasets.queries import Dataset
from tunesmith.datasets.report import DatasetReport
from tunesmith.datasets.screens.excerpts import escaped, safe_text
from tunesmith.evaluation.rules.outliers import FEWEST, THRESHOLD, Fit, Verdict, check_threshold, judge, too_few, why
from tunesmith.evaluation.score_examples import Scorer
from tunesmith.experience.queries import members
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.settings import WorkerSettings
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.spec import base_of
from tunesmith.store import events
from tunesmith.store.database import Database

Place = tuple[Split, int]
OnProgress = Callable[[int, int], None]
"""Called with how many examples are scored, and how many there are."""
_SHOWN = 20


@dataclass(frozen=True)
class Wish:
    threshold: float = THRESHOLD
    keep_aside: bool = False
    shown: int = _SHOWN
    """At most so many outliers are told with their texts."""
    on_progress: OnProgress = lambda done, total: None

    def check(self) -> None:
        check_threshold(self.threshold)
        if self.shown < 1:
            raise UsageError(f"limit is {self.shown}; show at least one outlier")


@dataclass(frozen=True)
class Outlier:
    """One example that the base finds far more surprising than the others. Every text in it is safe to show."""

    id: str
    split: str
    source: str
    line: int
    loss: float
    why: str
    question: str
    answer: str


@dataclass(frozen=True)
class OutlierReport:
    dataset_id: str
    fit: Fit
    reason: str
    threshold: float
    median: float | None
    spread: float | None
    limit: float | None
    """The highest mean loss per token that is no outlier."""
    num_scored: int
    num_unscored: int
    """Answers to avoid, and what does not fit into the base's context."""
    unscored_because: str | None
    """Of the first one that should have been scored."""
    num_outliers: int
    outliers: tuple[Outlier, ...]
    """The most surprising first."""
    made: Dataset | None = None
    """The dataset without them, where that was wished and there are some."""


@dataclass
class _Losses:
    """The losses of a dataset's examples, and where these are."""

    values: array[float]
    splits: array[int]
    numbers: array[int]
    num_unscored: int = 0
    problem: str | None = None

    def place(self, index: int) -> Place:
        return tuple(Split)[self.splits[index]], self.numbers[index]


def find_outliers(
    database: Database,
    workspace: Workspace,
    timing: WorkerSettings,
    checked: CheckedProfile,
    dataset: Dataset,
    wish: Wish,
    *,
    actor: str,
) -> OutlierReport:
    """Score every example under the profile's base and judge; the dataset itself stays as it is."""
    wish.check()
    folder = workspace.data_dir / dataset.path
    report = DatasetReport.model_validate(read_manifest(folder).meta)
    if wish.keep_aside:
        _refuse_assembled(database, dataset, report)
    total = sum(report.counts.values()) - sum(report.num_undesirable.values())
    if total < FEWEST:  # no model is needed to say so
        return _told(dataset, wish, too_few(total), _Losses(array("d"), array("B"), array("Q")), ())
    scorer = Scorer(
        workspace, timing, base_of(checked), checked.profile.evaluation, lambda done: wish.on_progress(done, total)
    )
    losses = _losses(folder, scorer)
    verdict = judge(losses.values, wish.threshold)
    reasons = {losses.place(index): why(losses.values[index], verdict, wish.threshold) for index in verdict.places}
    shown = _shown(folder, report, losses, verdict.places[: wish.shown], reasons)
    made = None
    if wish.keep_aside and reasons:
        made = _keep_aside(database, workspace, checked, dataset, reasons, wish, actor)
    return _told(dataset, wish, verdict, losses, shown, made)


def _refuse_assembled(database: Database, dataset: Dataset, report: DatasetReport) -> None:
    """A reservation, and what has to be erased when somebody is forgotten, go by the dataset that was assembled."""
    with database.read() as tx:
        is_assembled = report.mix is not None or bool(members.of_dataset(tx, dataset.id))
    if is_assembled:
        raise Refused(
            f"dataset {dataset.id} was assembled from experiences, which it reserves; reject the ones that are wrong "
            "with `tunesmith experience review` and assemble again, or prepare a dataset from files"
        )


def _losses(folder: Path, scorer: Scorer) -> _Losses:
    found = _Losses(array("d"), array("B"), array("Q"))
    places: deque[tuple[int, int]] = deque()  # asked for and not yet answered: one portion at most

    def conversations() -> Iterator[tuple[Message, ...]]:
        for split, number, example in _examples(folder):
            if not example.is_desirable:
                found.num_unscored += 1
                continue
            places.append((tuple(Split).index(split), number))
            yield example.messages

    for scored in scorer.score(conversations()):
        split, number = places.popleft()
        if scored.problem is not None:
            found.num_unscored += 1
            found.problem = found.problem or safe_text(scored.problem)
            continue
        found.values.append(scored.loss)
        found.splits.append(split)
        found.numbers.append(number)
    return found


def _examples(folder: Path) -> Iterator[tuple[Split, int, Example]]:
    from tunesmith.datasets.reading import iter_examples

    for split in Split:
        for number, example in enumerate(iter_examples(folder, split)):
            yield split, number, example


def _shown(
    folder: Path, report: DatasetReport, losses: _Losses, indices: tuple[int, ...], reasons: Mapping[Place, str]
) -> tuple[Outlier, ...]:
    """The texts of these examples, in the order of the indices."""
    wanted = {losses.place(index): index for index in indices}
    found: dict[int, Outlier] = {}
    for split, number, example in _examples(folder) if wanted else ():
        index = wanted.get((split, number))
        if index is None:
            continue
        asked = [message["content"] for message in example.messages if message["role"] == "user"]
        found[index] = Outlier(
            id=example.id,
            split=split.value,
            source=escaped(report.sources[example.source].name),
            line=example.line,
            loss=losses.values[index],
            why=reasons[(split, number)],
            question=safe_text(asked[-1] if asked else ""),
            answer=safe_text(example.messages[-1]["content"]),
        )
    return tuple(found[index] for index in indices)


def _keep_aside(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    dataset: Dataset,
    reasons: Mapping[Place, str],
    wish: Wish,
    actor: str,
) -> Dataset:
    from tunesmith.datasets.quarantine.outliers import keep_aside

    folder = workspace.data_dir / dataset.path
    made, _ = publish_dataset(
        database, workspace, checked, lambda final: keep_aside(folder, final, reasons, dataset.id), actor=actor
    )
    detail = {"made": made.id, "num": len(reasons), "threshold": wish.threshold}
    with database.write() as tx:
        events.record(tx, "dataset", dataset.id, "outliers_kept_aside", actor=actor, detail=detail)
    return made


def _told(
    dataset: Dataset,
    wish: Wish,
    verdict: Verdict,
    losses: _Losses,
    shown: tuple[Outlier, ...],
    made: Dataset | None = None,
) -> OutlierReport:
    return OutlierReport(
        dataset_id=dataset.id,
        fit=verdict.fit,
        reason=verdict.reason,
        threshold=wish.threshold,
        median=verdict.median,
        spread=verdict.spread,
        limit=verdict.limit,
        num_scored=len(losses.values),
        num_unscored=losses.num_unscored,
        unscored_because=losses.problem,
        num_outliers=len(verdict.places),
        outliers=shown,
        made=made,
    )
