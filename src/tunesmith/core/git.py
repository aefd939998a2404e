"""The git commit that a folder is at, read without running a program that the repository names.

A repository can name programs in its own configuration: hooks, file-system monitors, clean filters, transports. Each of
them is switched off before git looks at a file of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunesmith.core.environment import visible

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_MAX_FILTERS = 200
_OFF = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.untrackedCache": "false",
    "submodule.recurse": "false",
    "protocol.allow": "never",
}


@dataclass(frozen=True)
class GitCommit:
    commit: str
    is_dirty: bool | None
    """Whether a tracked file of the repository differs from the commit; None: git could not tell in time."""


def commit_of(folder: Path, tracked: str, *, timeout_s: float = 0.5) -> GitCommit | None:
    """The commit of the repository that `folder` is in; None without git, a commit, or a tracked file `tracked`.

    A repository that does not track that file holds nothing of the folder, so its commit would say nothing about it.
    Untracked files never count as changes.
    """
    try:
        if not any((place / ".git").exists() for place in (folder, *folder.parents)):
            return None  # nothing is started for the many folders that are in no repository
    except OSError:
        return None
    asked = _Asked(folder, time.monotonic() + timeout_s)
    commit = (asked.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}") or "").strip()
    if not _COMMIT.match(commit) or asked.git("ls-files", "--error-unmatch", "-z", "--", tracked) is None:
        return None
    return GitCommit(commit, _is_dirty(asked))


@dataclass(frozen=True)
class _Asked:
    """One question to git about one folder, which must be answered by a deadline."""

    folder: Path
    deadline: float

    def git(self, *words: str, settings: Mapping[str, str] = _OFF, codes: Sequence[int] = (0,)) -> str | None:
        """What git printed; None where it failed, is not installed, or took too long."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            done = subprocess.run(
                ["git", "--no-pager", "--no-optional-locks", *words],
                cwd=self.folder,
                env=_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=left,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace") if done.returncode in codes else None


def _is_dirty(asked: _Asked) -> bool | None:
    # status 1: there are no such settings
    found = asked.git("config", "-z", "--name-only", "--get-regexp", r"^filter\.", codes=(0, 1))
    names = {name.rpartition(".")[0] for name in (found or "").split("\0") if name.count(".") >= 2}
    if found is None or len(names) > _MAX_FILTERS:
        return None
    filters = {f"{name}.{key}": "" for name in sorted(names) for key in ("clean", "smudge", "process")}
    settings = {**_OFF, **filters, **{f"{name}.required": "false" for name in names}}
    changes = asked.git(
        "status", "--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=all", settings=settings
    )
    return None if changes is None else bool(changes)


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings go by the environment, where a name may hold any character; they win over the repository's own."""
    pairs = dict(enumerate(settings.items()))
    numbered = {f"GIT_CONFIG_KEY_{number}": key for number, (key, _) in pairs.items()}
    numbered |= {f"GIT_CONFIG_VALUE_{number}": value for number, (_, value) in pairs.items()}
    return {
        **visible(os.environ),
        "GIT_CONFIG_COUNT": str(len(pairs)),
        "GIT_ALLOW_PROTOCOL": "",  # a missing object is not fetched: that would start the remote's own program
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        **numbered,
    }
