"""Which version a model's name means: follows the store, moves a name only once the new version is ready.

The store says what is live. When it cannot be read, every name keeps its meaning. A request is given an exact version
once, when it comes in; so an answer is wholly from one version, however often the name moves meanwhile.
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
from tunesmith.serving.gateway.served_profiles import Place, Places
from tunesmith.serving.names import BASE, ModelName, parse_model

log = logger("gateway")
_LISTED = "GET /v1/models lists them"
_PATIENCE_S = 3.0
_SLOW_WRITE_S = 4.0


@dataclass(frozen=True)
class Version:
    """One exact thing that can answer: an adapter version, or the bare base (`adapter` is None)."""

    name: str
    adapter: ServedAdapter | None = None
    adapter_id: str | None = None
    base_digest: str | None = None
    state: AdapterState | None = None
    created_at: datetime | None = None
    is_whole: bool = False
    """A fully tuned model: it needs no base beside it."""

    @property
    def digest(self) -> str | None:
        return None if self.adapter is None else self.adapter.digest


@dataclass(frozen=True)
class Route:
    """Where one request goes."""

    place: Place
    version: Version
    is_live: bool
    """The profile's own name was asked for."""
    profile: str | None
    """Whose answer it is; None: `base`, which belongs to no profile."""

    @property
    def folder(self) -> Path:
        """The model that the embedded engine loads."""
        if self.version.is_whole and self.version.adapter is not None:
            return self.version.adapter.path
        return self.place.base

    @property
    def beside(self) -> ServedAdapter | None:
        """What it loads beside that model."""
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


