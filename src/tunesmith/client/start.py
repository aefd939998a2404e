"""Start on one's own model: a workspace, a profile and an active campaign in one go, all of them or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.core.errors import Refused, UsageError
from tunesmith.core.files import write_atomic
from tunesmith.models.bases.fetch import fetch_base, find_fetched, is_fetchable
from tunesmith.models.bases.hub_errors import HubError
from tunesmith.models.bases.place import read_fetched
from tunesmith.orchestration.start import StartWish, check_task, first_profile, named
from tunesmith.profiles.profile import HardwareTier, Role
from tunesmith.profiles.whole_base import looks_like_path, no_such_base
from tunesmith.profiles.workspace import SAMPLE_FILE, Workspace, init_workspace, is_workspace

if TYPE_CHECKING:
    from tunesmith.client import Client
    from tunesmith.profiles.first_profile import FirstProfile
    from tunesmith.profiles.queries import Campaign

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Started:
    """What was made, and what was decided on the way."""

    root: Path
    is_new_workspace: bool
    file: Path
    profile: FirstProfile
    base: Path
    campaign: Campaign | None


@dataclass(frozen=True)
class Wish:
    """What a person asks for; `base` is a folder, the id of a model on a hub, or `smollm2`."""

    task: str
    base: str
    role: Role | None = None
    tier: HardwareTier | None = None
    with_campaign: bool = True


def wish_of(
    base: str | Path | None, task: str | None, role: str | None, tier: str | None, *, with_campaign: bool = True
) -> Wish:
    """The wish that these texts mean; UsageError where one is missing or unknown."""
    if base is None or task is None:
        raise UsageError(
            "--base and --task belong together: the model to start from, and what it is to be called; "
            "for example --base models/llama --task support"
        )
    return Wish(task, str(base), named(Role, role, "--role"), named(HardwareTier, tier, "--tier"), with_campaign)


def start(
    folder: Path, wish: Wish, open_client: Callable[[Path], Client], on_progress: Progress | None = None
) -> tuple[Client, Started]:
    """Make what is missing: the workspace, and in it the profile with its campaign. What fails leaves nothing behind.

    In a workspace that is there, the profile is added; one of that name is never touched.
    """
    check_task(wish.task)
    root = Path(os.path.abspath(folder.expanduser())).resolve()
    workspace = Workspace(root)
    file = workspace.profiles_dir / f"{wish.task}.yaml"
    if file.exists() or file.is_symlink():
        raise Refused(
            f"profile {wish.task} is there already ({file}), and nothing was changed; choose another --task, or "
            f"remove the file. Its check: tunesmith profile check {wish.task}. If it has no campaign: "
            f"tunesmith campaign create {wish.task}"
        )
    base = find_base(wish.base, on_progress)
    fetched = read_fetched(base)
    said = StartWish(wish.task, base, fetched.revision if fetched is not None else None, wish.role, wish.tier)
    profile = first_profile(said, root)
    with _alone_in(root), _all_or_nothing(workspace, file):
        is_new = not is_workspace(root)
        if is_new:
            init_workspace(root)
        _write_new(file, profile.text())
        client = open_client(root)
        try:
            client.profiles.check(wish.task)
            campaign = client.campaigns.create(wish.task) if wish.with_campaign else None  # last: it cannot be undone
        except BaseException:
            client.close()
            raise
    return client, Started(root, is_new, file, profile, base, campaign)


def find_base(text: str, on_progress: Progress | None = None) -> Path:
    """The folder that a text means: a path, else a base that was fetched before, else one that is fetched now."""
    path = Path(os.path.abspath(Path(text).expanduser())) if text else Path(os.devnull)
    if text and (looks_like_path(text) or path.exists()):
        return path.parent.resolve() / path.name
    if not is_fetchable(text):
        raise no_such_base(text)
    known = find_fetched(text)
    if known is not None:
        return known.folder
    try:
        return fetch_base(text, on_progress=on_progress).folder
    except HubError as error:
        raise HubError(f"{error.message}. (No folder {path} is here, so {text} was taken for a hub id.)") from None


def _write_new(file: Path, text: str) -> None:
    """Write a file that must not be there yet, whole or not at all."""
    staged = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomic(staged, text)
        os.link(staged, file)
    except FileExistsError:
        raise Refused(f"{file}: somebody else wrote it just now; nothing was changed") from None
    except OSError as error:
        raise Refused(f"{file}: cannot be written ({error.strerror}); choose another folder") from None
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


@contextlib.contextmanager
def _alone_in(root: Path) -> Iterator[None]:
    """Have the folder, and be the only one that starts something in it. What fails leaves no empty folder behind."""
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Refused(f"cannot make a workspace in {root}: {error.strerror}; choose another folder") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BaseException as error:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, BlockingIOError):
            raise Refused(f"{root}: another `tunesmith init` works here now; try again when it has ended") from None
        raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _all_or_nothing(workspace: Workspace, file: Path) -> Iterator[None]:
    """Whatever fails inside, remove what was not there before: all of a new workspace, or only the profile."""
    sample = workspace.profiles_dir / SAMPLE_FILE
    ours = (file, sample, workspace.profiles_dir, workspace.data_dir, workspace.project_file)
    missing = [path for path in ours if not path.exists()]
    try:
        yield
    except BaseException:
        for path in missing:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
