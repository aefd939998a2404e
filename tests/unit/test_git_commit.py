"""The workspace's git commit: read from real repositories, quickly, without running what a repository names."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tunesmith.core.git import commit_of

WITHIN_S = 30.0  # a busy machine; the default is half a second


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q")
    (root / "tunesmith.yaml").write_text("{}\n")
    (root / "notes.txt").write_text("one\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def git(root: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *named, *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_of_a_clean_repository(repository: Path) -> None:
    found = commit_of(repository, "tunesmith.yaml", timeout_s=WITHIN_S)
    assert found is not None
    assert (found.commit, found.is_dirty) == (git(repository, "rev-parse", "HEAD"), False)


def test_changed_and_staged_files_are_dirty_and_untracked_ones_are_not(repository: Path) -> None:
    (repository / "new.txt").write_text("new\n")
    assert is_dirty(repository) is False
    (repository / "notes.txt").write_text("two\n")
    assert is_dirty(repository) is True
    git(repository, "add", "notes.txt")
    assert is_dirty(repository) is True
    git(repository, "commit", "-qm", "second")
    assert is_dirty(repository) is False


def is_dirty(root: Path) -> bool | None:
    found = commit_of(root, "tunesmith.yaml", timeout_s=WITHIN_S)
    assert found is not None
    return found.is_dirty


def test_workspace_in_a_folder_of_the_repository_has_its_commit(repository: Path) -> None:
    below = repository / "models" / "mine"
    below.mkdir(parents=True)
    (below / "tunesmith.yaml").write_text("{}\n")
    assert commit_of(below, "tunesmith.yaml", timeout_s=WITHIN_S) is None, "the repository holds nothing of it"
    git(repository, "add", "models")
    git(repository, "commit", "-qm", "models")
    found = commit_of(below, "tunesmith.yaml", timeout_s=WITHIN_S)
    assert found is not None
    assert found.commit == git(repository, "rev-parse", "HEAD")


def test_no_repository_no_commit_no_git_is_no_error(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path, "tunesmith.yaml") is None
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert commit_of(empty, "tunesmith.yaml", timeout_s=WITHIN_S) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(repository, "tunesmith.yaml") is None


def test_no_time_is_no_commit_and_returns_at_once(repository: Path) -> None:
    begun = time.monotonic()
    assert commit_of(repository, "tunesmith.yaml", timeout_s=0.0) is None
    assert time.monotonic() - begun < 0.5


def test_variables_of_another_repository_are_not_followed(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    found = commit_of(repository, "tunesmith.yaml", timeout_s=WITHIN_S)
    assert found is not None


def test_programs_that_a_repository_names_are_not_run(tmp_path: Path, repository: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "evil.sh"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {ran}\ncat\n")
    program.chmod(0o755)
    hook = repository / ".git" / "hooks" / "post-index-change"
    hook.write_text(program.read_text())
    hook.chmod(0o755)
    for key in ("core.fsmonitor", "filter.evil.clean", "filter.a=b.clean", "filter.evil.process", "core.pager",
                "core.sshCommand", "diff.external", "core.alternateRefsCommand"):  # fmt: skip
        git(repository, "config", key, str(program))
    git(repository, "config", "filter.evil.required", "true")
    (repository / ".gitattributes").write_text("notes.txt filter=evil\ntunesmith.yaml filter=a=b\n")
    (repository / "notes.txt").write_text("two\n")  # git must look into it, which is when it would run the filter
    ran.unlink(missing_ok=True)
    assert is_dirty(repository) is True
    assert not ran.exists(), ran.read_text()
    subprocess.run(["git", "status"], cwd=repository, capture_output=True, check=False)
    assert ran.exists(), "git alone does run them, so this test can fail"
