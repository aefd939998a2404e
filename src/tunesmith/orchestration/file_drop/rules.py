"""What is done next with a dropped request, and what its answer says. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, model_validator

from tunesmith.orchestration.file_drop.request import DropRequest, Unreadable
from tunesmith.runs.rules.run import RUN, RunState

TAKEN = "taken"
"""State of a request that tunesmith has, before its round is opened."""
REFUSED = "refused"
"""State of a request for which no round was opened."""
_UNNAMED = "unreadable"


class Score(BaseModel):
    """What the gate compared, on the same cases."""

    model_config = ConfigDict(frozen=True)

    metric: str
    before: float | None
    after: float | None
    gain: float | None
    """Positive if better."""


class Answer(BaseModel):
    """`result.json`: what has become of a request so far."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    v: int = 1
    id: str | None
    """Of the request; null: it could not be read."""
    state: str
    """taken, refused, or the state of its run."""
    is_final: bool
    reason: str
    code: str | None = None
    """Kind of the error, of a refused request."""
    campaign: str | None = None
    run: str | None = None
    dataset: str | None = None
    version: str | None = None
    """The adapter version that the run made."""
    score: Score | None = None
    taken_at: datetime
    opened_at: datetime | None = None
    moved_at: datetime | None = None
    ended_at: datetime | None = None
    answered_at: datetime | None = None
    """When the answer became final."""

    @model_validator(mode="after")
    def _final_at(self) -> Answer:
        # result.json lies where others can write
        if self.is_final != (self.answered_at is not None):
            raise ValueError("an answer is final from answered_at on")
        try:
            for at in (self.taken_at, self.answered_at):
                if at is not None:
                    at.astimezone(UTC)
        except OverflowError:
            raise ValueError("a time that no clock shows") from None
        return self

    @property
    def archive_name(self) -> str:
        """Of the folder that keeps request and answer; sorts by time."""
        assert self.answered_at is not None
        at = self.answered_at.astimezone(UTC)
        return f"{at:%Y%m%dT%H%M%S}.{at.microsecond // 1000:03d}Z-{self.id or _UNNAMED}"


@dataclass(frozen=True)
class RunProgress:
    """What the store knows of the run that a request has opened."""

    run_id: str
    digest: str | None
    """Of the request that opened it."""
    state: RunState
    reason: str
    campaign: str | None
    dataset: str
    version: str | None
    score: Score | None
    opened_at: datetime
    moved_at: datetime
    ended_at: datetime | None


class Step(StrEnum):
    IDLE = "idle"  # nothing is asked
    TAKE = "take"  # pending.json becomes working.json, and the earlier result.json goes away
    REFUSE = "refuse"  # it can never be opened: write the final answer
    OPEN = "open"  # no run yet: open its round, or be told why not
    REPORT = "report"  # write what the run has come to
    ARCHIVE = "archive"  # the final answer is written


@dataclass(frozen=True)
class Seen:
    """Everything that the next step depends on."""

    is_pending: bool = False
    taken: DropRequest | Unreadable | None = None
    """The request in working.json."""
    answer: Answer | None = None
    """In result.json; taking a request removes that of the one before."""
    run: RunProgress | None = None
    """Found by the key of the taken request."""


def next_step(seen: Seen) -> Step:
    """One request at a time: what is taken goes to its end before the next one is looked at."""
    taken = seen.taken
    if taken is None:
        return Step.TAKE if seen.is_pending else Step.IDLE
    if seen.answer is not None and seen.answer.is_final and seen.answer.id == id_of(taken):
        return Step.ARCHIVE
    if isinstance(taken, Unreadable) or (seen.run is not None and seen.run.digest != taken.digest):
        return Step.REFUSE
    return Step.OPEN if seen.run is None else Step.REPORT


def id_of(taken: DropRequest | Unreadable) -> str | None:
    return taken.request_id if isinstance(taken, Unreadable) else taken.id


def acknowledged(taken: DropRequest | Unreadable, taken_at: datetime) -> Answer:
    """The first answer."""
    return Answer(id=id_of(taken), state=TAKEN, is_final=False, reason="its round is being opened", taken_at=taken_at)


def refused(taken: DropRequest | Unreadable, code: str, reason: str, *, taken_at: datetime, now: datetime) -> Answer:
    """No round was opened, and none will be."""
    return Answer(
        id=id_of(taken), state=REFUSED, is_final=True, reason=reason, code=code, taken_at=taken_at, answered_at=now
    )


def why_never(seen: Seen) -> tuple[str, str]:
    """Code and reason of a request that Step.REFUSE is for."""
    taken, run = seen.taken, seen.run
    if isinstance(taken, Unreadable):
        return taken.code, f"pending.json cannot be used: {taken.message}"
    assert taken is not None
    assert run is not None
    return (
        "conflict",
        f"the id {taken.id} belongs to another request ({run.run_id}); give each request an id of its own",
    )


def report(taken: DropRequest, run: RunProgress, *, taken_at: datetime, now: datetime) -> Answer:
    """What the run has come to; final once it has ended."""
    is_final = run.state in RUN.finished
    return Answer(
        id=taken.id,
        state=run.state.value,
        is_final=is_final,
        reason=run.reason,
        campaign=run.campaign,
        run=run.run_id,
        dataset=run.dataset,
        version=run.version,
        score=run.score,
        taken_at=taken_at,
        opened_at=run.opened_at,
        moved_at=run.moved_at,
        ended_at=run.ended_at,
        answered_at=now if is_final else None,
    )
