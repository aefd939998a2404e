"""The model router: maps a model name to an exact version, and switches an alias once the new version is loaded.

The store says what is live. While it cannot be read, every alias keeps its version. A request is resolved once, on
arrival, so an answer comes from one version even if the alias is switched meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunesmith.core.errors import NotFound, StoreError, TunesmithError, quoted
from tunesmith.core.logs import logger
from tunesmith.deployment import queries as deployments
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.models import queries as adapters
from tunesmith.models.queries import Adapter
from tunesmith.models.rules import AdapterState
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.base_model import base_problem, is_whole_model, version_problem
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.session import Session
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.served_profiles import ServedProfile, ServedProfiles
from tunesmith.serving.gateway.store_health import StoreHealth
from tunesmith.serving.names import BASE, ModelName, parse_model

log = logger("gateway")
_LISTED = "GET /v1/models lists them"
_RETRY_AFTER_S = 3.0


@dataclass(frozen=True)
class ModelVersion:
    """An exact version: an adapter version, or the base model alone (`adapter` is None)."""

    name: str
    adapter: ServedAdapter | None = None
    adapter_id: str | None = None
    base_digest: str | None = None
    state: AdapterState | None = None
    created_at: datetime | None = None
    is_whole: bool = False
    """A fully fine-tuned model: it is loaded instead of the base model."""

    @property
    def digest(self) -> str | None:
        return None if self.adapter is None else self.adapter.digest


@dataclass(frozen=True)
class Route:
    """Where one request goes."""

    served: ServedProfile
    version: ModelVersion
    is_live: bool
    """The request named the profile, not an exact version."""
    profile: str | None
    """The profile the answer belongs to; None for `base`, which belongs to no profile."""

    @property
    def folder(self) -> Path:
        """The model that the embedded engine loads."""
        if self.version.is_whole and self.version.adapter is not None:
            return self.version.adapter.path
        return self.served.base

    @property
    def adapter(self) -> ServedAdapter | None:
        """The adapter that it loads into that model."""
        return None if self.version.is_whole else self.version.adapter


@dataclass(frozen=True)
class _Wanted:
    """What the store says."""

    live: dict[str, Adapter]
    previous: dict[str, str]
    known: dict[str, Adapter]
    overrides: dict[str, dict[str, Any]]
    bases: dict[str, str]
    """By profile, the digest of the base it was locked with."""


GetReady = Callable[[Route, Route], Awaitable[None]]


class ModelRouter:
    """Resolves model names to versions, and follows what the store says is live.

    `get_ready` loads the new version of an alias if the old one is in memory; it raises if it cannot.
    """

    def __init__(self, session: Session, get_ready: GetReady) -> None:
        self._session = session
        self._get_ready = get_ready
        self._served_profiles = ServedProfiles(session.workspace, session.environ)
        self.served_profiles: dict[str, ServedProfile] = {}
        self._live: dict[str, ModelVersion] = {}
        self._previous: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        self._coming: set[str] = set()
        """Versions that are about to go live; pinned like live ones."""
        self._known: dict[str, ModelVersion] = {}
        """Exact versions by name: all that were requested or live; read anew at every refresh."""
        self._in_use: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._refreshing = asyncio.Lock()
        self.store_health = StoreHealth()
        self.troubles: dict[str, str] = {}
        """By profile, why its alias is not at the live version of the store."""
        self._not_before: dict[str, tuple[str, float]] = {}
        """By profile, the version that could not be loaded, and when to try again."""
        self._missing: dict[str, str] = {}
        """By profile, the files that its live version needs and that are missing."""
        self._failed: dict[str, str] = {}
        """By exact version, why its last request failed."""

    # -- following the store

    async def follow(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("following_failed")

    async def refresh(self, *, at_once: bool = False) -> None:
        """Read store and profiles and switch the aliases that changed; `at_once`: without the pause after a failure."""
        async with self._refreshing:
            if at_once:
                self._not_before.clear()
            wanted = await self._read_safely()
            if wanted is None:
                return
            self._known = {name: self._version(row) for name, row in wanted.known.items()}
            self._previous, self._bases = wanted.previous, wanted.bases
            self.served_profiles = await asyncio.to_thread(self._served_profiles.refresh, wanted.overrides)
            for name in set(self._live) - set(self.served_profiles):
                del self._live[name]
            moves = [self._switch_alias(served, wanted.live.get(name)) for name, served in self.served_profiles.items()]
            await asyncio.gather(*moves)
            missing = await asyncio.to_thread(self._check_files)
            for profile, problem in missing.items():
                if self._missing.get(profile) != problem:
                    log.warning("version_unavailable", profile=profile, problem=problem)
            self._missing = missing

    def _check_files(self) -> dict[str, str]:
        """Check that the files of each live version exist; their content is verified when they are loaded."""
        found = {}
        for profile, version in self.live_versions().items():
            served, adapter = self.served_profiles[profile], version.adapter
            problem = base_problem(served.base) if served.is_embedded else None
            if problem is None and adapter is not None and served.is_embedded:
                problem = version_problem(version.name, adapter.path)
            if problem is not None:
                found[profile] = problem
        return found

    def record_result(self, name: str, problem: str | None) -> None:
        """Record the result of a request to an exact version: None, or why it failed."""
        if problem is None:
            self._failed.pop(name, None)
        elif self._failed.get(name) != problem:
            log.warning("version_unavailable", version=name, problem=problem)
            self._failed[name] = problem

    async def _read_safely(self) -> _Wanted | None:
        try:
            wanted = await asyncio.to_thread(self._read)
        except StoreError as error:
            self.store_health.record_read(error.message)
            if not self.served_profiles:  # nothing is known yet: the files tell what can be told
                self.served_profiles = await asyncio.to_thread(self._served_profiles.refresh, {})
            return None
        self.store_health.record_read(None)
        return wanted

    def _read(self) -> _Wanted:
        with self._session.database.read() as tx:
            live = {found.profile: found for found in adapters.all_live(tx)}
            overrides = {each.profile: each.overrides for each in campaigns.all_in_force(tx)}
            before = [found.previous_adapter_id for found in deployments.listing(tx)]
            others = [version.adapter_id for version in self._known.values()]
            rows = adapters.by_ids(tx, {row_id for row_id in (*before, *others) if row_id is not None})
            bases = profiles.base_digests(tx)
        previous = {row.profile: row.name for row in rows if row.id in before}
        known = {row.name: row for row in (*rows, *live.values())}
        return _Wanted(live, previous, known, overrides, bases)

    async def _switch_alias(self, served: ServedProfile, live: Adapter | None) -> None:
        """Switch a profile's alias to the live version of the store, once that is loaded."""
        new = self._bare(served.profile) if live is None else self._known[live.name]
        old = self._live.get(served.profile)
        if old is not None and old.name == new.name:
            self._live[served.profile] = new
            self.troubles.pop(served.profile, None)
            return
        is_revoked = old is not None and self._known.get(old.name, old).state is AdapterState.REVOKED
        # a revoked version is replaced at once, even if the new one is not loaded
        if old is not None and not is_revoked:
            failed, not_before = self._not_before.get(served.profile, ("", 0.0))
            if failed == new.name and time.monotonic() < not_before:
                return
            self._coming.add(new.name)
            try:
                await self._get_ready(_live_route(served, new), _live_route(served, old))
            except TunesmithError as error:
                trouble = f"{new.name} could not be loaded: {error.message}"
                if self.troubles.get(served.profile) != trouble:
                    log.warning("flip_deferred", profile=served.profile, wanted=new.name, problem=error.message)
                self.troubles[served.profile] = trouble
                self._not_before[served.profile] = (new.name, time.monotonic() + _RETRY_AFTER_S)
                return
            finally:
                self._coming.discard(new.name)
        self.troubles.pop(served.profile, None)
        self._live[served.profile] = new
        if old is not None:
            log.info("flipped", profile=served.profile, old=old.name, new=new.name)

    def _bare(self, profile: str) -> ModelVersion:
        return ModelVersion(f"{profile}@{BASE}", base_digest=self._bases.get(profile))

    def _version(self, row: Adapter) -> ModelVersion:
        known = self._known.get(row.name)
        path = self._session.workspace.data_dir / row.path
        return ModelVersion(
            name=row.name,
            adapter=ServedAdapter(row.name, path, row.digest),
            adapter_id=row.id,
            base_digest=row.base_digest,
            state=row.state,
            created_at=row.created_at,
            is_whole=known.is_whole if known is not None else is_whole_model(path),
        )

    # -- asking it

    async def resolve(self, model: str) -> Route:
        """The exact version of a model name; raises 404, also for a revoked version."""
        try:
            return await self._resolve(model)
        except NotFound as error:
            raise ApiError(404, error.message, code="model_not_found", param="model") from None

    async def _resolve(self, model: str) -> Route:
        if model == BASE and BASE not in self.served_profiles:
            return self._only_base()
        name = parse_model(model)
        served = self.served_profiles.get(name.profile)
        if served is None and name.profile in self._served_profiles.problems:
            check = f"run `tunesmith profile check {name.profile}` where it is served"
            raise NotFound(f"no model {quoted(model)}: its profile cannot be loaded; {check}")
        if served is None:
            raise NotFound.named("model", model, [*self.served_profiles], _LISTED)
        if name.is_base:
            return Route(served, self._bare(name.profile), is_live=False, profile=name.profile)
        if name.is_live:
            return Route(served, self._live.get(name.profile) or self._bare(name.profile), True, name.profile)
        return Route(served, await self._exact(name), is_live=False, profile=name.profile)

    def _only_base(self) -> Route:
        bases = {served.base: served for served in self.served_profiles.values() if served.is_embedded}
        if len(bases) != 1 or len({served.base for served in self.served_profiles.values()}) != 1:
            raise NotFound(f"no model {BASE!r}: the profiles have several bases, or none; ask for PROFILE@{BASE}")
        return Route(next(iter(bases.values())), ModelVersion(BASE), is_live=False, profile=None)

    async def _exact(self, name: ModelName) -> ModelVersion:
        text = f"{name.profile}@v{name.version}"
        version = self._known.get(text)
        if version is None:
            try:
                found = await asyncio.to_thread(self._find, text)
            except StoreError:
                raise NotFound(f"no model {quoted(text)} is known while the store cannot be read") from None
            except NotFound:
                raise NotFound.named("model", text, hint=_LISTED) from None
            version = self._known[text] = self._version(found)
        if version.state is AdapterState.REVOKED:
            message = f"{text} was revoked and is no longer served; use {name.profile}"
            raise ApiError(404, message, code="model_revoked", param="model")
        return version

    def _find(self, text: str) -> Adapter:
        with self._session.database.read() as tx:
            return adapters.find(tx, text)

    def live_versions(self) -> dict[str, ModelVersion]:
        """By profile, the version that its alias stands for now."""
        return {name: self._live.get(name) or self._bare(name) for name in self.served_profiles}

    def pinned(self) -> frozenset[str]:
        """Versions that are not evicted: live, previous, and about to be live."""
        live = frozenset(version.name for version in self._live.values())
        return live | frozenset(self._previous.values()) | self._coming

    @property
    def file_problems(self) -> dict[str, str]:
        """By profile, what is wrong with its file."""
        return self._served_profiles.problems

    @property
    def problems(self) -> dict[str, str]:
        failed = {profile: self._failed.get(version.name) for profile, version in self.live_versions().items()}
        return {
            **{profile: problem for profile, problem in failed.items() if problem is not None},
            **self._missing,
            **self._served_profiles.problems,
            **self.troubles,
        }

    # -- who is being asked

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Use around an answer, so that a version can be drained."""
        self._in_use[name] += 1
        try:
            yield
        finally:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]
                self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._notifying = task  # a task that nobody holds may be collected

    async def drained(self, name: str, timeout_s: float) -> bool:
        """Wait until no request uses the version; False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: name not in self._in_use)
        except TimeoutError:
            return False
        return True

    def in_use(self) -> dict[str, int]:
        return dict(self._in_use)


def _live_route(served: ServedProfile, version: ModelVersion) -> Route:
    return Route(served, version, is_live=True, profile=served.profile)
