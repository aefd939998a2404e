"""The capture queue behind `client.capture` and `tunesmith serve`: never slows or breaks the application.

A call copies the conversation into a bounded queue and returns; a thread stores what is in it, many in one transaction.
What cannot be kept is dropped and counted: `counts` says how many, and why the last one was. What `flush` has counted
as stored is durable.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from types import TracebackType
from typing import Any, Unpack

from tunesmith.core.clock import utc_now
from tunesmith.core.errors import StoreError, TunesmithError, quoted
from tunesmith.core.ids import is_in_share, is_name
from tunesmith.core.logs import logger
from tunesmith.experience import capture
from tunesmith.experience.capture import About, AddedView, Capture, CaptureRules, CheckedCapture, capture_of
from tunesmith.experience.policy import rules_of
from tunesmith.experience.queries import assessments
from tunesmith.runs.session import Session

log = logger("capture")
_BATCH = 64
_POLL_INTERVAL_S = 0.2  # how often an idle thread looks whether it should end
_FIRST_WAIT_S = 0.05

_FORK_WAIT_S = 2.0

_storing = threading.Lock()
"""Held while a batch is stored. Whoever forks waits for it: a child made in the middle would inherit modules that are
half imported and a store that is half open."""
_forking = threading.local()


def _before_fork() -> None:
    _forking.holds = _storing.acquire(timeout=_FORK_WAIT_S)  # a store that hangs must not hang the application


def _after_fork_in_parent() -> None:
    if _forking.holds:
        _storing.release()


def _after_fork_in_child() -> None:
    global _storing  # noqa: PLW0603 - the one lock of the process
    _storing = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

_Item = tuple[str, list[dict[str, Any]], dict[str, Any], str | None]
_Ready = list[tuple[str, CheckedCapture, CaptureRules]]


@dataclass(frozen=True)
class CaptureCounts:
    """What became of every call so far; accepted = stored + known + skipped + dropped + refused + pending."""

    num_accepted: int = 0
    num_stored: int = 0
    """Durable, and new."""
    num_known: int = 0
    """Durable: the same key was there before."""
    num_skipped: int = 0
    """Left out because the profile's capture policy says so."""
    num_dropped: int = 0
    """Lost: the queue was full, or the store could not be used for too long."""
    num_refused: int = 0
    """Not an interaction that can be kept; `last_problem` says why."""
    last_problem: str | None = None

    @property
    def num_pending(self) -> int:
        settled = self.num_stored + self.num_known + self.num_skipped + self.num_dropped + self.num_refused
        return self.num_accepted - settled


class CaptureQueue:
    """Callable. Never raises, never waits for the store; the thread starts with the first call."""

    def __init__(
        self, session: Session, *, max_pending: int = 1000, patience_s: float = 5.0, linger_s: float = 0.0
    ) -> None:
        self._parent = session
        # how long the first of a batch waits for others: one transaction costs as much as ten
        self._linger_s = linger_s
        self._max_pending = max_pending
        self._patience_s = patience_s  # how long one batch is tried while the store cannot be used
        self._start_anew()

    def _start_anew(self) -> None:
        """Empty. A forked process has none of its parent's thread, and must not store its parent's queue again."""
        self._pid = os.getpid()
        self._queue: Queue[_Item] = Queue(self._max_pending)
        self._changed = threading.Condition()
        self._hurry = threading.Event()
        """Somebody waits for what is queued."""
        self._nums: Counter[str] = Counter()
        self._last_problem: str | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def __call__(self, profile: str, messages: Sequence[Mapping[str, Any]], **about: Unpack[About]) -> bool:
        """Queue one interaction (see `client.experiences.add`); False: it was dropped or refused, and counted."""
        return self.add_served(profile, messages, None, **about)

    def add_served(
        self, profile: str, messages: Sequence[Mapping[str, Any]], key_label: str | None, **about: Unpack[About]
    ) -> bool:
        """The same for an answer of `tunesmith serve`, with the API key that it was given to."""
        try:
            if self._pid != os.getpid():
                self._start_anew()
            if not isinstance(profile, str) or not is_name(profile):
                raise ValueError(f"{quoted(str(profile))} is no name of a profile")
            said: dict[str, Any] = {"source": "capture", "captured_at": utc_now(), **about}
            item = (profile, [dict(message) for message in messages], said, key_label)
        except Exception as error:
            self._count(num_accepted=1, num_refused=1, problem=f"not to be kept: {error}")
            return False
        if self._is_closing:
            self._count(num_accepted=1, num_dropped=1, problem="the client is closed")
            return False
        try:
            self._queue.put_nowait(item)
        except Full:
            self._count(num_accepted=1, num_dropped=1, problem=f"{self._max_pending} interactions wait already")
            return False
        with self._changed:
            self._nums["num_accepted"] += 1
        if self._thread is None:
            self._start()
        return True

    @property
    def counts(self) -> CaptureCounts:
        with self._changed:
            return CaptureCounts(**self._nums, last_problem=self._last_problem)

    def flush(self, timeout_s: float = 10.0) -> CaptureCounts:
        """Wait until everything queued so far is settled, or the time is over; `num_pending` says what is not."""
        deadline = time.monotonic() + timeout_s
        self._hurry.set()
        with self._changed:
            while self._num_pending() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        return self.counts

    def _num_pending(self) -> int:
        # the total counts what was accepted once, and once more as stored, dropped or refused
        return 2 * self._nums["num_accepted"] - self._nums.total()

    def close(self, timeout_s: float = 5.0) -> CaptureCounts:
        """Flush, and take nothing more; what cannot be stored in that time is dropped and counted."""
        self._is_closing = True
        if self._thread is not None and self._pid == os.getpid():
            atexit.unregister(self.close)
            self.flush(timeout_s)
            self._thread.join(_POLL_INTERVAL_S * 2)
            self._drop_queued("the client was closed before they could be stored")
        return self.counts

    def __enter__(self) -> CaptureQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="tunesmith-capture", daemon=True)
        try:
            self._thread.start()
            atexit.register(self.close)
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._drop_queued(str(error))

    def _count(self, *, problem: str | None = None, **more: int) -> None:
        with self._changed:
            is_first_drop = not self._nums["num_dropped"] and more.get("num_dropped", 0)
            self._nums.update(more)
            self._last_problem = problem or self._last_problem
            self._changed.notify_all()
        if is_first_drop:
            log.warning("capture_dropped", problem=problem)

    def _drop_queued(self, problem: str) -> None:
        num = 0
        try:
            while True:
                self._queue.get_nowait()
                num += 1
        except Empty:
            if num:
                self._count(num_dropped=num, problem=problem)

    def _work(self) -> None:
        """The thread: with a store of its own, so that nothing of the application's is ever shared."""
        session = self._parent.another()
        queue = self._queue
        try:
            while not (self._is_closing and queue.empty()):
                batch = _next_batch(queue, self._hurry, self._linger_s)
                if batch:
                    self._settle(session, batch)
        finally:
            session.close()

    def _settle(self, session: Session, batch: list[_Item]) -> None:
        try:
            self._try_for_a_while(session, batch)
        except Exception as error:
            self._count(num_dropped=len(batch), problem=str(error))

    def _try_for_a_while(self, session: Session, batch: list[_Item]) -> None:
        deadline, wait_s = time.monotonic() + self._patience_s, _FIRST_WAIT_S
        while True:
            try:
                with _storing:
                    self._store(session, batch)
                return
            except StoreError:
                session.close()  # the next try opens it anew
                if time.monotonic() + wait_s > deadline or self._is_closing:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)

    def _store(self, session: Session, batch: list[_Item]) -> None:
        """All that can be kept, in one transaction; counted once it has committed."""
        ready, num_skipped, problems = _ready(session, batch)
        try:
            num_new = _store_together(session, ready)
        except StoreError:
            raise
        except TunesmithError:  # one of them spoils it for the others: each by itself
            num_new, ready = self._store_one_by_one(session, ready, problems)
        if problems:
            log.warning("capture_refused", num=len(problems), problem=problems[-1])
        self._count(
            num_stored=num_new,
            num_known=len(ready) - num_new,
            num_skipped=num_skipped,
            num_refused=len(problems),
            problem=problems[-1] if problems else None,
        )

    def _store_one_by_one(self, session: Session, ready: _Ready, problems: list[str]) -> tuple[int, _Ready]:
        stored: _Ready = []
        num_new = 0
        for item in ready:
            try:
                num_new += _store_together(session, [item])
                stored.append(item)
            except StoreError:
                raise  # all are tried again; those that are there already are known then
            except TunesmithError as error:
                problems.append(error.message)
        return num_new, stored


