"""Choose: what a dataset from experiences could be made of, what is chosen, and why nothing would be made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole, MixKind, MixReport
from tunesmith.experience.assembly_lines import Splitter
from tunesmith.experience.queries import candidates
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.rules.mix import Accumulated, MixCandidate, Pick, Selection, select
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.sections.experience import Mix
from tunesmith.store.database import Database

_PAGE = 2000


@dataclass(frozen=True)
class WantedMix:
    """What is to be chosen, beside what the profile says of its mix."""

    kind: MixKind
    accumulated: Accumulated | None = None
    """For a training from the bare base: everything that was ever learnt, too."""
    is_first_round: bool = False

    @property
    def counts_learnt(self) -> bool:
        """Whether what was learnt before counts towards `min_new`."""
        return self.accumulated is not None and not self.accumulated.needs_new

    def select(self, able: Iterable[MixCandidate], profile: Profile) -> Selection:
        return select(
            able,
            profile.experience.mix,
            self.kind,
            profile.data.heldout_cap,
            is_first_round=self.is_first_round,
            accumulated=self.accumulated,
        )


def refusal(
    profile: str, policy: Mix, wanted: WantedMix, picks: Iterable[Pick], left_out: Mapping[str, int]
) -> str | None:
    """Why no dataset is made of what was chosen; None: nothing speaks against it."""
    chosen = list(picks)
    trained = [pick for pick in chosen if pick.split is Split.TRAIN]
    num = len(trained) if wanted.counts_learnt else sum(pick.role is not MemberRole.REPLAY for pick in trained)
    told = "; ".join(f"{num} {why}" for why, num in sorted(left_out.items(), key=lambda item: -item[1])[:4])
    if not num and not left_out:
        return (
            f"{profile} has no experience to assemble a dataset from; add some (tunesmith experience add), "
            f"or name files or a dataset: tunesmith run submit {profile} FILES"
        )
    if num < policy.min_new:
        return (
            f"only {num}{'' if wanted.counts_learnt else ' new'} experiences of {profile} can be trained on, and a "
            f"dataset wants {policy.min_new} (experience.mix.min_new){f'; not in: {told}' if told else ''}. "
            "Capture, rate or correct more, or lower it (`dataset assemble --min-new`)"
        )
    if not any(pick.split is Split.HELDOUT for pick in chosen):
        return (
            f"no experience of {profile} whose prompt is held out is free, so nothing could judge what is learnt from "
            f"the others{f'; not in: {told}' if told else ''}. What other datasets have reserved comes back when their "
            "runs have ended, or 24 hours after they were assembled; else capture answers to other prompts"
        )
    return None


def ever_held_out(database: Database, profile: str) -> set[str]:
    with database.read() as tx:
        return candidates.held_out_groups(tx, profile)


def wanted_mix(database: Database, profile: str, kind: MixKind, accumulated: Accumulated | None) -> WantedMix:
    with database.read() as tx:
        return WantedMix(kind, accumulated, is_first_round=not candidates.has_learnt(tx, profile))


def read_candidates(
    database: Database, profile: Profile, splitter: Splitter
) -> tuple[list[MixCandidate], Counter[str]]:
    """Every candidate with its split, and why others are none. Page by page: no transaction is long."""
    found: list[MixCandidate] = []
    with database.read() as tx:
        left_out = Counter(candidates.tally_of_others(tx, profile.name))
    last, trusts_base = 0, profile.experience.mix.unrated_base
    while True:
        with database.read() as tx:
            some = candidates.page(tx, profile.name, last, _PAGE, trusts_base=trusts_base)
        if not some:
            return found, left_out
        last = some[-1].seq
        for each in some:
            place = splitter.place_of(each)
            if isinstance(place, str):
                left_out[place] += 1
                continue
            found.append(
                MixCandidate(
                    id=each.id,
                    seq=each.seq,
                    class_name=each.class_name,
                    has_correction=each.correction is not None,
                    is_consumed=each.state is ExperienceState.CONSUMED,
                    split=place.split,
                    group=place.group,
                    held_out_from=place.held_out_from,
                    template=each.template,
                    source=each.source,
                    task_type=each.task_type,
                    exclusion=each.exclusion,
                )
            )


def report_of(
    policy: Mix, wanted: WantedMix, selection: Selection, kept: Mapping[str, Pick], left_out: Counter[str]
) -> MixReport:
    """What was chosen, by role; `kept` is what preparing has left of it, by experience."""
    roles = Counter(pick.role for pick in kept.values() if pick.split is Split.TRAIN)
    return MixReport(
        policy=policy,
        kind=wanted.kind,
        max_accumulated=None if wanted.accumulated is None else wanted.accumulated.most,
        roles={role: roles[role] for role in MemberRole},
        num_new=roles[MemberRole.GOLD] + roles[MemberRole.CORRECTED],
        num_reserved=sum(pick.role is not MemberRole.REPLAY for pick in kept.values()),
        shortages=selection.shortages,
        left_out=dict(sorted((Counter(selection.left_out) + left_out).items())),
    )
