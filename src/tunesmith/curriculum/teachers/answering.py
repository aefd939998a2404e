"""Inside a local teacher's program: loads the model once and answers one prompt after the other.

What cannot be answered (too long, too slow, out of memory) is an error of that prompt, and the next one is asked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tunesmith.core.files import json_lines
from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import Sampling, answer_all
from tunesmith.models.loading import load_base, load_tokenizer, pick_device
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure, as_failure
from tunesmith.programs.protocol import ANSWERS, Result, ResultStatus
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import MAX_TEXT, Taught, TeachSpec

_MAX_ERROR = 500


class _Terminated(BaseException):
    """TERM arrived: nobody waits for answers any more. No library that catches every error may catch this one."""


class _TooSlow(BaseException):
    """An answer takes longer than it may."""


def answer(program: Program) -> Result:
    """Entry point, called by `tunesmith.curriculum.teachers.main`."""
    spec = program.teach_spec
    signal.signal(signal.SIGTERM, _on_term)  # in the middle of an answer too: half an answer is worth nothing
    try:
        if program.terminating:
            raise _Terminated
        return _answer_all(program, spec)
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        # Whoever asked is gone, perhaps killed: what people said must not stay behind.
        for path in (Path(spec.prompts_path), program.dir / ANSWERS):
            path.unlink(missing_ok=True)
        return program.result(ResultStatus.INTERRUPTED, detail={"reason": "terminated"})


def _answer_all(program: Program, spec: TeachSpec) -> Result:
    program.phase(Phase.LOAD)
    prompts = _read_prompts(spec)
    folder = Path(spec.model_path)
    chat = ChatFormat(load_tokenizer(folder))
    model = load_base(folder, pick_device())
    program.phase(Phase.GENERATE)
    handle = os.open(program.dir / ANSWERS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    with os.fdopen(handle, "wb", buffering=0) as sink:
        for number, (prompt_id, messages) in enumerate(prompts, 1):
            taught = _taught(spec, model, chat, prompt_id, messages)
            sink.write(taught.model_dump_json().encode() + b"\n")
            program.progress(number, len(prompts), "answer")
    return program.result(ResultStatus.SUCCEEDED)


def _read_prompts(spec: TeachSpec) -> list[tuple[str, list[dict[str, Any]]]]:
    path = Path(spec.prompts_path)
    try:
        prompts = [(str(row["id"]), list(row["messages"])) for row in json_lines(path.read_bytes())]
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramFailure(ErrorClass.DATA, f"not a file of prompts ({type(error).__name__})") from None
    path.unlink()
    if len(prompts) != spec.num_prompts:
        raise ProgramFailure(ErrorClass.DATA, f"{len(prompts)} prompts instead of {spec.num_prompts}; ask again")
    return prompts


def _taught(spec: TeachSpec, model: Any, chat: ChatFormat, prompt_id: str, messages: list[dict[str, Any]]) -> Taught:
    """The answer to one prompt, or the reason why there is none."""
    try:
        with _within(spec.timeout_s):
            prompt = chat.prompt(messages)
            left = spec.context - len(prompt)
            if left < 1:
                return _failed(prompt_id, f"{len(prompt)} tokens of prompt leave no room in its {spec.context}")
            sampling = Sampling(spec.temperature, spec.seed) if spec.temperature > 0 else None
            limit = min(spec.max_tokens, left)
            (said,) = answer_all(model, chat, [prompt], limit, sampling=sampling, keys=[prompt_id])
    except _TooSlow:
        return _failed(prompt_id, f"no answer within {spec.timeout_s:g} s")
    except Exception as error:
        return _failed(prompt_id, as_failure(error).message)
    text = _storable(said.text)
    return Taught(id=prompt_id, text=text, finish="stop" if said.finished else "length", num_in=len(prompt))


def _failed(prompt_id: str, why: str) -> Taught:
    return Taught(id=prompt_id, error=_storable(why)[:_MAX_ERROR] or "it failed")


def _storable(text: str) -> str:
    """Without half characters, which no JSON can carry; cut only where it is too long to be learnt anyway."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises _TooSlow in here once the time is over: between two tokens Python looks at its signals."""
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlow


def _on_term(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated
