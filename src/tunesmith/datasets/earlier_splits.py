"""Prompts that keep an earlier split after a profile's shares were changed: held out once, held out for ever."""

from __future__ import annotations

from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.splits import SplitRule, groups_in
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.store.database import Database


def kept_splits(database: Database, workspace: Workspace, checked: CheckedProfile) -> dict[str, Split]:
    """The groups that keep a split which the shares of now would not give them; empty unless shares were changed.

    Goes by every dataset that a run has trained on, or still may. What one of them held out stays held out, in whatever
    order they came. Of a dataset whose folder is gone, only what was assembled from experiences is known.
    """
    if not checked.lock.split_number:
        return {}
    with database.read() as tx:
        trained = datasets.of_ids(tx, profiles.trained_datasets(checked.profile.name))
        assembled = {each.id: datasets.groups_of(tx, each.id) for each in trained}
    found: dict[str, Split] = {}
    for dataset in trained:
        folder = workspace.data_dir / dataset.path
        for group, split in groups_in(folder) if folder.exists() else assembled[dataset.id]:
            if split is Split.HELDOUT or group not in found:
                found[group] = split
    rule = SplitRule(checked.lock.heldout_share, checked.lock.validation_share)
    return {group: split for group, split in found.items() if split is not rule.split_of(bytes.fromhex(group))}
