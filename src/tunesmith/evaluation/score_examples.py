"""Score examples under a bare base, in a program of its own that no worker is needed for; what it took is removed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ProgramError
from tunesmith.core.files import sha256_file
from tunesmith.core.ids import new_id, new_token
from tunesmith.datasets.example import Message
from tunesmith.evaluation.evaluate import EVALUATOR_PROGRAM
from tunesmith.profiles.sections.evaluation import EvaluationSettings
from tunesmith.profiles.settings import WorkerSettings
from tunesmith.profiles.workspace import Workspace
from tunesmith.programs.launch import RunningProgram, launch
from tunesmith.programs.progress import Advance
from tunesmith.programs.protocol import CaseScore, Event, Progress
from tunesmith.programs.result_check import check_evaluate_result, read_scores
from tunesmith.programs.supervise import follow
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import AttemptRef, BaseModelRef, CasesRef, EvaluateSpec, Subject

OnScored = Callable[[int], None]
_LOSS = "heldout_loss"
_NOT_FINITE = f"{_LOSS} is "
_LEASE_S = 600.0  # long: the shim notices that we died by itself, and a terminal may be stopped for a while
_KEEPALIVE_S = 5.0
_PORTION_ROWS = 20_000
_PORTION_BYTES = 64 << 20


@dataclass(frozen=True)
class Scored:
    """The mean loss per trained token of one example, or why there is none."""

    loss: float
    problem: str | None = None


@dataclass(frozen=True)
class Scorer:
    workspace: Workspace
    timing: WorkerSettings
    base: BaseModelRef
    evaluation: EvaluationSettings
    on_scored: OnScored
    """Hears how many are done."""

    def score(self, conversations: Iterator[Sequence[Message]]) -> Iterator[Scored]:
        """In the order given. Portion by portion, so that memory does not grow with their number."""
        from tunesmith.core.staging import staging_for

        done = 0
        for portion in _portions(conversations):
            # beside the datasets: whatever is left of a killed process is removed there with the next one
            with staging_for(self.workspace.datasets_dir / "scoring") as folder:
                scores = self._scores(folder, portion, done)
            done += len(portion)
            yield from map(scored, scores)

    def _scores(self, folder: Path, lines: Sequence[str], before: int) -> Sequence[CaseScore]:
        cases = folder / "cases.jsonl"
        cases.write_text("".join(lines), encoding="utf-8")
        spec = EvaluateSpec(
            attempt=AttemptRef(
                task_id=new_id("task"), attempt_id=new_id("att"), number=1, token=new_token(), lease_s=_LEASE_S
            ),
            run_id="scoring",
            base=self.base,
            subjects=(Subject(label="baseline", adapter=None),),
            cases=CasesRef(path=str(cases), digest=sha256_file(cases), num=len(lines), answers="trained"),
            evaluation=self.evaluation.model_copy(update={"metrics": (_LOSS,)}),
            seed=0,
        )
        program = launch(
            EVALUATOR_PROGRAM, spec, folder, env=child_environment(os.environ, self.timing.pass_environment)
        )
        try:
            code = self._watched(program, before)
        finally:
            program.kill_tree(0.0)
        checked = check_evaluate_result(spec, folder, code)
        if checked.outcome is not AttemptState.SUCCEEDED or checked.result is None:
            raise ProgramError(_told(checked.error_class, checked.error or "it ended early"))
        return read_scores(folder, checked.result).by_subject["baseline"]

    def _watched(self, program: RunningProgram, before: int) -> int:
        """Until it has ended: pass its progress on, keep it alive, give up when it hangs. Its exit code."""
        advance, kept = Advance(), time.monotonic()

        def take(event: Event) -> None:
            advance.takes(event)
            if isinstance(event, Progress):
                self.on_scored(before + event.done)

        def look() -> None:
            nonlocal kept
            if advance.idle_s > self.timing.phase_deadlines_s[advance.phase]:
                told = f"no progress for {advance.idle_s:.0f} s in phase {advance.phase}"
                raise ProgramError(_told(ErrorClass.STALLED, told))
            if time.monotonic() - kept > _KEEPALIVE_S:
                kept = time.monotonic()
                program.keepalive()

        code = follow(program, take, look)
        assert code is not None
        return code


def _portions(conversations: Iterator[Sequence[Message]]) -> Iterator[list[str]]:
    """Lines of a file of cases, as many as one program takes."""
    lines: list[str] = []
    size = 0
    for number, messages in enumerate(conversations, start=1):
        lines.append(json.dumps({"id": f"example {number}", "messages": messages}, ensure_ascii=False) + "\n")
        size += 4 * len(lines[-1])  # a character has four bytes at most
        if len(lines) >= _PORTION_ROWS or size >= _PORTION_BYTES:
            yield lines
            lines, size = [], 0
    if lines:
        yield lines


def scored(score: CaseScore) -> Scored:
    """What an evaluator says about one case, as a loss."""
    if score.error is None:
        return Scored(score.values[_LOSS])
    if score.error.startswith(_NOT_FINITE):  # an error where a model is judged; here it says a lot about the example
        return Scored(float(score.error.removeprefix(_NOT_FINITE)))
    return Scored(math.nan, score.error)


def _told(error_class: ErrorClass | None, error: str) -> str:
    hint = "try again while nothing else needs the device"
    if error_class is ErrorClass.OOM:
        hint = "score fewer at once: --set evaluation.batch_size=4"
    return f"the base could not score the dataset: {error}; {hint}"
