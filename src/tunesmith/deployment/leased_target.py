"""A target that checks the task's lease in the store before every action that changes it.

A worker that was suspended and lost its lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.core.errors import LeaseLost
from tunesmith.deployment.serving_targets import ServingTarget
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.deployment.targets.flip_order import InOrder, StaleFlip
from tunesmith.programs.readings import ProbeResult
from tunesmith.programs.stage import StageContext
from tunesmith.runs.queries import tasks


class LeasedTarget:
    """A `Target` for the holder of a task; `order` says when the version to flip to became the live one."""

    def __init__(self, context: StageContext, serving: ServingTarget, profile: str, order: int = 0) -> None:
        self._target = serving.target(context.workspace, profile)
        self._context, self._name, self._order = context, serving.name, order
        self.may_have_flipped = False

    def refusal(self, adapter: ServedAdapter) -> str | None:
        self._hold("refusal")
        return self._target.refusal(adapter)

    def load(self, adapter: ServedAdapter) -> None:
        self._hold("load")
        self._target.load(adapter)

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        self._hold("probe")
        return self._target.probe(adapter, prompts, max_tokens)

    def flip(self, adapter: ServedAdapter | None) -> None:
        self._hold("flip")
        self.may_have_flipped = True
        try:
            if isinstance(self._target, InOrder):
                self._target.flip_in_order(adapter, self._order)
            else:
                self._target.flip(adapter)
        except StaleFlip:
            self.may_have_flipped = False
            raise

    def drain(self, name: str, timeout_s: float) -> None:
        self._hold("drain")
        self._target.drain(name, timeout_s)

    def unload(self, name: str) -> None:
        self._hold("unload")
        self._target.unload(name)

    def loaded(self) -> frozenset[str]:
        return self._target.loaded()

    def observe(self) -> str | None:
        return self._target.observe()

    def _hold(self, verb: str) -> None:
        lease = self._context.claim.lease
        if not self._context.read(lambda tx: tasks.is_held(tx, lease)):
            raise LeaseLost(
                f"task {lease.task_id} is no longer leased to attempt {lease.attempt_id}; "
                f"target {self._name} was not asked to {verb}"
            )
