"""Loss outliers: lists examples with a far higher loss under the base, or quarantines them in a new dataset."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import Refused, UsageError
from tunesmith.core.files import read_manifest
from tunesmith.datasets.example import Example, Message, Split
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.prepare import publish_dataset
from tunesmith.datasets.report import DatasetReport
from tunesmith.datasets.screens.excerpts import escaped, safe_text
from tunesmith.evaluation.rules.outliers import (
    MIN_EXAMPLES,
    THRESHOLD,
    Fit,
    OutlierResult,
    check_threshold,
    find_loss_outliers,
    too_few,
    why,
)
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
_MAX_SHOWN = 20


@dataclass(frozen=True)
class OutlierOptions:
    """How to search, and what to do with the outliers found."""

    threshold: float = THRESHOLD
    quarantine: bool = False
    max_shown: int = _MAX_SHOWN
    """The most outliers that are returned with their texts."""
    on_progress: OnProgress = lambda done, total: None

    def check(self) -> None:
        check_threshold(self.threshold)
        if self.max_shown < 1:
            raise UsageError(f"limit is {self.max_shown}; show at least one outlier")


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
    """The dataset in which they are quarantined, if that was requested and there are some."""


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
    options: OutlierOptions,
    *,
    actor: str,
) -> OutlierReport:
    """Score every example under the profile's base and find the outliers; the dataset itself is not changed."""
    options.check()
    folder = workspace.data_dir / dataset.path
    report = DatasetReport.model_validate(read_manifest(folder).meta)
    if options.quarantine:
        _refuse_assembled(database, dataset, report)
    total = sum(report.counts.values()) - sum(report.num_undesirable.values())
    if total < MIN_EXAMPLES:  # no model is needed to say so
        return _told(dataset, options, too_few(total), _Losses(array("d"), array("B"), array("Q")), ())
    scorer = Scorer(
        workspace, timing, base_of(checked), checked.profile.evaluation, lambda done: options.on_progress(done, total)
    )
    losses = _losses(folder, scorer)
    result = find_loss_outliers(losses.values, options.threshold)
    reasons = {losses.place(index): why(losses.values[index], result, options.threshold) for index in result.indices}
    shown = _shown(folder, report, losses, result.indices[: options.max_shown], reasons)
    made = None
    if options.quarantine and reasons:
        made = _quarantine(database, workspace, checked, dataset, reasons, options, actor)
    return _told(dataset, options, result, losses, shown, made)


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


def _quarantine(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    dataset: Dataset,
    reasons: Mapping[Place, str],
    options: OutlierOptions,
    actor: str,
) -> Dataset:
    from tunesmith.datasets.quarantine.outliers import quarantine_examples

    folder = workspace.data_dir / dataset.path
    made, _ = publish_dataset(
        database, workspace, checked, lambda final: quarantine_examples(folder, final, reasons, dataset.id), actor=actor
    )
    detail = {"made": made.id, "num": len(reasons), "threshold": options.threshold}
    with database.write() as tx:
        events.record(tx, "dataset", dataset.id, "outliers_kept_aside", actor=actor, detail=detail)
    return made


def _told(
    dataset: Dataset,
    options: OutlierOptions,
    result: OutlierResult,
    losses: _Losses,
    shown: tuple[Outlier, ...],
    made: Dataset | None = None,
) -> OutlierReport:
    return OutlierReport(
        dataset_id=dataset.id,
        fit=result.fit,
        reason=result.reason,
        threshold=options.threshold,
        median=result.median,
        spread=result.spread,
        limit=result.limit,
        num_scored=len(losses.values),
        num_unscored=losses.num_unscored,
        unscored_because=losses.problem,
        num_outliers=len(result.indices),
        outliers=shown,
        made=made,
    )
