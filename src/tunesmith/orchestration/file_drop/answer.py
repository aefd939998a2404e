"""Answer the requests of a drop folder, one at a time, each step in an order that survives a kill between any two.

pending.json → working.json → a run, found again by its idempotency key → result.json → archive/.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import assert_never

from pydantic import ValidationError

from tunesmith.core.clock import boot_seconds, utc_now
from tunesmith.core.errors import DataError, NotFound, Refused, StoreError, TunesmithError, quoted
from tunesmith.core.files import sha256_text
from tunesmith.core.staging import staging_for
from tunesmith.evaluation import queries as evaluations
from tunesmith.models import queries as adapters
from tunesmith.orchestration.file_drop import rules
from tunesmith.orchestration.file_drop.folder import PENDING, RESULT, WORKING, DropFolder, open_folder
from tunesmith.orchestration.file_drop.request import MAX_REQUEST, DropRequest, Unreadable, parse_request
from tunesmith.orchestration.file_drop.rules import Answer, RunProgress, Score, Seen, Step, next_step
from tunesmith.orchestration.rounds.open import open_asked
from tunesmith.orchestration.submit import Submission
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.queries import Campaign
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.runs import Run
from tunesmith.store.database import Database, Tx

_DIGEST = "file_drop_digest"
"""Metadata of the run: the content of the request that opened it."""
_SETTLED_S = 1.0
"""A file that is not JSON counts as half-written until it has stayed the same for so long."""
_MOST_SETTLED_S = 10.0
_MAX_ANSWER = 1 << 20
Tell = Callable[[Answer], None]


@dataclass(frozen=True)
class DropSettings:
    """What the owner of the workspace lets a folder ask for."""

    folder: Path
    campaign: str | None = None
    """The only campaign that may be asked for, and the one that is meant where a request names none."""
    allow_users: Sequence[int] = ()
    keep: int = 100
    """How many archived requests stay."""


class FileDrop:
    def __init__(
        self,
        database: Database,
        workspace: Workspace,
        settings: DropSettings,
        *,
        actor: str,
        environ: Mapping[str, str] | None = None,
        tell: Tell = lambda answer: None,
    ) -> None:
        self.database = database
        self.workspace = workspace
        self.settings = settings
        self.actor = actor
        self.environ = environ
        self.tell = tell
        """Called with each answer that is written."""

    def work(self, *, once: bool, poll_s: float) -> bool:
        """Answer until nothing is asked; with `once`, until the request under way has to be waited for.

        False: another process works on this folder; only with `once`, as otherwise its end is waited for.
        """
        with self._alone(None if once else poll_s) as is_alone:
            if not is_alone:
                return False
            while True:
                step, answer = self.step()
                is_waiting = step is Step.REPORT and not (answer is not None and answer.is_final)
                if step is Step.IDLE or (once and is_waiting):
                    return True
                if is_waiting:
                    time.sleep(poll_s)

    def step(self) -> tuple[Step, Answer | None]:
        """Do what comes next; and the answer that it wrote or kept. The caller is alone."""
        place = self.settings.folder
        try:
            with open_folder(place, self.settings.allow_users) as folder:
                seen = self._look(folder)
                step = next_step(seen)
                return step, self._do(step, folder, seen)
        except OSError as error:
            if not isinstance(error.filename, str):
                raise
            # names below the folder are relative to it
            raise OSError(error.errno, error.strerror, str(place / error.filename)) from error

    def _do(self, step: Step, folder: DropFolder, seen: Seen) -> Answer | None:
        match step:
            case Step.IDLE:
                return None
            case Step.TAKE:
                folder.remove(RESULT)  # archived with its request; what is there from now on is about this one
                folder.take()
                return None
            case Step.ARCHIVE:
                assert seen.answer is not None
                folder.archive(seen.answer.archive_name, _text(seen.answer), self.settings.keep)
                return seen.answer
            case Step.REFUSE:
                return self._refuse(folder, seen, *rules.why_never(seen))
            case Step.OPEN:
                return self._open(folder, seen)
            case Step.REPORT:
                return self._report(folder, seen)
            case _:
                assert_never(step)

    def _look(self, folder: DropFolder) -> Seen:
        if not folder.has(WORKING):
            return Seen(is_pending=folder.has(PENDING))
        taken = _taken(folder)
        run = None if isinstance(taken, Unreadable) else self._run_of(taken)
        return Seen(folder.has(PENDING), taken, _answer(folder), run)

    def _open(self, folder: DropFolder, seen: Seen) -> Answer | None:
        """The answer, if no round was opened. Otherwise the next step finds the run and tells of it."""
        taken = seen.taken
        assert isinstance(taken, DropRequest)
        if seen.answer is None:
            self._write(folder, seen, rules.acknowledged(taken, utc_now()))
        try:
            self._open_round(folder, taken)
        except StoreError:
            raise  # says nothing about the request: it is asked again later
        except TunesmithError as error:
            if self._run_of(taken) is None:  # else another process has opened it a moment ago
                return self._refuse(folder, seen, error.code, error.message)
        return None

    def _open_round(self, folder: DropFolder, request: DropRequest) -> None:
        campaign = self._campaign_of(request)
        asked_by = f"{request.asked_by}, through the file drop, request {request.id}"
        metadata = {_DIGEST: request.digest, "asked_by": request.asked_by}
        metadata |= {f"asked.{key}": value for key, value in request.metadata.items()}
        with staging_for(self.workspace.data_dir / "file_drop" / "data") as staged:
            data = None if request.data is None else [_copied(folder, request, staged)]
            open_asked(
                self.database,
                self.workspace,
                campaign,
                actor=self.actor,
                environ=self.environ,
                asked_by=asked_by,
                wish=Submission(campaign.profile, data, idempotency_key=self._key(request), metadata=metadata),
            )

    def _campaign_of(self, request: DropRequest) -> Campaign:
        only = self.settings.campaign
        with self.database.read() as tx:
            allowed = None if only is None else campaigns.find(tx, only)
            wanted = _wanted(tx, request) or allowed
        if wanted is None:
            raise DataError("the request names neither a campaign nor a profile")
        if allowed is not None and wanted.id != allowed.id:
            raise Refused(f"campaign {wanted.name} may not be asked for through this folder; only {allowed.name} may")
        return wanted

    def _refuse(self, folder: DropFolder, seen: Seen, code: str, reason: str) -> Answer:
        assert seen.taken is not None
        now = utc_now()
        return self._write(folder, seen, rules.refused(seen.taken, code, reason, taken_at=_since(seen), now=now))

    def _report(self, folder: DropFolder, seen: Seen) -> Answer:
        assert isinstance(seen.taken, DropRequest)
        assert seen.run is not None
        answer = rules.report(seen.taken, seen.run, taken_at=_since(seen), now=utc_now())
        return self._write(folder, seen, answer)

    def _write(self, folder: DropFolder, seen: Seen, answer: Answer) -> Answer:
        if answer != seen.answer:
            folder.write(RESULT, _text(answer))
            self.tell(answer)
        return answer

    def _run_of(self, request: DropRequest) -> RunProgress | None:
        with self.database.read() as tx:
            run = runs.with_key(tx, self._key(request))
            return None if run is None else _progress(tx, run)

    def _key(self, request: DropRequest) -> str:
        return request.idempotency_key(self.settings.folder)

    @contextmanager
    def _alone(self, poll_s: float | None) -> Iterator[bool]:
        """Hold the lock of the folder, which a killed process gives back; without `poll_s`, False if it is taken."""
        name = sha256_text(str(self.settings.folder))[:16]
        place = self.workspace.data_dir / "file_drop"
        place.mkdir(parents=True, exist_ok=True)
        handle = os.open(place / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _locked(handle, poll_s)
        finally:
            os.close(handle)


def _locked(handle: int, poll_s: float | None) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if poll_s is None:
                return False
            time.sleep(poll_s)
        else:
            return True


def _wanted(tx: Tx, request: DropRequest) -> Campaign | None:
    if request.campaign is not None:
        return campaigns.find(tx, request.campaign)
    if request.profile is None:
        return None
    found = campaigns.in_force(tx, request.profile)
    if found is None:
        hint = "`tunesmith campaign list` shows all; `tunesmith campaign create` starts one"
        raise NotFound(f"no campaign of profile {quoted(request.profile)} is active; {hint}")
    return found


def _taken(folder: DropFolder) -> DropRequest | Unreadable:
    """What working.json holds. A program that does not rename its file into place gets the time to finish it."""
    last, since = b"", boot_seconds()
    end = since + _MOST_SETTLED_S
    while True:
        try:
            data = folder.read(WORKING, MAX_REQUEST)
            return parse_request(data)
        except Unreadable as error:
            if data != last:
                last, since = data, boot_seconds()
            if not error.may_be_incomplete or boot_seconds() >= min(since + _SETTLED_S, end):
                return error
            time.sleep(_SETTLED_S / 20)
        except DataError as error:
            return Unreadable(error.message)


def _answer(folder: DropFolder) -> Answer | None:
    """What result.json holds, if we wrote it."""
    try:
        return Answer.model_validate_json(folder.read(RESULT, _MAX_ANSWER))
    except (DataError, ValidationError):
        return None


def _copied(folder: DropFolder, request: DropRequest, staged: Path) -> Path:
    """The data as it is now, in a folder of ours: what is checked is what is trained on."""
    assert request.data is not None
    target = staged / "data.jsonl"
    try:
        found = folder.copy_data(request.data, target)
    except DataError as error:
        raise DataError(f"data {quoted(request.data, 200)}: {error.message}") from None
    if request.data_sha256 not in (None, found):
        raise DataError(f"data {quoted(request.data, 200)} has the SHA-256 {found}, and not the one of data_sha256")
    return target


def _progress(tx: Tx, run: Run) -> RunProgress:
    adapter, campaign_id = adapters.of_run(tx, run.id), run.campaign_id
    return RunProgress(
        run_id=run.id,
        digest=run.spec.metadata.get(_DIGEST),
        state=run.state,
        reason=run.reason,
        campaign=None if campaign_id is None else campaigns.get(tx, campaign_id).name,
        dataset=run.dataset_id,
        version=None if adapter is None else adapter.name,
        score=_score(tx, run),
        opened_at=run.created_at,
        moved_at=run.moved_at,
        ended_at=run.finished_at,
    )


def _score(tx: Tx, run: Run) -> Score | None:
    found = evaluations.latest(tx, run.id)
    primary = None if found is None else found.judged.report.of(run.spec.gate.primary)
    if primary is None:
        return None
    metric = run.spec.gate.primary
    return Score(metric=metric, before=primary.baseline, after=primary.candidate, gain=primary.difference)


def _since(seen: Seen) -> datetime:
    return utc_now() if seen.answer is None else seen.answer.taken_at


def _text(answer: Answer) -> str:
    return answer.model_dump_json(indent=2) + "\n"
