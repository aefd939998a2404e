"""Assemble: choose experiences, prepare them as a file would be, and publish a dataset that reserves them.

Nothing is marked as used here: a reservation ends with the last run on the dataset, and only a deployed or completed
run consumes. A process that is killed leaves at most a folder that no row knows, which the next sweep removes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tunesmith.core.errors import Refused
from tunesmith.core.files import publish_folder
from tunesmith.core.ids import new_id
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.earlier_splits import kept_splits
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.listings import Dataset
from tunesmith.datasets.prepare import heldout_cases, judging_cases, options_of, remove_unrecorded, unrecorded
from tunesmith.datasets.report import DatasetReport, MixKind, MixReport, PreparedDataset, PrepareOptions
from tunesmith.experience.assembly_lines import Splitter, line_of, provenance, told_of, why_refused
from tunesmith.experience.choose import WantedMix, ever_held_out, read_candidates, refusal, report_of, wanted_mix
from tunesmith.experience.held_out import shortage_of_experiences
from tunesmith.experience.queries import candidates, members
from tunesmith.experience.queries.candidates import StoredCandidate
from tunesmith.experience.queries.experiences import NotReservable
from tunesmith.experience.queries.members import Member
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.experience.rules.held_out import Shortage
from tunesmith.experience.rules.mix import LEARNT, WAITS, Accumulated, MixCandidate, Pick, Selection
from tunesmith.profiles.checks import CheckedProfile
from tunesmith.profiles.profile import Method
from tunesmith.profiles.rules.lock import check_lock
from tunesmith.profiles.sections.experience import Mix
from tunesmith.profiles.sections.screens import Screen
from tunesmith.profiles.workspace import Workspace
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.store import events
from tunesmith.store.database import Database

MEMBERS_FILE = "members.jsonl"
WantedKind = Literal["auto", "sft", "preference"]
_SOURCE = "experiences.jsonl"
_TRIES = 5  # somebody else may take what was chosen
_PASSES = 3  # preparing may refuse what was chosen, and others take its place


@dataclass(frozen=True)
class Assembled:
    dataset: Dataset
    report: DatasetReport
    shortage: Shortage | None
    """Held-out cases that a run on it would lack."""


def kind_of(wanted: WantedKind, method: Method) -> MixKind:
    """`auto` makes what the profile's method learns from: pairs for dpo, orpo and kto, else answers."""
    if wanted != "auto":
        return wanted
    return "preference" if method in (Method.DPO, Method.ORPO, Method.KTO) else "sft"


def assemble(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    *,
    kind: WantedKind = "auto",
    accumulated: Accumulated | None = None,
    actor: str,
) -> Assembled:
    """Choose, prepare, publish and reserve; all of it, or nothing.

    `accumulated`: for a training from the bare base, with everything that was ever learnt.
    """
    remove_unrecorded(database, workspace)
    for last_try in [False] * (_TRIES - 1) + [True]:
        try:
            return _Assembly(database, workspace, checked, kind, accumulated, actor).make()
        except NotReservable:
            if last_try:
                raise
    raise AssertionError("unreachable")


@contextmanager
def rehearsed(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    *,
    kind: WantedKind = "auto",
    accumulated: Accumulated | None = None,
) -> Iterator[tuple[Path, DatasetReport, Shortage | None]]:
    """What `assemble` would publish, in a folder that is gone afterwards; records and reserves nothing."""
    from tunesmith.core.staging import staging_for

    assembly = _Assembly(database, workspace, checked, kind, accumulated, "")
    with staging_for(workspace.datasets_dir / assembly.dataset_id) as staged:
        prepared, report, _, _ = assembly.choose_and_prepare(staged)
        yield prepared.path, report, assembly.shortage


def preview(
    database: Database, workspace: Workspace, checked: CheckedProfile, *, kind: WantedKind = "auto"
) -> MixReport:
    """What would be chosen now, before preparing looks at it; changes nothing."""
    report, short = next_choice(database, workspace, checked, kind=kind)
    warning = None if short is None else short.told(is_decided=checked.lock.is_split_decided)
    return report.model_copy(update={"warning": warning})


def next_choice(
    database: Database,
    workspace: Workspace,
    checked: CheckedProfile,
    *,
    kind: WantedKind = "auto",
    accumulated: Accumulated | None = None,
) -> tuple[MixReport, Shortage | None]:
    """What `preview` reports, with the held-out cases that a run would lack."""
    profile = checked.profile
    wanted = wanted_mix(database, profile.name, kind_of(kind, profile.recipe.method), accumulated)
    kept = kept_splits(database, workspace, checked)
    splitter = Splitter(_options(checked), wanted.kind, ever_held_out(database, profile.name), kept)
    found, left_out = read_candidates(database, profile, splitter)
    policy, selection = profile.experience.mix, wanted.select(found, profile)
    report = report_of(policy, wanted, selection, {pick.id: pick for pick in selection.picks}, left_out)
    problem = refusal(profile.name, policy, wanted, selection.picks, report.left_out)
    short = shortage_of_experiences(database, checked, found, selection, wanted)
    return report.model_copy(update={"refusal": problem}), short


