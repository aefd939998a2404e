"""Whether enough cases are held out to judge a run, and what to set where they are not."""

from __future__ import annotations

import math

_MOST = 0.5
"""A share that leaves less than half to train on is not proposed."""


def few_cases(num: int, wanted: int, *, num_prompts: int, share: float, is_decided: bool) -> str | None:
    """What to say where the gate wants more held-out cases than there are; None: there are enough.

    `num_prompts`: prompts, held out or not, that `num` came from; 0 where that is not known.
    """
    if num >= wanted:
        return None
    told = f"only {num} held-out cases{f' of about {num_prompts} prompts' if num_prompts else ''}, but the gate wants "
    told += f"{wanted} (gate.min_cases): the run will be held. "
    needed = math.ceil(100 * wanted / num_prompts) / 100 if num_prompts else 1.0
    ways = []
    if share < needed <= _MOST:
        how = "then `tunesmith profile lock PROFILE --new-split`" if is_decided else "the first run decides it for good"
        ways.append(f"set data.heldout_share: {needed:g} (now {share:g}; {how})")
    ways += ["collect more", "lower gate.min_cases"]
    advice = ", or ".join(ways)
    return f"{told}{advice[0].upper()}{advice[1:]}"