def store_now(session: Session, profile: str, given: Capture) -> AddedView:
    """Store one interaction; when this returns, it is durable."""
    rules = rules_of(session, profile)
    checked = capture.check(given, rules)
    with session.database.write(bulk=True) as tx:
        kept = capture.store(tx, profile, checked, rules, actor=session.actor)
        now = assessments.get(tx, kept.id)
    return AddedView(kept.id, kept.is_new, now.class_name, now.reasons)


def _next_batch(queue: Queue[_Item], hurry: threading.Event, linger_s: float) -> list[_Item]:
    """What waits, as much as goes into one transaction; empty: nothing has come for a while."""
    batch: list[_Item] = []
    try:
        batch.append(queue.get(timeout=_POLL_INTERVAL_S))
        if linger_s and queue.qsize() < _BATCH:
            hurry.wait(linger_s)
        while len(batch) < _BATCH:
            batch.append(queue.get_nowait())
    except Empty:
        hurry.clear()
    return batch


def _ready(session: Session, batch: list[_Item]) -> tuple[_Ready, int, list[str]]:
    """What can be stored; how many the policy leaves out; what is wrong with the others."""
    ready: _Ready = []
    problems: list[str] = []
    num_skipped = 0
    rules: dict[str, CaptureRules | str] = {}
    for profile, messages, about, key_label in batch:
        if profile not in rules:
            rules[profile] = _rules_or_problem(session, profile)
        rule = rules[profile]
        if isinstance(rule, str):
            problems.append(rule)
            continue
        try:
            checked = capture.check(replace(capture_of(messages, about), key_label=key_label), rule)
        except Exception as error:  # whatever an application may have put in there
            problems.append(str(error))
            continue
        if rule.policy.capture.enabled and is_in_captured_share(checked.key, rule.policy.capture.share):
            ready.append((profile, checked, rule))
        else:
            num_skipped += 1
    return ready, num_skipped, problems


def _rules_or_problem(session: Session, profile: str) -> CaptureRules | str:
    try:
        return rules_of(session, profile)
    except StoreError:
        raise
    except TunesmithError as error:
        return error.message


def _store_together(session: Session, ready: _Ready) -> int:
    """How many of them are new."""
    if not ready:
        return 0
    with session.database.write(bulk=True) as tx:
        kept = [capture.store(tx, profile, checked, rule, actor=session.actor) for profile, checked, rule in ready]
    return sum(each.is_new for each in kept)


def is_in_captured_share(key: str, share: float) -> bool:
    """Whether a key belongs to the share that is kept (`experience.capture.share`), the same for ever."""
    return is_in_share(key, share, num_bytes=4)
