"""The `command` target: a program of yours that serves by any means, called with a verb; JSON in, JSON out.

It is started once for each call. On its standard input stands one JSON object: `v` (1), `verb`, `profile`, `adapter`
({name, path, digest}, or null for the bare base), and what the verb needs. On its standard output it writes one JSON
object and ends with 0. Anything else (another exit code, no JSON, too much, too slow) means that it could not do it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError, field_validator

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.core.files import verify_folder
from tunesmith.deployment.targets.alias import StateFile
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.options import TargetOptions, Text, Variable, read_options
from tunesmith.programs.readings import ProbeResult

MAX_OUTPUT = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_POLL_S = 0.01
_MAX_SHOWN = 300


class CommandOptions(TargetOptions):
    program: tuple[Text, ...] = Field(min_length=1)
    """The program and its arguments: a list, never a shell line. A path is taken from the workspace."""
    env: tuple[Variable, ...] = ()
    """Environment variables it may see beside PATH, HOME and the like."""

    @field_validator("program", mode="before")
    @classmethod
    def _a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a list such as [./serve.py, --fast], not a line")
        return value


class CommandTarget:
    """Whatever the program says is checked as far as it can be."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._options = read_options(CommandOptions, "command", options)
        first = self._options.program[0]
        found = str((root / first).resolve()) if "/" in first else shutil.which(first)
        if found is None or not os.access(found, os.X_OK):
            raise ConfigError(f"targets: kind command: program: {first} is not there or may not be run")
        self._argv = [found, *self._options.program[1:]]
        self._root, self._profile = root, profile
        self._order = Order.beside(StateFile.at(root, profile, "command", " ".join(self._options.program)).path)

    def refusal(self, adapter: ServedAdapter) -> str | None:
        try:
            verify_folder(adapter.path, adapter.digest)
        except (DataError, OSError) as error:
            return str(error)
        why = self._call("refusal", adapter).get("refusal")
        if why is not None and not isinstance(why, str):
            raise self._odd("refusal", "`refusal` is no text and not null")
        return why

    def load(self, adapter: ServedAdapter) -> None:
        self._call("load", adapter)
        if adapter.name not in self.loaded():
            raise self._odd("load", f"it says that it loaded {adapter.name}, and does not have it")

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        asked = [[dict(message) for message in prompt] for prompt in prompts]
        said = self._call("probe", adapter, prompts=asked, max_tokens=max_tokens).get("readings")
        if said is None:
            return None
        try:
            return [ProbeResult.model_validate(reading) for reading in said]
        except (TypeError, ValidationError) as error:
            raise self._odd("probe", f"its readings cannot be read ({type(error).__name__})") from None

    def flip(self, adapter: ServedAdapter | None) -> None:
        self._call("flip", adapter)

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        with self._order.entering(order):
            self._call("flip", adapter, order=order)

    def drain(self, name: str, timeout_s: float) -> None:
        self._call("drain", None, patience_s=timeout_s, name=name, timeout_s=timeout_s)

    def unload(self, name: str) -> None:
        self._call("unload", None, name=name)

    def loaded(self) -> frozenset[str]:
        names = self._call("loaded", None).get("loaded")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._odd("loaded", "`loaded` is no list of names")
        return frozenset(name for name in names if name.startswith(f"{self._profile}@"))

    def observe(self) -> str | None:
        said = self._call("observe", None)
        digest = said.get("digest")
        if "digest" not in said or not (digest is None or (isinstance(digest, str) and _DIGEST.match(digest))):
            raise self._odd("observe", "`digest` is no sha256 and not null")
        return digest

    def _call(
        self, verb: str, adapter: ServedAdapter | None, *, patience_s: float = 0.0, **more: Any
    ) -> dict[str, Any]:
        about = None
        if adapter is not None:
            about = {"name": adapter.name, "path": str(adapter.path), "digest": adapter.digest}
        told = json.dumps({"v": 1, "verb": verb, "profile": self._profile, "adapter": about, **more}).encode()
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            stdin.write(told)
            stdin.seek(0)
            code = self._run(verb, stdin, out, errors, self._options.timeout_s + patience_s)
            if code != 0:
                raise TargetError(f"{self._name} {verb} ended with {code}: {_last_line(errors)}")
            out.seek(0)
            raw = out.read(MAX_OUTPUT + 1)
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._odd(verb, "its output is no JSON") from None
        if not isinstance(said, dict):
            raise self._odd(verb, "its output is no JSON object")
        return said

    def _run(self, verb: str, stdin: IO[bytes], out: IO[bytes], errors: IO[bytes], timeout_s: float) -> int:
        """Its exit code. It gets a session of its own, so that all of it ends when it is too slow or too loud."""
        environ = child_environment(os.environ, self._options.env)
        try:
            process = subprocess.Popen(
                self._argv, stdin=stdin, stdout=out, stderr=errors, cwd=self._root, env=environ, start_new_session=True
            )
        except OSError as error:
            raise TargetError(f"{self._name} cannot be started: {error.strerror}") from None
        deadline = time.monotonic() + timeout_s
        problem = None
        try:
            while process.poll() is None and problem is None:
                if time.monotonic() > deadline:
                    problem = f"did not end within {timeout_s:g} s"
                elif max(os.fstat(stream.fileno()).st_size for stream in (out, errors)) > MAX_OUTPUT:
                    problem = f"wrote more than {MAX_OUTPUT >> 20} MiB"
                else:
                    time.sleep(_POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
            process.wait()
        if problem is None and os.fstat(out.fileno()).st_size > MAX_OUTPUT:
            problem = f"wrote more than {MAX_OUTPUT >> 20} MiB"
        if problem is not None:
            raise TargetError(f"{self._name} {verb} {problem}")
        return process.returncode

    @property
    def _name(self) -> str:
        return Path(self._argv[0]).name

    def _odd(self, verb: str, what: str) -> TargetError:
        return TargetError(f"{self._name} {verb}: {what}")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read(MAX_OUTPUT).decode(errors="replace").strip().splitlines()
    shown = "".join(char if char.isprintable() else " " for char in (lines or ["it said nothing"])[-1])
    return shown[:_MAX_SHOWN]