class Switchboard:
    """`get_ready` loads what a name is about to mean, where what it meant so far is in memory; raises if it cannot."""

    def __init__(self, session: Session, get_ready: GetReady) -> None:
        self._session = session
        self._get_ready = get_ready
        self._places = Places(session.workspace, session.environ)
        self.places: dict[str, Place] = {}
        self._meaning: dict[str, Version] = {}
        self._previous: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        self._coming: set[str] = set()
        """What names are about to mean: made room for like what is live."""
        self._known: dict[str, Version] = {}
        """Exact versions by name: all that were asked for or live, looked at again with every round."""
        self._in_use: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._round = asyncio.Lock()
        self.store_problem: str | None = None
        """Why it cannot be read."""
        self.write_problem: str | None = None
        self._writing_since: float | None = None
        self.troubles: dict[str, str] = {}
        """Why a profile's name does not mean what is wanted."""
        self._not_before: dict[str, tuple[str, float]] = {}
        """By profile, the version that could not be loaded, and when to try again."""
        self._missing: dict[str, str] = {}
        """By profile, what its name needs on disk and is not there."""
        self._failed: dict[str, str] = {}
        """By exact version, why it could not answer when it was last asked."""

    # -- following the store

    async def follow(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("following_failed")

    async def refresh(self, *, at_once: bool = False) -> None:
        """Look at store and profiles, and move the names that should move; `at_once`: also what failed a moment ago."""
        async with self._round:
            if at_once:
                self._not_before.clear()
            wanted = await self._look()
            if wanted is None:
                return
            self._known = {name: self._version(row) for name, row in wanted.known.items()}
            self._previous, self._bases = wanted.previous, wanted.bases
            self.places = await asyncio.to_thread(self._places.look, wanted.overrides)
            for name in set(self._meaning) - set(self.places):
                del self._meaning[name]
            moves = [self._move(place, wanted.live.get(name)) for name, place in self.places.items()]
            await asyncio.gather(*moves)
            missing = await asyncio.to_thread(self._glance)
            for profile, problem in missing.items():
                if self._missing.get(profile) != problem:
                    log.warning("cannot_answer", profile=profile, problem=problem)
            self._missing = missing

    def _glance(self) -> dict[str, str]:
        """Whether the files that each name needs are there; their content is looked at when they are loaded."""
        found = {}
        for profile, version in self.meaning().items():
            place, adapter = self.places[profile], version.adapter
            problem = base_problem(place.base) if place.is_embedded else None
            if problem is None and adapter is not None and place.is_embedded:
                problem = version_problem(version.name, adapter.path)
            if problem is not None:
                found[profile] = problem
        return found

    def note(self, name: str, problem: str | None) -> None:
        """What came of asking an exact version: None, or why it could not answer; kept until it answers again."""
        if problem is None:
            self._failed.pop(name, None)
        elif self._failed.get(name) != problem:
            log.warning("cannot_answer", version=name, problem=problem)
            self._failed[name] = problem

    async def _look(self) -> _Wanted | None:
        try:
            wanted = await asyncio.to_thread(self._read)
        except StoreError as error:
            if self.store_problem is None:
                log.warning("store_lost", problem=error.message)
            self.store_problem = error.message
            if not self.places:  # nothing is known yet: the files tell what can be told
                self.places = await asyncio.to_thread(self._places.look, {})
            return None
        if self.store_problem is not None:
            log.info("store_back")
        self.store_problem = None
        return wanted

    def _read(self) -> _Wanted:
        with self._session.database.read() as tx:
            live = {found.profile: found for found in adapters.all_live(tx)}
            overrides = {active.profile: active.overrides for active in campaigns.all_active(tx)}
            before = [found.previous_adapter_id for found in deployments.listing(tx)]
            others = [version.adapter_id for version in self._known.values()]
            rows = adapters.by_ids(tx, {row_id for row_id in (*before, *others) if row_id is not None})
            bases = profiles.base_digests(tx)
        previous = {row.profile: row.name for row in rows if row.id in before}
        known = {row.name: row for row in (*rows, *live.values())}
        return _Wanted(live, previous, known, overrides, bases)

    async def _move(self, place: Place, live: Adapter | None) -> None:
        """Let a profile's name mean what is wanted, once that is ready."""
        new = self._bare(place.profile) if live is None else self._known[live.name]
        old = self._meaning.get(place.profile)
        if old is not None and old.name == new.name:
            self._meaning[place.profile] = new
            self.troubles.pop(place.profile, None)
            return
        is_revoked = old is not None and self._known.get(old.name, old).state is AdapterState.REVOKED
        if old is not None and not is_revoked:  # what is revoked goes at once, whatever comes of the new one
            failed, not_before = self._not_before.get(place.profile, ("", 0.0))
            if failed == new.name and time.monotonic() < not_before:
                return
            self._coming.add(new.name)
            try:
                await self._get_ready(_live_route(place, new), _live_route(place, old))
            except TunesmithError as error:
                trouble = f"{new.name} could not be loaded: {error.message}"
                if self.troubles.get(place.profile) != trouble:
                    log.warning("flip_waits", profile=place.profile, wanted=new.name, problem=error.message)
                self.troubles[place.profile] = trouble
                self._not_before[place.profile] = (new.name, time.monotonic() + _PATIENCE_S)
                return
            finally:
                self._coming.discard(new.name)
        self.troubles.pop(place.profile, None)
        self._meaning[place.profile] = new
        if old is not None:
            log.info("flipped", profile=place.profile, old=old.name, new=new.name)

    def _bare(self, profile: str) -> Version:
        return Version(f"{profile}@{BASE}", base_digest=self._bases.get(profile))

    def _version(self, row: Adapter) -> Version:
        known = self._known.get(row.name)
        path = self._session.workspace.data_dir / row.path
        return Version(
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
        """The exact version that a name means now; raises 404, also for one that was revoked."""
        try:
            return await self._resolve(model)
        except NotFound as error:
            raise ApiError(404, error.message, code="model_not_found", param="model") from None

    async def _resolve(self, model: str) -> Route:
        if model == BASE and BASE not in self.places:
            return self._only_base()
        name = parse_model(model)
        place = self.places.get(name.profile)
        if place is None and name.profile in self._places.problems:
            check = f"run `tunesmith profile check {name.profile}` where it is served"
            raise NotFound(f"no model {quoted(model)}: its profile cannot be loaded; {check}")
        if place is None:
            raise NotFound.named("model", model, [*self.places], _LISTED)
        if name.is_base:
            return Route(place, self._bare(name.profile), is_live=False, profile=name.profile)
        if name.is_live:
            return Route(place, self._meaning.get(name.profile) or self._bare(name.profile), True, name.profile)
        return Route(place, await self._exact(name), is_live=False, profile=name.profile)

    def _only_base(self) -> Route:
        bases = {place.base: place for place in self.places.values() if place.is_embedded}
        if len(bases) != 1 or len({place.base for place in self.places.values()}) != 1:
            raise NotFound(f"no model {BASE!r}: the profiles have several bases, or none; ask for PROFILE@{BASE}")
        return Route(next(iter(bases.values())), Version(BASE), is_live=False, profile=None)

    async def _exact(self, name: ModelName) -> Version:
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
            message = f"{text} was revoked and is served nowhere any more; ask for {name.profile}"
            raise ApiError(404, message, code="model_revoked", param="model")
        return version

    def _find(self, text: str) -> Adapter:
        with self._session.database.read() as tx:
            return adapters.find(tx, text)

    def meaning(self) -> dict[str, Version]:
        """By profile, what its name means now."""
        return {name: self._meaning.get(name) or self._bare(name) for name in self.places}

    def pinned(self) -> frozenset[str]:
        """Versions that are not let go: what is live, and the one before it."""
        live = frozenset(version.name for version in self._meaning.values())
        return live | frozenset(self._previous.values()) | self._coming

    @property
    def file_problems(self) -> dict[str, str]:
        """By profile, what is wrong with its file."""
        return self._places.problems

    @property
    def problems(self) -> dict[str, str]:
        failed = {profile: self._failed.get(version.name) for profile, version in self.meaning().items()}
        return {
            **{profile: problem for profile, problem in failed.items() if problem is not None},
            **self._missing,
            **self._places.problems,
            **self.troubles,
        }

    @property
    def lost_store(self) -> str | None:
        """Why the store cannot be read or written; None: it can."""
        since = self._writing_since
        if self.store_problem is None and since is not None and time.monotonic() - since > _SLOW_WRITE_S:
            return f"the store takes no writes for {time.monotonic() - since:.0f} s now; does somebody hold its lock?"
        return self.store_problem or self.write_problem

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what is written now and then, so that a store that takes nothing is noticed."""
        self._writing_since = time.monotonic()
        try:
            yield
            self.write_problem = None
        except StoreError as error:
            self.write_problem = error.message
        finally:
            self._writing_since = None

    # -- who is being asked

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Around an answer, so that a version can be drained."""
        self._in_use[name] += 1
        try:
            yield
        finally:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]
                self._tell()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(tell())
        self._telling = task  # a task that nobody holds may be collected

    async def drained(self, name: str, timeout_s: float) -> bool:
        """Wait until nothing is answered by that version any more; False: the time is over."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: name not in self._in_use)
        except TimeoutError:
            return False
        return True

    def in_use(self) -> dict[str, int]:
        return dict(self._in_use)


def _live_route(place: Place, version: Version) -> Route:
    return Route(place, version, is_live=True, profile=place.profile)
