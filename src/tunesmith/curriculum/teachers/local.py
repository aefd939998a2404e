"""A teacher that is a model on this machine: one contained program answers all prompts of a cycle, in their order.

The model is loaded once, when the first answer is wanted. Nothing of it runs in this process, and nothing of it stays:
the folder with prompts and answers is removed with the program, or by the next cycle if we are killed.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunesmith.core.clock import boot_seconds
from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError, ProgramError, TunesmithError
from tunesmith.core.files import open_plain, sha256_text
from tunesmith.curriculum.rules.correction import Reply
from tunesmith.curriculum.teachers.endpoint import TeacherFailed
from tunesmith.profiles.architecture import read_architecture, read_tensor_shapes
from tunesmith.profiles.base_model import ADAPTER_CONFIG, base_files, is_whole_model
from tunesmith.profiles.sections.curriculum import TeacherSettings
from tunesmith.profiles.settings import Phase
from tunesmith.programs.artifact import read_capped
from tunesmith.programs.launch import RunningProgram, launch
from tunesmith.programs.progress import Advance
from tunesmith.programs.protocol import ANSWERS, MAX_RESULT, RESULT, Event, PhaseEvent, Result
from tunesmith.programs.supervise import follow
from tunesmith.runs.spec import AttemptRef, Taught, TeachSpec

PROGRAM = ("python", "-m", "tunesmith.curriculum.teachers.main")
LOAD_S = 900.0
"""For starting and loading the model, however large it is."""
MAX_S = 3300.0
"""For one answer in all, loading included: a reservation that is an hour old is taken for abandoned."""
_GRACE_S = 30.0  # the program itself gives an answer up in time; this is for one that cannot
_POLL_INTERVAL_S, _ASK_S = 0.02, 0.5
_MAX_LINE = 2 << 20  # the longest answer that is handed on has less
_PROMPTS = "prompts.jsonl"
_MAX_SHOWN = 300

Prompt = tuple[str, Sequence[Mapping[str, Any]]]


class TeacherCancelled(Exception):
    """The cycle was stopped while the teacher was generating; its answer is unknown."""


@dataclass(frozen=True)
class ProgramHandle:
    """The callbacks that keep a teacher program alive: those of a worker with its lease, or of a foreground process."""

    attempt: AttemptRef
    why_stop: Callable[[], str | None]
    """Looked at while we wait; raises where the lease is lost."""
    hold: Callable[[RunningProgram | None], None]
    """Called with the program when it was started, and with None when it is to be let go."""
    renew: Callable[[RunningProgram], None]
    """Called all the time while we wait."""
    pass_environment: tuple[str, ...] = ()
    """Names of variables that the program sees besides the usual ones."""


def check_folder(folder: Path) -> int:
    """The tokens that the model in a folder takes; raises ConfigError where it is none that we load."""
    where = f"curriculum.teacher.path: {folder}"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder; name one with a model in Hugging Face format")
    if not is_whole_model(folder):
        what = "holds an adapter" if (folder / ADAPTER_CONFIG).exists() else "has no config.json"
        raise ConfigError(f"{where} {what}; name a folder with a whole model in Hugging Face format")
    try:
        base_files(folder)
        read_tensor_shapes(folder)
        found = read_architecture(folder)
    except (TunesmithError, OSError) as error:
        raise ConfigError(f"curriculum.teacher.path: {str(error).replace('base model', 'the model in')}") from None
    if found.chat_template_sha256 is None:
        raise ConfigError(f"{where} has no chat template; add its chat_template.jinja to the folder")
    return found.context


def same_weights(folder: Path, other: Path) -> bool:
    """Whether all weights of one model are those of another, whatever the files are called.

    Compared byte by byte, so that two different models are told apart by their first bytes.
    """
    mine, theirs = _weights(folder), _weights(other)
    return bool(mine) and all(any(filecmp.cmp(one, each, shallow=False) for each in theirs) for one in mine)


def _weights(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.safetensors") if path.is_file()]


class LocalTeacher:
    """Answers the prompts of one cycle; start, waiting and end of its program."""

    def __init__(self, settings: TeacherSettings, folder: Path, directory: Path, handle: ProgramHandle) -> None:
        self._settings, self._folder, self._directory, self._grip = settings, folder, directory, handle
        self._program: RunningProgram | None = None
        self._lines = _Lines(directory / ANSWERS)
        self._advance = Advance()
        self._num_left = 0
        self._answers: dict[str, Taught] = {}
        self._deadline = self._asked = 0.0
        self._failed: str | None = None

    @property
    def is_started(self) -> bool:
        return self._program is not None or self._failed is not None

    def start(self, prompts: Iterable[Prompt], seed: str) -> None:
        """Start the program with everything it will be asked; where it cannot be started, `ask` says why."""
        try:
            program = self._launch(prompts, seed)
        except (ConfigError, ProgramError, OSError) as error:
            self._failed = f"the teacher's program cannot be started: {error}"
            return
        self._program = program
        self._grip.hold(program)

    def _launch(self, prompts: Iterable[Prompt], seed: str) -> RunningProgram:
        path, num = self._directory / _PROMPTS, 0
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
            for prompt_id, messages in prompts:
                line = json.dumps({"id": prompt_id, "messages": list(messages)}, ensure_ascii=False)
                sink.write(line.encode(errors="replace") + b"\n")
                num += 1
        spec = TeachSpec(
            attempt=self._grip.attempt,
            model_path=str(self._folder),
            prompts_path=str(path),
            num_prompts=num,
            context=check_folder(self._folder),
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            timeout_s=self._settings.timeout_s,
            seed=int(sha256_text(seed)[:8], 16),
        )
        self._num_left, self._deadline = num, boot_seconds() + LOAD_S
        return launch(PROGRAM, spec, self._directory, env=child_environment(os.environ, self._grip.pass_environment))

    def ask(self, prompt_id: str) -> Reply:
        """The answer to a prompt that was started with; raises TeacherFailed, or TeacherCancelled if we are to end."""
        if prompt_id not in self._answers and self._failed is None and self._program is not None:
            self._wait_for(prompt_id, self._program)
        said = self._answers.pop(prompt_id, None)
        if said is None:
            raise TeacherFailed(self._failed or "it was not started", may_be_billed=False)
        if said.error is not None or said.text is None:
            raise TeacherFailed(str(said.error), may_be_billed=False, is_about_prompt=True)
        return Reply(said.text, said.finish, said.num_in, None)

    def close(self) -> None:
        """End the program, whatever it is busy with."""
        if self._program is not None:
            self._program.kill_tree(0.0)
            self._grip.hold(None)
            self._program = None

    def _wait_for(self, prompt_id: str, program: RunningProgram) -> None:
        """Until the answer is there; once nothing more can come, `_failed` says why."""
        last, self._asked = boot_seconds() + MAX_S, 0.0
        self._stop_if_told()

        def look() -> None:
            self._stop_if_told()
            if boot_seconds() > min(self._deadline, last):
                self._failed = "the teacher's program did not get on in time; it was ended"
                program.kill_tree(0.0)
            else:
                self._grip.renew(program)

        try:
            code = follow(program, self._take, look, until=lambda: self._has(prompt_id), look_s=_POLL_INTERVAL_S)
        except ProgramError as error:
            self._failed = f"the teacher's program broke its protocol: {error}"
            program.kill_tree(0.0)
        else:
            if code is not None and self._failed is None:
                self._failed = f"the teacher's program ended without an answer: {_reason(self._directory, code)}"

    def _stop_if_told(self) -> None:
        if boot_seconds() - self._asked >= _ASK_S:
            self._asked = boot_seconds()
            if (why := self._grip.why_stop()) is not None:
                raise TeacherCancelled(why)

    def _take(self, event: Event) -> None:
        if self._advance.takes(event) and isinstance(event, PhaseEvent) and event.phase is Phase.GENERATE:
            self._deadline = boot_seconds() + self._settings.timeout_s + _GRACE_S

    def _has(self, prompt_id: str) -> bool:
        """Whether the answer is there now, after a look at what was written."""
        for taught in self._lines.new():
            if not self._num_left:
                raise ProgramError("it answers more than it was asked")
            self._answers[taught.id] = taught
            self._num_left -= 1
            self._deadline = boot_seconds() + self._settings.timeout_s + _GRACE_S
        return prompt_id in self._answers


class _Lines:
    """Whole new lines of answers.jsonl; raises ProgramError at the first that is none of ours."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> Iterator[Taught]:
        try:
            opened = open_plain(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ProgramError(f"{ANSWERS} cannot be read ({error.strerror})") from None
        with opened as source:
            source.seek(self._offset)
            while (line := source.readline(_MAX_LINE)).endswith(b"\n"):
                self._offset += len(line)
                try:
                    yield Taught.model_validate_json(line)
                except ValidationError:
                    raise ProgramError(f"a line of {ANSWERS} is no answer") from None
        if len(line) >= _MAX_LINE:
            raise ProgramError(f"a line of {ANSWERS} has more than {_MAX_LINE >> 20} MiB")


def _reason(directory: Path, code: int) -> str:
    """What its result says, if it could leave one."""
    with contextlib.suppress(ProgramError, ValidationError):
        result = Result.model_validate_json(read_capped(directory / RESULT, MAX_RESULT))
        if result.error:
            return " ".join(result.error.split())[:_MAX_SHOWN]
    return f"it was killed by signal {-code}; is there memory enough?" if code < 0 else f"exit code {code}"
