"""The systemd units that start `tunesmith campaign drop` when a request appears: text, quoted as systemd reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.errors import UsageError, quoted
from tunesmith.core.files import sha256_text
from tunesmith.orchestration.file_drop.folder import PENDING, WORKING


@dataclass(frozen=True)
class Units:
    """A path unit and the service it starts."""

    name: str
    path: str
    service: str

    @property
    def files(self) -> dict[str, str]:
        return {f"{self.name}.path": self.path, f"{self.name}.service": self.service}


def units_for(folder: Path, command: Sequence[str]) -> Units:
    """For an absolute folder, and the words of the command that answers its requests."""
    for text in (str(folder), *command):
        _check(text)
    if "$" in command[0]:
        raise UsageError(f"systemd starts no program whose path holds a '$': {quoted(command[0])}")
    slug = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:40] or "folder"
    name = f"tunesmith-drop-{slug}-{sha256_text(str(folder))[:6]}"
    path = f"""\
[Unit]
Description=Requests for rounds of tunesmith

[Path]
# the second file is there while a request is worked on, and after a restart of the machine in between
PathExists={_expanded(f"{folder}/{PENDING}")}
PathExists={_expanded(f"{folder}/{WORKING}")}

[Install]
WantedBy=paths.target
"""
    service = f"""\
[Unit]
Description=Answers requests for rounds of tunesmith
# many requests in a row are many starts in a row
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join(map(_word, command))}
# ends by itself when nothing is asked; it fails when the store or the folder cannot be used
Restart=on-failure
RestartSec=30
"""
    return Units(name, path, service)


def _word(text: str) -> str:
    """One word of ExecStart: `%` begins a specifier, `$` a variable, and quotes take C escapes."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{inner}"'


def _expanded(path: str) -> str:
    """A path setting: to the end of its line, without quotes."""
    return path.replace("%", "%%")


def _check(text: str) -> None:
    if not text.isprintable():
        raise UsageError(f"{quoted(text)} holds a character that no unit file can; rename the folder")
