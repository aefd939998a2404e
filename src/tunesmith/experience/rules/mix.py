"""The mix: which experiences make the next dataset, in which role and why. Pure: values in, values and reasons out.

Shortage rules, in this order:

1. Corrected ones that are missing are replaced by gold ones, and gold ones that are missing by corrected ones.
2. Where both are missing, there are fewer examples in all: replay never fills a place of new data, and shrinks with it.
3. Replay that is missing stays missing: what was never learnt waits for its turn instead of being burnt at once. But
   where nothing was ever learnt, there can be no replay, and all places are for new ones.
4. Of one template, and of one source, no more than its share is trained, once there are two to choose from.
5. What the hash of its prompt holds out, or gives to validation, is never trained. It comes along beside the places, as
   large a part of it as of what can be trained, and at least `min_eval_examples`. Where there are fewer, what was held
   out or validated on before comes along again.

A dataset for a training from the bare base is another thing: nothing is learnt yet, so everything that was ever learnt
is in again, beside what is new, up to a number of its own (`Accumulated`).

The same candidates, policy and seed give the same choice, whatever order they come in.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tunesmith.datasets.example import Split
from tunesmith.datasets.report import MemberRole, MixKind
from tunesmith.experience.rules.experience import ExperienceClass
from tunesmith.models.rules import AdapterState
from tunesmith.profiles.sections.experience import Mix

NEVER_LIVE = "answered by a version that never went live, and nobody rated it"


TAKEN_BACK = "answered by a version that was rolled back or revoked, and nobody rated it"


BASE_BESIDE_LIVE = "answered by the bare base while a version was live, and nobody rated it"
BASE_UNRATED = "the bare base gave it, and nobody has rated it"


_EXCLUSIONS = {
    AdapterState.CANDIDATE: (NEVER_LIVE, "which never went live"),
    AdapterState.ROLLED_BACK: (TAKEN_BACK, "which was rolled back"),
    AdapterState.REVOKED: (TAKEN_BACK, "which was revoked"),
}


WAITS = "new, and no place left in this round"
FIRST_ROUND = "nothing was learnt before, so nothing is repeated: all places are for new ones"
LEARNT = "learnt already, and not drawn to be repeated"
FULL = {"template": "a template that has its share already", "source": "a source that has its share already"}


@dataclass(frozen=True, slots=True)
class MixCandidate:
    """One experience to choose from."""

    id: str
    seq: int
    """Its place in the order they were captured in."""
    class_name: ExperienceClass
    has_correction: bool
    is_consumed: bool
    """It was learnt before."""
    split: Split
    """Where the hash of its prompt puts it."""
    template: str | None = None
    source: str | None = None
    task_type: str | None = None
    exclusion: str | None = None
    """Why it is not gold although nobody complained (see `ServingHistory`)."""
    group: str = ""
    """Of its prompt."""
    held_out_from: float = 1.0
    """Its prompt is held out if `data.heldout_share` is larger than this."""


@dataclass(frozen=True)
class Accumulated:
    """A dataset for a training from the bare base: what was ever learnt, evenly over its age, and what is new."""

    most: int
    """Examples to train on."""
    needs_new: bool = True
    """Whether `min_new` of them must be new; else what was learnt before counts as well."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One experience that is in."""

    id: str
    role: MemberRole
    split: Split
    reason: str


@dataclass(frozen=True)
class Selection:
    picks: tuple[Pick, ...]
    """Corrected ones first, then gold, then replay, each newest first: of two answers to a question the first stays."""
    left_out: Mapping[str, int]
    """Why others are not in, with how many of each."""
    shortages: tuple[str, ...]
    """Which rules had to be used."""

    @property
    def num_new(self) -> int:
        """How many are trained that were never learnt."""
        return sum(pick.split is Split.TRAIN and pick.role is not MemberRole.REPLAY for pick in self.picks)

    @property
    def num_trained(self) -> int:
        return sum(pick.split is Split.TRAIN for pick in self.picks)


def role_of(candidate: MixCandidate, policy: Mix, kind: MixKind) -> MemberRole | str:
    """Its role, or why it cannot be in."""
    if candidate.class_name is ExperienceClass.QUARANTINED:
        return "quarantined"
    if policy.task_types and candidate.task_type not in policy.task_types:
        return "of another task type"
    is_gold = candidate.class_name is ExperienceClass.GOLD
    if kind == "preference" and not candidate.has_correction:
        return "without a correction to make a pair of"
    if not is_gold and not candidate.has_correction:
        return candidate.exclusion or f"{candidate.class_name} and not corrected"
    if candidate.is_consumed:
        return MemberRole.REPLAY
    return MemberRole.GOLD if is_gold and kind == "sft" else MemberRole.CORRECTED


def select(
    candidates: Iterable[MixCandidate],
    policy: Mix,
    kind: MixKind,
    max_heldout: int,
    *,
    is_first_round: bool = False,
    accumulated: Accumulated | None = None,
) -> Selection:
    """Choose by the rules above; any input has an answer, also one with nothing in it.

    `is_first_round`: the profile has never learnt anything.
    """
    left_out: Counter[str] = Counter()
    able: list[tuple[MixCandidate, MemberRole]] = []
    for candidate in candidates:
        role = role_of(candidate, policy, kind)
        if isinstance(role, MemberRole):
            able.append((candidate, role))
        else:
            left_out[role] += 1
    to_train = [pair for pair in able if pair[0].split is Split.TRAIN]
    if accumulated is not None:
        room = _accumulated_room(policy, to_train, accumulated.most)
    else:
        room = _room(policy.model_copy(update={"replay": 0.0}) if is_first_round else policy)
    is_told = is_first_round and accumulated is None and policy.replay_places > 0
    trained = _Places(policy, room, to_train)
    picks = trained.fill()
    min_beside = policy.min_eval_examples if accumulated is None else max(1, policy.min_eval_examples)
    left_out.update(trained.left_out)
    for split, most in ((Split.VALIDATION, policy.max_examples), (Split.HELDOUT, max_heldout)):
        beside = sorted((pair for pair in able if pair[0].split is split), key=lambda pair: pair[0].seq)
        new = [pair for pair in beside if pair[1] is not MemberRole.REPLAY]
        old = [pair for pair in beside if pair[1] is MemberRole.REPLAY]
        taken = _spread(new, min(most, max(min_beside, math.ceil(len(new) * trained.share_taken))))
        again = _spread(old, max(0, min(most, min_beside) - len(taken)))
        picks += [(candidate, role, _BESIDE[split]) for candidate, role in (*taken, *again)]
        left_out[WAITS] += len(new) - len(taken)
        left_out[f"{_BESIDE[split]}, and was in before"] += len(old) - len(again)
    order = {MemberRole.CORRECTED: 0, MemberRole.GOLD: 1, MemberRole.REPLAY: 2}
    picks.sort(key=lambda pick: (order[pick[1]], -pick[0].seq, pick[0].id))
    return Selection(
        tuple(Pick(candidate.id, role, candidate.split, reason) for candidate, role, reason in picks),
        {why: num for why, num in sorted(left_out.items()) if num},
        (*((FIRST_ROUND,) if is_told else ()), *trained.shortages),
    )


_BESIDE = {Split.VALIDATION: "its prompt is for validation", Split.HELDOUT: "its prompt is held out"}
_Picked = tuple[MixCandidate, MemberRole, str]


@dataclass(frozen=True)
class _Room:
    """How many places the training split has, by role."""

    new: int
    corrected: int
    """Of the new ones."""
    replay: int
    is_accumulated: bool = False
    """Replay keeps its places however few are new, and nothing that is missing is worth a word."""


def _room(policy: Mix) -> _Room:
    return _Room(policy.new_places, policy.corrected_places, policy.replay_places)


