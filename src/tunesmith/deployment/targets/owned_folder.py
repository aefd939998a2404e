"""A folder that belongs to one profile of one workspace: who owns it, and which versions it put there.

PATH/.tunesmith-target/owner.json        {"v": 1, "profile", "workspace", "host"}; workspace is null where the folder
                                         lies inside it, so that a copied workspace owns its own copy
PATH/.tunesmith-target/made/dates@v7     one empty file per version that was put there

What is not listed was made by somebody else, and stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import MANIFEST, fsync_folder
from tunesmith.profiles.workspace import is_workspace

ABOUT = ".tunesmith-target"


@dataclass(frozen=True)
class OwnedFolder:
    path: Path
    root: Path
    """The workspace."""
    profile: str

    @property
    def about(self) -> Path:
        return self.path / ABOUT

    @property
    def _owner_file(self) -> Path:
        return self.about / "owner.json"

    @property
    def _made(self) -> Path:
        return self.about / "made"

    def take(self) -> None:
        """Make the folder ours; raises DataError where it is somebody else's, or holds what nobody may overwrite."""
        owner = self._owner()
        if owner is not None and self._is_ours(owner):
            return
        self.refuse_others()
        for folder in self.path.parents:
            if (folder / ABOUT).is_dir() and folder != self.root:
                raise DataError(f"{self.path} lies inside {folder}, where another target puts its versions")
        adopted = self._found_before()
        self._made.mkdir(parents=True, exist_ok=True)
        for name in adopted:
            self.note(name)
        self._write_owner()

    def refuse_others(self) -> None:
        """Raise DataError where another profile or workspace owns the folder."""
        owner = self._owner()
        if owner is not None and not self._is_ours(owner) and not self._has_moved(owner):
            where = owner.get("workspace") or "that it lies in"
            raise DataError(
                f"{self.path} belongs to profile {owner.get('profile')} of the workspace {where}; give this profile a "
                f"folder of its own (options.path), or, if that one is gone, remove {self._owner_file}"
            )

    def made(self) -> frozenset[str]:
        """The versions that we put there and that are there."""
        if self._owner() is None:
            return frozenset(self._found_before())
        try:
            self.refuse_others()
            listed = [entry.name for entry in self._made.iterdir()]
        except (DataError, OSError):
            return frozenset()
        return frozenset(name for name in listed if (self.path / "versions" / name).is_dir())

    def is_made(self, name: str) -> bool:
        return (self._made / name).exists()

    def note(self, name: str) -> None:
        """Before it is put there: what is listed and missing does no harm."""
        (self._made / name).touch()
        fsync_folder(self._made)

    def forget(self, name: str) -> None:
        (self._made / name).unlink(missing_ok=True)

    def _owner(self) -> dict[str, Any] | None:
        try:
            said = json.loads(self._owner_file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("profile"), str):
            raise DataError(f"{self._owner_file} is not what tunesmith writes; remove it and deploy again")
        return said

    def _is_ours(self, owner: dict[str, Any]) -> bool:
        said = owner.get("workspace")
        is_here = self._is_inside if said is None else said == str(self.root)
        return is_here and owner["profile"] == self.profile

    def _has_moved(self, owner: dict[str, Any]) -> bool:
        """The same profile, of a workspace that is no longer where it was: it is this one now."""
        said = owner.get("workspace")
        if said is None or owner["profile"] != self.profile or owner.get("host") != socket.gethostname():
            return False
        return not is_workspace(Path(said))

    @property
    def _is_inside(self) -> bool:
        return self.path.is_relative_to(self.root)

    def _write_owner(self) -> None:
        """In one step, and only if nobody was faster."""
        inside = self._is_inside
        said = {
            "v": 1,
            "profile": self.profile,
            "workspace": None if inside else str(self.root),
            "host": None if inside else socket.gethostname(),
        }
        staged = self.about / f".owner.{os.getpid()}"
        staged.write_text(json.dumps(said, sort_keys=True))
        try:
            if self._owner() is not None:  # of a workspace that has moved
                os.replace(staged, self._owner_file)
            else:
                os.link(staged, self._owner_file)
        except FileExistsError:
            self.refuse_others()
        finally:
            with contextlib.suppress(FileNotFoundError):
                staged.unlink()
        fsync_folder(self.about)

    def _found_before(self) -> list[str]:
        """Versions that an older tunesmith, which kept no list, put there for this profile.

        Raises DataError where versions of another profile lie there, or where `current` leads somewhere else.
        """
        versions, current = self.path / "versions", self.path / "current"
        published = [entry.name for entry in _folders(versions) if (entry / MANIFEST).is_file()]
        ours = [name for name in published if re.fullmatch(rf"{re.escape(self.profile)}@v\d+", name)]
        theirs = [name for name in published if name not in ours and re.fullmatch(r"\S+@v\d+", name)]
        if theirs:
            raise DataError(f"{versions} holds {theirs[0]}, a version of another profile; give this one its own folder")
        if current.is_symlink() and current.resolve() not in {(versions / name).resolve() for name in ours}:
            raise DataError(f"{current} is a link that tunesmith did not make for {self.profile}; move it away")
        return ours


def _folders(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
