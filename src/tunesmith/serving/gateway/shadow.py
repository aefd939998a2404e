"""Shadow traffic: live requests are mirrored to candidates after their answer was sent, while the engines are idle.

The mirrored answers are never sent to a client. Results are stored in batches; requests that cannot be mirrored or
stored are counted, and never delay live traffic.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.core import logs
from tunesmith.core.errors import StoreError, TunesmithError
from tunesmith.core.strict_json import storable
from tunesmith.deployment.rules.shadow import is_mirrored
from tunesmith.experience.policy import rules_of
from tunesmith.experience.queries import shadow_answers as shadows
from tunesmith.experience.queries.shadow_answers import ShadowAnswer, ShadowedVersion
from tunesmith.experience.rules.shadow import ShadowOutcome
from tunesmith.profiles.settings import ServeSettings
from tunesmith.programs.device.rules import ServerState
from tunesmith.runs.session import Session
from tunesmith.serving.gateway.engine_contract import EngineError
from tunesmith.serving.gateway.interfaces import EngineControl, Exchange, HandOver
from tunesmith.serving.generation import GenerationRequest
from tunesmith.verifiers.base import Interaction
from tunesmith.verifiers.registry import verify

_MAX_WAITING = 64
_MAX_UNSTORED = 512
_MAX_EARLY_S = 30.0
"""Maximum wait for the experience of the live answer; without it nothing is stored."""
_BATCH_S = 0.5
_POLL_INTERVAL_S = 0.02
_IDLE_S = 0.2
"""Idle time before a candidate is used: the next live request may be about to arrive."""
_MAX_TRIES = 3
_MAX_ERROR = 300
_NOT_ITS_FAULT = frozenset(
    {
        "device_in_use",
        "busy",
        "overloaded",
        "engines_in_use",
        "engine_start",
        "engine_stopped",
        "engine_memory",
        "stopping",
    }
)
"""Error codes of the engine that are not the fault of the candidate."""
log = logs.logger("shadow")


class _Preempted(Exception):
    """A live request arrived during a mirrored one, or a training run requested the device."""


@dataclass(frozen=True)
class _Wanted:
    candidate: ShadowedVersion
    verifiers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Waiting:
    wanted: _Wanted
    exchange: Exchange
    num_tries: int = 0


class ShadowMirror:
    """Implements `interfaces.Shadow`. One mirrored request at a time, between live ones, which preempt it."""

    def __init__(
        self,
        session: Session,
        settings: ServeSettings,
        engines: EngineControl,
        hand_over: HandOver,
        counts: Counter[str],
    ) -> None:
        self._session = session
        self._settings = settings
        self._engines = engines
        self._hand_over = hand_over
        self._counts = counts
        self._wanted: dict[str, list[_Wanted]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._some = asyncio.Event()
        self._busy_at = 0.0
        self._unstored: deque[tuple[float, ShadowAnswer]] = deque(maxlen=_MAX_UNSTORED)
        """With the time of each."""

    def answered(self, exchange: Exchange) -> None:
        """Queue a live request for mirroring; when the queue is full, drop the oldest."""
        self._busy_at = time.monotonic()
        if not exchange.is_live:
            return
        for wanted in self._wanted.get(exchange.profile, ()):
            if not is_mirrored(exchange.response_id, wanted.candidate.policy.share):
                continue
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self._counts["shadow_dropped"] += 1
            self._waiting.append(_Waiting(wanted, exchange))
            self._some.set()

    async def run(self) -> None:
        """Poll for candidates, mirror requests to them and store the results, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._ask())
            group.create_task(self._store())

    # --- which candidates there are ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                self._wanted = await asyncio.to_thread(self._look)
                self._drop_ended()
            except Exception as error:  # those that were known go on
                log.warning("shadow_not_followed", reason=f"{type(error).__name__}: {error}")
            await asyncio.sleep(max(1.0, self._settings.follow_s))

    def _drop_ended(self) -> None:
        """Drop the queued requests of candidates that are no longer shadowed."""
        going_on = {wanted.candidate.run_id for each in self._wanted.values() for wanted in each}
        left = [waiting for waiting in self._waiting if waiting.wanted.candidate.run_id in going_on]
        self._counts["shadow_dropped"] += len(self._waiting) - len(left)
        self._waiting.clear()
        self._waiting.extend(left)

    def _look(self) -> dict[str, list[_Wanted]]:
        session = self._session
        with session.database.read() as tx:
            found = shadows.candidates(tx)
        wanted: dict[str, list[_Wanted]] = {}
        for candidate in found:
            try:
                rules = rules_of(session, candidate.profile)
            except StoreError:
                raise
            except TunesmithError as error:  # its file is wrong or gone; nobody else suffers from that
                log.warning("shadow_not_followed", profile=candidate.profile, reason=str(error))
                continue
            wanted.setdefault(candidate.profile, []).append(_Wanted(candidate, rules.policy.wanted))
        return wanted

    # --- asking them ---------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            while not self._waiting:
                self._some.clear()
                await self._some.wait()
            await self._wait_until_idle(self._waiting[0].wanted.candidate.policy.beside_live)
            if self._waiting:
                await self._try(self._waiting.popleft())

    async def _try(self, waiting: _Waiting) -> None:
        seen: ShadowAnswer | None = None
        try:
            seen = await self._mirror(waiting.wanted, waiting.exchange)
        except _Preempted:
            if waiting.num_tries + 1 < _MAX_TRIES:
                self._waiting.appendleft(replace(waiting, num_tries=waiting.num_tries + 1))
                return
        except Exception:
            log.exception("shadow_failed", response=waiting.exchange.response_id)
        self._counts["shadow_dropped" if seen is None else "shadow_asked"] += 1
        if seen is not None:
            self._keep(seen)

    async def _wait_until_idle(self, beside_live: bool) -> None:
        """Wait until the engines have their device and, unless `beside_live`, were idle for a moment."""
        while True:
            now, has_device = time.monotonic(), self._hand_over.state is ServerState.SERVING
            if not has_device or self._engines.num_active:
                self._busy_at = now
            if has_device and (beside_live or now - self._busy_at >= _IDLE_S):
                return
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _answer(self, request: GenerationRequest, candidate: ShadowedVersion) -> str:
        """The candidate's answer; preempted by a live request or by a device request."""
        asking = asyncio.create_task(self._engines.answer(candidate.name, request))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=_POLL_INTERVAL_S)
                is_alone = candidate.policy.beside_live or self._engines.num_active <= 1  # it counts as one itself
                if not asking.done() and not (is_alone and self._hand_over.state is ServerState.SERVING):
                    raise _Preempted
            return asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _mirror(self, wanted: _Wanted, exchange: Exchange) -> ShadowAnswer | None:
        """Run the same request on the candidate; None if that was not possible now."""
        candidate, begun = wanted.candidate, time.monotonic()
        request = replace(exchange.request, id=f"{exchange.request.id}.shadow", adapter=candidate.name)
        answer: str | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                answer = await self._answer(request, candidate)
            outcome = ShadowOutcome.ANSWERED
        except TimeoutError:
            outcome, error = ShadowOutcome.TIMED_OUT, f"no answer within {self._settings.timeout_s:g} s"
        except TunesmithError as refused:
            if isinstance(refused, EngineError) and refused.code in _NOT_ITS_FAULT:
                return None
            outcome, error = ShadowOutcome.FAILED, str(refused)[:_MAX_ERROR]
        return ShadowAnswer(
            run_id=candidate.run_id,
            adapter_id=candidate.adapter_id,
            response_id=exchange.response_id,
            live_version=exchange.version,
            outcome=outcome,
            answer=None if answer is None else storable(answer),
            error=None if error is None else storable(error),
            seconds=time.monotonic() - begun,
            live_seconds=exchange.seconds,
            flags=() if answer is None else _flags(exchange.messages, answer, wanted.verifiers),
            live_flags=_flags(exchange.messages, exchange.answer, wanted.verifiers),
        )

    # --- storing what came of it ---------------------------------------------------------------------------------

    def _keep(self, seen: ShadowAnswer) -> None:
        if len(self._unstored) == self._unstored.maxlen:
            self._counts["shadow_lost"] += 1
        self._unstored.append((time.monotonic(), seen))

    async def _store(self) -> None:
        while True:
            await asyncio.sleep(_BATCH_S)
            if not self._unstored:
                continue
            batch = list(self._unstored)
            try:
                added = await asyncio.to_thread(self._write, [seen for _, seen in batch])
            except StoreError as error:  # they stay, as many as there is room for
                log.warning("shadow_not_stored", num=len(batch), reason=str(error))
                continue
            except Exception:
                log.exception("shadow_not_stored", num=len(batch))
                added = shadows.Added(0, ())
            self._settle(batch, added)

    def _settle(self, batch: Sequence[tuple[float, ShadowAnswer]], added: shadows.Added) -> None:
        """Keep the results whose experience is not stored yet, for a while; drop the rest of the batch."""
        early = {id(seen) for seen in added.too_early}
        late = time.monotonic() - _MAX_EARLY_S
        done = {id(seen) for at, seen in batch if id(seen) not in early or at < late}
        self._counts["shadow_lost"] += sum(id(seen) in early for _, seen in batch if id(seen) in done)
        self._counts["shadow_stored"] += added.num
        left = [item for item in self._unstored if id(item[1]) not in done]
        self._unstored.clear()
        self._unstored.extend(left)

    def _write(self, batch: Sequence[ShadowAnswer]) -> shadows.Added:
        with self._session.database.write(bulk=True) as tx:
            return shadows.add(tx, batch)


def _flags(
    messages: Sequence[Mapping[str, Any]], answer: str, wanted: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """Which of the profile's verifiers say something against an answer."""
    findings = verify(Interaction([*messages, {"role": "assistant", "content": answer}]), wanted)
    return tuple(sorted(name for name, finding in findings.items() if finding.flagged))