def _accumulated_room(policy: Mix, able: Sequence[tuple[MixCandidate, MemberRole]], most: int) -> _Room:
    """All of them, or as many of the new as of the learnt; but the new have the places of any other round at least."""
    num_new = sum(role is not MemberRole.REPLAY for _, role in able)
    new = num_new
    if len(able) > most:
        new = min(num_new, max(min(policy.new_places, most), most * num_new // len(able)))
    corrected = round(new * policy.corrected / (policy.gold + policy.corrected))
    return _Room(new, corrected, min(most - new, len(able) - num_new), is_accumulated=True)


class _Places:
    """The places of the training split, filled role by role."""

    def __init__(self, policy: Mix, room: _Room, able: Sequence[tuple[MixCandidate, MemberRole]]) -> None:
        self._room = room
        self._queues = {role: _drawn([c for c, r in able if r is role], policy.seed) for role in MemberRole}
        if room.is_accumulated:
            self._queues[MemberRole.REPLAY] = _drawn_by_age(self._queues[MemberRole.REPLAY], room.replay)
        self._taken: Counter[tuple[str, str]] = Counter()
        num_places = room.new + room.replay if room.is_accumulated else policy.max_examples
        shares = {"template": policy.max_template_share, "source": policy.max_source_share}
        self._most = {
            what: max(1, int(num_places * share))
            for what, share in shares.items()
            if len({getattr(candidate, what) for candidate, _ in able} - {None}) > 1
        }
        self._num_able = sum(role is not MemberRole.REPLAY for _, role in able)
        self.left_out: Counter[str] = Counter()
        self.shortages: list[str] = []
        self.share_taken = 0.0
        """Of the new ones that can be trained."""

    def fill(self) -> list[_Picked]:
        room, gold, corrected = self._room, MemberRole.GOLD, MemberRole.CORRECTED
        picked = self._take(corrected, room.corrected, "corrected")
        missing = room.corrected - len(picked)
        picked += self._take(gold, room.new - room.corrected, "gold")
        if missing:
            instead = self._take(gold, missing, "gold, in the place of a corrected one")
            picked += instead
            self._short("corrected", missing, f"gold took {len(instead)} of their places")
        elif (missing := room.new - len(picked)) > 0:
            instead = self._take(corrected, missing, "corrected, in the place of a gold one")
            picked += instead
            self._short("gold", missing, f"corrected ones took {len(instead)} of their places")
        if (missing := room.new - len(picked)) > 0:
            self._short("new", missing, "fewer in all, and replay shrinks with them")
        self.share_taken = len(picked) / max(1, self._num_able)
        picked += self._replayed(len(picked))
        for role, queue in self._queues.items():
            self.left_out[LEARNT if role is MemberRole.REPLAY else WAITS] += len(queue)
        return picked

    def _replayed(self, num_new: int) -> list[_Picked]:
        room = self._room
        if room.is_accumulated:
            return self._take(MemberRole.REPLAY, room.replay, "learnt before, and learnt again from base")
        places = room.replay * num_new // room.new
        replayed = self._take(MemberRole.REPLAY, places, "learnt before, and repeated so that it is not forgotten")
        if len(replayed) < places:
            self._short("replay", places - len(replayed), "their places stay empty")
        return replayed

    def _short(self, what: str, num: int, then: str) -> None:
        if not self._room.is_accumulated:
            self.shortages.append(f"{num} {what} missing: {then}")

    def _take(self, role: MemberRole, num: int, reason: str) -> list[_Picked]:
        """The next of a role, without those whose template or source has its share already."""
        queue = self._queues[role]
        picked: list[_Picked] = []
        while queue and len(picked) < num:
            candidate = queue.pop()
            owners = [
                (what, str(getattr(candidate, what))) for what in self._most if getattr(candidate, what) is not None
            ]
            full = next((what for what, name in owners if self._taken[what, name] >= self._most[what]), None)
            if full is not None:
                self.left_out[FULL[full]] += 1
                continue
            self._taken.update(owners)
            picked.append((candidate, role, reason))
        return picked


def _drawn(candidates: Sequence[MixCandidate], seed: int) -> list[MixCandidate]:
    """In the order of a lottery that depends on the seed and their ids only; the last is drawn first."""

    def lot(candidate: MixCandidate) -> bytes:
        return hashlib.sha256(f"{seed} {candidate.id}".encode()).digest()

    return sorted(candidates, key=lot)


def _drawn_by_age(drawn: list[MixCandidate], num: int) -> list[MixCandidate]:
    """The same lottery among neighbours in age: of each of `num` equal spans one is drawn, then the others."""
    if not 0 < num < len(drawn):
        return drawn
    by_age = {candidate.id: place for place, candidate in enumerate(sorted(drawn, key=lambda each: each.seq))}
    winners: dict[int, MixCandidate] = {}
    for candidate in drawn:  # the last one wins, as it does where age does not matter
        winners[by_age[candidate.id] * num // len(drawn)] = candidate
    first = {candidate.id for candidate in winners.values()}
    return [each for each in drawn if each.id not in first] + [each for each in drawn if each.id in first]


def _spread(ordered: list[tuple[MixCandidate, MemberRole]], most: int) -> list[tuple[MixCandidate, MemberRole]]:
    """At most so many, evenly over the order they came in, so that old and new both stay represented."""
    if len(ordered) <= most:
        return ordered
    return [ordered[place * len(ordered) // most] for place in range(most)]


@dataclass(frozen=True)
class Exclusion:
    """Why an unrated answer is not gold."""

    kind: str
    """The same for all answers that are excluded for the same reason; they are counted by it."""
    reason: str


@dataclass(frozen=True)
class ServingHistory:
    """Which versions of a profile were live, and when.

    Decides whether an unrated answer may be gold: not if its version never went live, was rolled back or was revoked,
    nor if the bare base served it.
    """

    profile: str
    states: Mapping[str, AdapterState]
    """Of each version, by its name."""
    spans: Sequence[tuple[datetime, datetime | None]]
    """From when till when some version was live; None: it still is. Outside of them the bare base was."""

    trusts_base: bool = False
    """Unrated answers of the bare base may be gold, where it was what was live (experience.mix.unrated_base)."""

    def exclusion(self, served_by: str | None, at: datetime, *, is_served: bool = False) -> Exclusion | None:
        """Return why an unrated answer of that time is not gold. None if it may be, or its version is unknown.

        `is_served`: it came through `tunesmith serve`; what people added or imported is their own data.
        """
        is_base = served_by == f"{self.profile}@base"
        if is_base and any(begin <= at and (end is None or at < end) for begin, end in self.spans):
            return Exclusion(BASE_BESIDE_LIVE, "answered by the bare base while a version was live")
        if is_served and (is_base or served_by is None) and not self.trusts_base:
            return Exclusion(BASE_UNRATED, BASE_UNRATED)
        state = self.states.get(served_by) if served_by is not None else None
        if state not in _EXCLUSIONS:
            return None
        kind, reason = _EXCLUSIONS[state]
        return Exclusion(kind, f"answered by {served_by}, {reason}")
