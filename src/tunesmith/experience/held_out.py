"""What is held out of a profile: which prompts keep an earlier split, and whether there are enough cases to judge."""

from __future__ import annotations

from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.experience.queries import candidates, members
from tunesmith.experience.rules.held_out import few_cases
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.store.database import Database


def kept_splits(database: Database, workspace: Workspace, checked: CheckedProfile) -> dict[str, Split]:
    """The groups that keep a split which the shares of now would not give them; empty unless shares were changed.

    Goes by every dataset that a run was submitted on. What one of them held out stays held out, in whatever order they
    came. Of a dataset whose folder is gone, only what was assembled from experiences is known.
    """
    if not checked.lock.split_number:
        return {}
    from tunesmith.datasets.kept_splits import groups_in
    from tunesmith.datasets.splits import split_of

    with database.read() as tx:
        trained = datasets.of_ids(tx, profiles.trained_datasets(checked.profile.name))
        assembled = {each.id: members.groups_of(tx, each.id) for each in trained}
    found: dict[str, Split] = {}
    for dataset in trained:
        folder = workspace.data_dir / dataset.path
        for group, split in groups_in(folder) if folder.exists() else assembled[dataset.id]:
            if split is Split.HELDOUT or group not in found:
                found[group] = split
    shares = (checked.lock.heldout_share, checked.lock.validation_share)
    return {group: split for group, split in found.items() if split is not split_of(group, *shares)}


def too_few_cases(database: Database, checked: CheckedProfile, num_new: int, num_prompts: int) -> str | None:
    """What to say where the gate would want more held-out cases than the pool and `num_new` more make."""
    profile = checked.profile
    with database.read() as tx:
        num_pool = len(datasets.pool(tx, profile.name, "", profile.evaluation.max_cases))
    return few_cases(
        num_pool + num_new,
        profile.gate.min_n,
        num_prompts=num_prompts,
        share=profile.data.heldout_share,
        is_decided=checked.lock.is_split_decided,
    )


def expected(database: Database, checked: CheckedProfile) -> str | None:
    """The same before anything is assembled, by the number of experiences alone; None where there are none."""
    with database.read() as tx:
        num = candidates.num_usable(tx, checked.profile.name)
    return too_few_cases(database, checked, round(num * checked.profile.data.heldout_share), num) if num else None
