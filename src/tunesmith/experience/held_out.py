"""What is held out of a profile: which prompts keep an earlier split, and whether there are enough cases to judge."""

from __future__ import annotations

from tunesmith.datasets import queries as datasets
from tunesmith.experience.queries import candidates
from tunesmith.experience.rules.held_out import few_cases
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.store.database import Database


def too_few_cases(database: Database, checked: CheckedProfile, num_new: int, num_prompts: int) -> str | None:
    """What to say where the gate would want more held-out cases than the pool and `num_new` more make."""
    profile = checked.profile
    with database.read() as tx:
        num_pool = len(datasets.pool(tx, profile.name, "", profile.evaluation.max_cases))
    return few_cases(
        num_pool + num_new,
        profile.gate.min_cases,
        num_prompts=num_prompts,
        share=profile.data.heldout_share,
        is_decided=checked.lock.is_split_decided,
    )


def expected(database: Database, checked: CheckedProfile) -> str | None:
    """The same before anything is assembled, by the number of experiences alone; None where there are none."""
    with database.read() as tx:
        num = candidates.num_usable(tx, checked.profile.name)
    return too_few_cases(database, checked, round(num * checked.profile.data.heldout_share), num) if num else None
