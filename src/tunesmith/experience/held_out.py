"""Whether enough prompts of a profile are held out to judge a run, counted with what can be in a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole
from tunesmith.datasets.splits import held_out_from
from tunesmith.experience.choose import WantedMix
from tunesmith.experience.rules.held_out import Shortage, enough_share
from tunesmith.experience.rules.mix import MixCandidate, Selection, role_of
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.store.database import Database


def shortage_of_experiences(
    database: Database,
    checked: CheckedProfile,
    found: Sequence[MixCandidate],
    selection: Selection,
    mix: WantedMix,
) -> Shortage | None:
    """What the chosen ones lack to be judged; counts only what can be in. None: enough, or nothing can be in."""
    profile = checked.profile
    policy, wanted = profile.experience.mix, profile.gate.min_cases
    pool = _pool(database, checked, "")
    able = [each for each in found if isinstance(role_of(each, policy, mix.kind), MemberRole)]
    group_of = {each.id: each.group for each in able}

    def num_cases(chosen: Selection) -> int:
        new = {group_of[p.id] for p in chosen.picks if p.split is Split.HELDOUT and p.role is not MemberRole.REPLAY}
        return min(len(pool | new), profile.evaluation.max_cases)

    def count(share: float) -> int:
        """As if that share were held out; none where too few would be left to train on."""
        moved = [replace(each, split=Split.HELDOUT) if each.held_out_from < share else each for each in able]
        chosen = mix.select(moved, profile)
        return num_cases(chosen) if chosen.num_new >= policy.min_new else 0

    num = num_cases(selection)
    if num >= wanted or not able:
        return None
    share = profile.data.heldout_share
    enough = None if checked.lock.is_split_decided else enough_share(share, wanted, count)
    return Shortage(num, wanted, len(set(group_of.values())), share, enough)


def shortage_of_dataset(database: Database, checked: CheckedProfile, dataset_id: str, folder: Path) -> Shortage | None:
    """The same of a dataset that is there, recorded or not, by its own prompts."""
    from tunesmith.datasets.reading import iter_examples

    profile = checked.profile
    max_cases, wanted = profile.evaluation.max_cases, profile.gate.min_cases
    pool = _pool(database, checked, dataset_id)
    held_out: set[str] = set()
    for example in iter_examples(folder, Split.HELDOUT):
        if min(len(pool | held_out), max_cases) >= wanted:
            return None
        if example.is_desirable:
            held_out.add(example.group)
    known = min(len(pool | held_out), max_cases)
    if known >= wanted:
        return None
    prompts = set(held_out)
    for split in (Split.TRAIN, Split.VALIDATION):
        prompts.update(example.group for example in iter_examples(folder, split) if example.is_desirable)

    def count(share: float) -> int:
        moved = {group for group in prompts if held_out_from([group]) < share}
        return min(len(pool | moved), max_cases, len(pool) + profile.data.heldout_cap)

    share = profile.data.heldout_share
    enough = None if checked.lock.is_split_decided else enough_share(share, wanted, count)
    return Shortage(known, wanted, len(prompts), share, enough)


def _pool(database: Database, checked: CheckedProfile, dataset_id: str) -> set[str]:
    profile = checked.profile
    with database.read() as tx:
        return {case.id for case in datasets.pool(tx, profile.name, dataset_id, profile.evaluation.max_cases)}
