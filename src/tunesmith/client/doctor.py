"""The doctor: looks at the installation and the workspace; every finding says how to repair it."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from tunesmith.client.system import Check
from tunesmith.core.errors import DataError, StoreCorrupt, StoreError
from tunesmith.core.files import verify_folder
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.target_conflicts import place_problems
from tunesmith.models import queries as adapters
from tunesmith.profiles.base_model import base_problem, version_problem
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.resolve import list_profiles
from tunesmith.programs.device.queries import servers
from tunesmith.runs.base_check import changed_base
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.queries import workers
from tunesmith.runs.session import Session
from tunesmith.store.lock_holder import find_holder
from tunesmith.store.schema import integrity_problem
from tunesmith.store.sqlite_files import num_names
from tunesmith.store.sqlite_library import sqlite_module, wal_is_safe

_LOW_DISK_BYTES = 2 << 30


class Doctor:
    def __init__(self, session: Session) -> None:
        self._session = session

    def look(self) -> list[Check]:
        return [self._python(), self._sqlite(), self._store(), self._train_extra(), self._containment(),
                self._disk(), *self._profiles(), *self._versions(), self._workers(), self._servers(),
                *self._targets()]  # fmt: skip

    def _python(self) -> Check:
        version = ".".join(map(str, sys.version_info[:3]))
        return Check("python", "ok", version)

    def _sqlite(self) -> Check:
        module = sqlite_module()
        version = module.sqlite_version
        if wal_is_safe(module.sqlite_version_info):
            return Check("sqlite", "ok", f"{version}, WAL journal")
        finding = f"{version} may lose pages in WAL mode, so the slower DELETE journal is used"
        return Check("sqlite", "warning", finding, "pip install pysqlite3")

    def _store(self) -> Check:
        try:
            problem = integrity_problem(self._session.database)
        except StoreCorrupt as error:
            problem = error.message
        except StoreError as error:
            return Check("store", "broken", error.message, "make it reachable again; what it holds is not damaged")
        if problem is None:
            return self._store_in_use() or Check("store", "ok", "sound")
        return Check("store", "broken", problem, "restore a backup; nothing is repaired by resetting")

    def _store_in_use(self) -> Check | None:
        """What keeps a sound store from being used safely: a stopped process with its write lock, a second name."""
        where = self._session.database.where
        holder = find_holder(where)
        if holder is not None and holder.is_stopped:
            return Check("store", "broken", f"sound, but {holder} holds its write lock", holder.advice)
        if num_names(where) > 1:
            finding = f"sound, but {where} has a second name (hard link); writing through both damages it"
            return Check("store", "warning", finding, "make a copy with `sqlite3 FILE '.backup COPY'`, remove the link")
        return None

    def _train_extra(self) -> Check:
        missing = [name for name in ("torch", "transformers", "peft", "safetensors") if find_spec(name) is None]
        if not missing:
            return Check("training", "ok", "torch, transformers, peft and safetensors are installed")
        return Check("training", "warning", f"not installed: {', '.join(missing)}", "pip install 'tunesmith[train]'")

    def _containment(self) -> Check:
        if platform.system() == "Linux":
            return Check("containment", "ok", "trainers die with their worker (child subreaper)")
        finding = "this system has no child subreaper; a trainer that starts its own session can outlive its worker"
        return Check("containment", "warning", finding, "run workers on Linux")

    def _disk(self) -> Check:
        free = shutil.disk_usage(self._session.workspace.root).free
        state = "ok" if free > _LOW_DISK_BYTES else "warning"
        return Check("disk", state, f"{free / 2**30:.1f} GiB free", "" if state == "ok" else "make room")

    def _profiles(self) -> list[Check]:
        entries = list_profiles(self._session.workspace, self._session.environ)
        if not entries:
            return [Check("profiles", "warning", "none yet", "tunesmith init --base BASE --task NAME")]
        return [
            Check(f"profile {entry.name}", "ok" if entry.error is None else "broken", entry.error or "loads",
                  "" if entry.error is None else f"tunesmith profile check {entry.name}")
            for entry in entries
        ]  # fmt: skip

    def _versions(self) -> list[Check]:
        """Bases and live adapters that are not there, or not what they were."""
        session, checks = self._session, []
        try:
            with session.database.read() as tx:
                live, locked = adapters.all_live(tx), profiles.base_digests(tx)
        except StoreError:
            live, locked = [], {}
        for entry in list_profiles(session.workspace, session.environ):
            if entry.profile is not None:
                checks += self._base(entry.name, entry.profile.base.path, locked.get(entry.name))
                checks += self._places(entry.profile)
        for each in live:
            folder = session.workspace.data_dir / each.path
            problem = version_problem(each.name, folder) or _damage(folder, each.digest)
            if problem is not None:
                fix = f"restore it from a backup, or tunesmith adapter rollback {each.profile}"
                checks.append(Check(f"adapter {each.name}", "broken", problem, fix))
        return checks

    def _base(self, profile: str, path: str, locked: str | None) -> list[Check]:
        """A base that is missing, or another one than the profile was locked with."""
        folder = self._session.workspace.locate(path)
        problem = base_problem(folder, told=folder)
        if problem is None and locked is not None:
            problem = changed_base(self._session.workspace, folder, locked)
        if problem is None:
            return []
        fix = "put it back" if locked is not None else "put it there, or set base.path"
        return [Check(f"base of {profile}", "warning" if locked is None else "broken", problem, fix)]

    def _places(self, profile: Profile) -> list[Check]:
        """Targets that another profile has, too."""
        session = self._session
        try:
            shared = place_problems(session.database, session.workspace, profile.name, profile.targets, session.environ)
        except StoreError:
            return []
        fix = f"give each its own, and look again: tunesmith profile check {profile.name}"
        return [Check(f"targets of {profile.name}", "broken", line, fix) for line in shared]

    def _workers(self) -> Check:
        try:
            with self._session.database.read() as tx:
                alive = workers.alive(tx)
        except StoreError:
            return Check("workers", "warning", "unknown while the store cannot be read", "mend the store first")
        if alive:
            return Check("workers", "ok", f"{len(alive)} running")
        return Check("workers", "warning", "none is running, so queued runs wait", "tunesmith worker")

    def _targets(self) -> list[Check]:
        """What every target was last seen serving."""
        checks = []
        try:
            with self._session.database.read() as tx:
                seen = [(each, adapters.live(tx, each.profile)) for d in deployments.listing(tx)
                        for each in deployments.observed(tx, d.profile)]  # fmt: skip
        except StoreError:
            return []
        for each, live in seen:
            name = f"target {each.target} of {each.profile}"
            if each.error is None:
                checks.append(Check(name, "ok", f"serves {'the bare base' if live is None else live.name}"))
            else:
                fix = "mend the target; a worker that runs brings it to what is wanted"
                checks.append(Check(name, "warning", each.error, fix))
        return checks

    def _servers(self) -> Check:
        try:
            with self._session.database.read() as tx:
                alive = servers.alive(tx)
        except StoreError:
            return Check("servers", "warning", "unknown while the store cannot be read", "mend the store first")
        dropped = sum(server.counts.get("num_dropped", 0) for server in alive)
        if dropped:
            fix = "its log and GET /healthz say why; answers flow all the same"
            return Check("servers", "warning", f"{dropped} answers could not be kept", fix)
        if any(server.counts.get("num_problems") for server in alive):
            return Check("servers", "warning", "some profiles cannot answer", "GET /healthz says which, and why")
        shown = ", ".join(f"{server.url} ({server.state})" for server in alive)
        return Check("servers", "ok", shown or "none is running (`tunesmith serve` starts one)")


def _damage(folder: Path, digest: str) -> str | None:
    try:
        verify_folder(folder, digest)
    except (DataError, OSError) as error:
        return str(error)
    return None