def _options(checked: CheckedProfile) -> PrepareOptions:
    """As for files, but for three things: of a conversation only the last answer is learnt, the mix has its own limits,
    and bad rows are told one by one: they are no reason against the others."""
    options = options_of(checked)
    limits = options.limits.model_copy(update={"max_per_source": None, "max_source_share": None})
    return options.model_copy(update={"windows": "last", "max_bad_share": 1.0, "limits": limits})


class _Assembly:
    """One try at one dataset."""

    def __init__(
        self,
        database: Database,
        workspace: Workspace,
        checked: CheckedProfile,
        kind: WantedKind,
        accumulated: Accumulated | None,
        actor: str,
    ) -> None:
        self.database = database
        self.workspace = workspace
        self.checked = checked
        self.actor = actor
        self.profile = checked.profile.name
        self.policy: Mix = checked.profile.experience.mix
        self.kind = kind_of(kind, checked.profile.recipe.method)
        self.wanted: WantedMix = wanted_mix(database, self.profile, self.kind, accumulated)
        self.options = _options(checked)
        self.dataset_id = new_id("ds")
        self.kept_splits: Mapping[str, Split] = {}
        self.shortage: Shortage | None = None
        self.refused: dict[str, str] = {}
        """What preparing left out, and why."""

    def make(self) -> Assembled:
        from tunesmith.core.staging import staging_for

        final = self.workspace.datasets_dir / self.dataset_id
        with staging_for(final) as staged:
            prepared, whole, made, stored = self.choose_and_prepare(staged)
            with (prepared.path / MEMBERS_FILE).open("wb") as sink:
                sink.writelines(provenance(stored[member.experience_id], _told(member)) for member in made)
            with unrecorded(self.database, final):
                publish_folder(prepared.path, final, whole.model_dump(mode="json"))
                dataset = self._record(final, whole, made, stored)
        return Assembled(dataset, whole, self.shortage)

    def choose_and_prepare(
        self, staged: Path
    ) -> tuple[PreparedDataset, DatasetReport, list[Member], dict[str, StoredCandidate]]:
        """Choose and prepare in a folder; what the dataset would be, its members and what they are made of."""
        self.kept_splits = kept_splits(self.database, self.workspace, self.checked)
        splitter = Splitter(self.options, self.kind, ever_held_out(self.database, self.profile), self.kept_splits)
        # choose.py pages through candidates.page and gives each its split; self.wanted.select calls mix.select
        found, left_out = read_candidates(self.database, self.checked.profile, splitter)
        selection, prepared, stored = self._prepare_until_enough(found, left_out, staged)
        kept = {pick.id: (pick, example) for pick, example in self._survivors(selection, prepared)}
        left_out.update(self.refused.values())
        picks = {experience_id: pick for experience_id, (pick, _) in kept.items()}
        report = report_of(self.policy, self.wanted, selection, picks, left_out)
        self._check(picks.values(), report.left_out)
        self.shortage = shortage_of_experiences(
            self.database,
            self.checked,
            [each for each in found if each.id not in self.refused],
            replace(selection, picks=tuple(picks.values())),
            self.wanted,
        )
        made = [self._member(stored[i], pick, example) for i, (pick, example) in kept.items()]
        return prepared, prepared.report.model_copy(update={"mix": report}), made, stored

    def _prepare_until_enough(
        self, found: list[MixCandidate], left_out: Counter[str], staged: Path
    ) -> tuple[Selection, PreparedDataset, dict[str, StoredCandidate]]:
        """Choose and prepare; where preparing refuses some of them, others take their places."""
        from tunesmith.datasets.prepare_folder import prepare

        cases = judging_cases(self.database, self.checked)
        trusts_base = self.policy.unrated_base
        for number in range(_PASSES):
            able = [candidate for candidate in found if candidate.id not in self.refused]
            selection = self.wanted.select(able, self.checked.profile)
            self._check(selection.picks, Counter(selection.left_out) + left_out + Counter(self.refused.values()))
            with self.database.read() as tx:
                stored = candidates.by_ids(tx, [pick.id for pick in selection.picks], trusts_base=trusts_base)
            if len(stored) < len(selection.picks):
                raise NotReservable("an experience vanished while a dataset was assembled from it; try again")
            refuse_other_than_chosen(able, stored)
            source = staged / _SOURCE
            with source.open("wb") as sink:
                sink.writelines(line_of(stored[pick.id], self.kind) + b"\n" for pick in selection.picks)
            folder = staged / f"pass-{number}" / "dataset"  # a level deeper: the lock on `staged` is ours
            prepared = prepare(
                [source], folder, self._options_for(selection, stored), cases=cases, kept=self.kept_splits
            )
            kept = {pick.id for pick, _ in self._survivors(selection, prepared)}
            lost = why_refused(selection, prepared, kept)
            self.refused.update(lost)
            if not lost or selection.left_out.keys().isdisjoint((WAITS, LEARNT)):
                break
        return selection, prepared, stored

    def _check(self, picks: Iterable[Pick], left_out: Mapping[str, int]) -> None:
        problem = refusal(self.profile, self.policy, self.wanted, picks, left_out)
        if problem is not None:
            raise Refused(problem)

    def _options_for(self, selection: Selection, stored: Mapping[str, StoredCandidate]) -> PrepareOptions:
        """What a reviewer has overruled stays overruled: the screens see the same text once more."""
        overruled = {
            line: tuple(map(Screen, stored[pick.id].overruled))
            for line, pick in enumerate(selection.picks, start=1)
            if stored[pick.id].overruled
        }
        return self.options.model_copy(update={"overruled": overruled})

    def _survivors(self, selection: Selection, prepared: PreparedDataset) -> Iterator[tuple[Pick, Example]]:
        """What preparing kept, by the line it was written to."""
        from tunesmith.datasets.reading import iter_examples

        for split in Split:
            for example in iter_examples(prepared.path, split):
                pick = selection.picks[example.line - 1]
                if pick.split is not split:
                    raise AssertionError(f"experience {pick.id} was to be in {pick.split} and is in {split}")
                yield pick, example

    def _member(self, candidate: StoredCandidate, pick: Pick, example: Example) -> Member:
        return Member(
            dataset_id=self.dataset_id,
            experience_id=candidate.id,
            example_id=example.id,
            group_id=example.group,
            split=pick.split,
            role=pick.role,
            reason=f"{pick.reason} ({told_of(candidate)})",
        )

    def _record(
        self, folder: Path, report: DatasetReport, made: list[Member], stored: Mapping[str, StoredCandidate]
    ) -> Dataset:
        """Dataset, members, reservations, held-out cases and what went back, in one transaction."""
        checked, actor = self.checked, self.actor
        cases = heldout_cases(folder, checked.profile.data.heldout_cap)
        with self.database.write(bulk=True) as tx:
            check_lock(self.profile, profiles.lock(tx, self.profile, checked.lock, actor=actor), checked.lock)
            dataset = datasets.add(
                tx,
                self.dataset_id,
                self.profile,
                path=folder.relative_to(self.workspace.data_dir).as_posix(),
                fingerprint=report.fingerprint,
                kind=report.kind.value,
                counts={split.value: num for split, num in report.counts.items()},
                actor=actor,
            )
            # also reserves the new ones; raises NotReservable if another dataset has one by now
            members.add(tx, made, actor=actor)
            ids = [member.experience_id for member in made]
            _refuse_changed(candidates.by_ids(tx, ids, trusts_base=self.policy.unrated_base), stored, made)
            datasets.add_cases(tx, self.profile, self.dataset_id, cases)
            detail = {} if report.mix is None else report.mix.model_dump(mode="json")
            events.record(tx, "dataset", self.dataset_id, "assembled", actor=actor, detail=detail)
            for experience_id, why in self.refused.items():
                reason = f"not in dataset {self.dataset_id}: {why}"
                events.record(tx, "experience", experience_id, "left_out", actor=actor, reason=reason)
        return dataset


def refuse_other_than_chosen(chosen: Iterable[MixCandidate], stored: Mapping[str, StoredCandidate]) -> None:
    """What was chosen by its class and correction must still have them when its text is read."""
    for each in chosen:
        now = stored.get(each.id)
        if now and (now.class_name, now.correction is not None) != (each.class_name, each.has_correction):
            raise NotReservable(f"experience {each.id} changed while a dataset was assembled from it; try again")


def _refuse_changed(
    now: Mapping[str, StoredCandidate], read: Mapping[str, StoredCandidate], made: Sequence[Member]
) -> None:
    """What was rated, corrected or forgotten since it was read must be looked at again. Its row is locked by now."""
    for member in made:
        before, after = read[member.experience_id], now[member.experience_id]
        state = ExperienceState.RESERVED if member.is_new else ExperienceState.CONSUMED
        if (after.class_name, after.correction, after.state) != (before.class_name, before.correction, state):
            raise NotReservable(
                f"experience {member.experience_id} changed while a dataset was assembled from it; try again"
            )


def _told(member: Member) -> dict[str, str]:
    return {
        "example": member.example_id,
        "group": member.group_id,
        "split": member.split,
        "role": member.role,
        "reason": member.reason,
    }
