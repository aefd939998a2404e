"""Whether enough cases are held out to judge a run, and what helps where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_MOST = 50
"""Percent: a share that leaves less than half to train on is not proposed."""


@dataclass(frozen=True)
class Shortage:
    """Too few held-out cases, and what is known of the prompts they come from."""

    num: int
    wanted: int
    num_prompts: int
    """Prompts that can be in a dataset, held out or not."""
    share: float
    """The share that is held out now."""
    enough: float | None
    """The share that would do, while no run has decided one; None: none would, or it is decided."""

    def told(self, *, is_decided: bool, run_id: str | None = None) -> str:
        """With the remedies that work. `run_id`: the run that is queued by now and decides the split if it trains."""
        ways = []
        if self.enough is not None and not is_decided:
            setting = f"set data.heldout_share: {self.enough:g} (now {self.share:g}"
            if run_id is None:
                ways.append(f"{setting}; the first run that trains decides it for good)")
            else:
                cancel = f"`tunesmith run cancel {run_id}`"
                ways.append(f"cancel it before it trains ({cancel}), {setting}) and submit again")
        more = self._new_prompts()
        ways.append(f"collect answers to about {more} new prompts ({self.share:.0%} of them are held out)")
        ways.append(f"set gate.min_cases to at most {self.num}" if self.num > 1 else "lower gate.min_cases")
        advice = "; or ".join(ways)
        prompts = f" of {self.num_prompts} prompt{'s' if self.num_prompts != 1 else ''}" if self.num_prompts else ""
        return (
            f"only {self.num} held-out case{'s' if self.num != 1 else ''}{prompts}, but the gate wants {self.wanted} "
            f"(gate.min_cases): the run will be held. {advice[0].upper()}{advice[1:]}"
        )

    def _new_prompts(self) -> int:
        """So many that, by chance, five times of six enough of them are held out."""
        missing = self.wanted - self.num
        return math.ceil((missing + math.sqrt(missing)) / self.share)


def enough_share(share: float, wanted: int, count: Callable[[float], int]) -> float | None:
    """The smallest whole percent above `share` for which `count` gives enough cases and a few more; None: none does.

    A few more, because preparing may still refuse some: one in twenty.
    """
    aim = wanted + math.ceil(wanted / 20)
    for percent in range(math.floor(share * 100 + 1e-9) + 1, _MOST + 1):
        if count(percent / 100) >= aim:
            return percent / 100
    return None
