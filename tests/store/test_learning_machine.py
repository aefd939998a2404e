"""Random walks over capture, feedback, review, assembly, runs and erasure: what must hold is checked after every step.

The walk is the same every time; `pytest -s` prints its seed. The soak twin walks further, along other ways each time.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.databases import Postgres
from support.learning_checks import Remembered, check_all, forgotten_words
from support.learning_world import World
from support.rows import ACTOR
from support.workspaces import PROFILE
from tunesmith.core.errors import Conflict, DataError, Refused
from tunesmith.curriculum.queries import corrections
from tunesmith.curriculum.queries.corrections import Correction
from tunesmith.experience.forgetting import forget
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import CorrectionState
from tunesmith.models import listings
from tunesmith.models.rules import AdapterState
from tunesmith.runs.queries import runs
from tunesmith.runs.queries.runs import Run
from tunesmith.runs.rules.run import RUN, RunState

_PLACES = 14
_pick = st.integers(0, 1_000_000)
_ENDS = [*sorted(RUN.finished), *[RunState.DEPLOYED] * 5, RunState.COMPLETED]  # what follows a success is the longest
_RATERS = ["ann", "bob", "cy"]
_WAYS = ["well", "well", "well", "rejected", "held", "failed", "lost", "interrupted"]
_ALLOWED = (Refused, DataError)  # what a user may be told: not now, or too little to hold anything out


class LearningMachine(RuleBasedStateMachine):
    """Users, reviewers, teachers, workers and a clock, in any order."""

    def __init__(self, open_world: Callable[[], World]) -> None:
        super().__init__()
        self.world = open_world()
        self.client = self.world.client
        self.known = Remembered()
        self.last = self.world.seen()
        """As it was after the last step: what the next one may be is asked very often."""
        self.talks: dict[str, list[dict[str, str]]] = {}
        self._words = count(1)

    def teardown(self) -> None:
        self.world.close()

    # --- capture ---

    @initialize(places=st.lists(st.integers(0, _PLACES), max_size=8))
    def first_captures(self, places: list[int]) -> None:
        """Enough of everything for a first dataset, and perhaps for a second one."""
        for place in range(_PLACES):
            self._capture(place, "gold")
        self.client.datasets.assemble(PROFILE, kind="sft", seed=0)
        for place in places:
            self._capture(place + _PLACES // 2, "gold")

    @rule(
        places=st.lists(st.integers(0, _PLACES), min_size=1, max_size=5),
        kind=st.sampled_from(["gold", "gold", "poor", "suspect", "longer", "complaint"]),
    )
    def capture(self, places: list[int], kind: str) -> None:
        for place in places:
            self._capture(place, kind)

    def _capture(self, place: int, kind: str) -> None:
        word = self._word()
        said = {"suspect": f"Write to {word}@mail.example.org.", "poor": f"Tell me about the town {place} {word}"}
        talk = _turn(f"Tell me about the town {place}", said.get(kind, f"It is old and quiet, {word}."))
        if kind == "longer":
            talk = [*_turn(talk[0]["content"], "It is old."), *_turn(f"And its river, {word}?", f"It is wide, {word}.")]
        elif kind == "complaint":
            talk = _turn(f"No, that is wrong, {word}", f"Sorry, {word}.")
        self._add(talk, word)

    def _add(self, talk: list[dict[str, str]], word: str) -> None:
        session = f"session {int(word[2:6]) % 3}"
        about: Any = {"key": f"call {word}", "source": f"app {word}", "reference": f"as {word}", "session": session}
        added = self.client.experiences.add(PROFILE, talk, **about)
        assert added.is_new
        self.known.keys[added.id] = about["key"]
        self.known.words[word].add(added.id)
        self.talks[added.id] = talk

    def _word(self) -> str:
        """One that nobody has said yet."""
        return f"zq{next(self._words):04d}qz"

    @rule(pick=_pick)
    def capture_again(self, pick: int) -> None:
        """The same key is the same experience, whatever has become of it."""
        one = self._one(pick)
        before = self.last.experiences[one]
        again = self.client.experiences.add(PROFILE, self.talks[one], key=self.known.keys[one])
        assert (again.id, again.is_new) == (one, False)
        other = _turn("Something else?", "Yes.")
        if before["state"] == "forgotten":
            assert self.client.experiences.add(PROFILE, other, key=self.known.keys[one]).id == one
        else:
            with pytest.raises(Conflict):
                self.client.experiences.add(PROFILE, other, key=self.known.keys[one])
        assert self.world.seen().experiences[one] == before

    @rule(pick=_pick)
    def capture_a_copy(self, pick: int) -> None:
        """The same words under another key."""
        one = self._one(pick)
        if self.last.experiences[one]["state"] == "forgotten":
            return
        copied = [word for word, owners in self.known.words.items() if one in owners and _says(self.talks[one], word)]
        self._add(self.talks[one], self._word())
        for word in copied:
            self.known.words[word].add(list(self.known.keys)[-1])

    def _one(self, pick: int) -> str:
        return list(self.known.keys)[pick % len(self.known.keys)]

    # --- what people and teachers say ---

    @rule(
        pick=_pick, value=st.sampled_from(["up", "down", "partial", None]), rater=st.sampled_from(["ann", "bob", "cy"])
    )
    def rate(self, pick: int, value: str | None, rater: str) -> None:
        one, word = self._one(pick), self._word()
        with self._refusal_of_forgotten(one):
            self.client.feedback.add(one, value, rater=rater, comment=f"So says {word}")
            self.known.words[word].add(one)

    @rule(pick=_pick, num=st.integers(1, 4), is_suspect=st.booleans())
    def correct(self, pick: int, num: int, is_suspect: bool) -> None:
        for place in range(num):
            one, word = self._one(pick + place), self._word()
            better = f"Ask {word}@mail.example.org." if is_suspect else f"It is new and loud, {word}."
            with self._refusal_of_forgotten(one):
                self.client.feedback.add(one, 0.4, rater="ann", correction=better)
                self.known.words[word].add(one)

    @rule(pick=_pick)
    def teach(self, pick: int) -> None:
        """A teacher's answer is accepted, where the curriculum would ask for one."""
        one, word = self._one(pick), self._word()
        with self.world.database.write() as tx:
            experiences.lock(tx, one)
            if corrections.entry(tx, PROFILE, one) is None:
                return
            said = Correction("big", CorrectionState.ACCEPTED, f"better, {word}", f"It is calm, {word}.", {}, True)
            corrections.add(tx, one, PROFILE, said, actor=ACTOR, paid_by=None)
        self.known.words[word].add(one)

    def _refusal_of_forgotten(self, one: str) -> Any:
        is_gone = self.last.experiences[one]["state"] == "forgotten"
        return pytest.raises(Refused, match="was forgotten") if is_gone else nullcontext()

    @rule(pick=_pick, decision=st.sampled_from(["accept", "reject"]), waiting=st.booleans())
    def review(self, pick: int, decision: str, waiting: bool) -> None:
        queue = [each.id for each in self.client.experiences.in_review(PROFILE, limit=100)] if waiting else []
        one, word = queue[pick % len(queue)] if queue else self._one(pick), self._word()
        with suppress(Refused):
            if self.client.experiences.review([one], decision, reason=f"seen by {word}")[0].is_new:
                self.known.words[word].add(one)

    # --- datasets and runs ---

    @rule(kind=st.sampled_from(["sft", "sft", "preference"]), seed_=st.integers(0, 3))
    def assemble(self, kind: Any, seed_: int) -> None:
        unfit = self.last.unfit
        with suppress(*_ALLOWED):
            dataset, _ = self.client.datasets.assemble(PROFILE, kind=kind, seed=seed_)
            self._check_members(dataset.id, unfit)
            self.client.datasets.verify(dataset.id)

    def _check_members(self, dataset_id: str, unfit: set[str]) -> None:
        inside = {each["experience_id"] for each in self.world.seen().members if each["dataset_id"] == dataset_id}
        assert not inside & unfit, "what waits for a person, is quarantined or forgotten is in a new dataset"

    def _datasets(self) -> list[str]:
        return list(self.last.datasets)

    @precondition(lambda self: self.last.datasets)
    @rule(pick=_pick, dry_run=st.booleans(), never=st.booleans())
    def submit(self, pick: int, dry_run: bool, never: bool) -> None:
        self._submit(pick, dry_run=dry_run, overrides=_never(never))

    def _submit(self, pick: int, **wishes: Any) -> str | None:
        names = self._datasets()
        dataset_id, unfit = names[pick % len(names)], self.last.unfit
        with suppress(Refused):
            run = self.client.runs.submit(PROFILE, dataset_id, **{"start": "base", **wishes})
            new = {each["experience_id"] for each in self.last.new_of(dataset_id)}
            gone = {each for each in new if self.last.experiences[each]["state"] == "forgotten"}
            assert not (new - gone) & unfit, "a run was let in on what waits for a person, or is quarantined"
            return run.id
        return None

    @rule()
    def submit_on_what_is_assembled(self) -> None:
        unfit = self.last.unfit
        with suppress(*_ALLOWED):
            run = self.client.runs.submit(PROFILE)
            self._check_members(run.dataset_id, unfit)

    @precondition(lambda self: self.last.datasets)
    @rule(pick=_pick, end=st.sampled_from(_ENDS))
    def whole_run(self, pick: int, end: RunState) -> None:
        """A run from its submission to this end, without anybody in between."""
        wishes = {"dry_run": end is RunState.VALIDATED, "overrides": _never(end is RunState.COMPLETED)}
        run_id = self._submit(pick, **wishes)
        if run_id is None:
            return
        if end is RunState.SKIPPED:
            self.client.runs.skip(run_id)
        elif end is RunState.CANCELLED:
            self.client.runs.cancel(run_id)
        else:
            self.world.finish(run_id, end)
        state = self.world.run(run_id).state
        others = [run for run in self._runs() if run.state in (RunState.WATCHING, RunState.DEPLOYING)]
        assert state is end or (others and state in RUN.unfinished), f"{state} instead of {end}"

    @precondition(lambda self: len(self.last.runs) > len(self.last.unfinished))
    @rule(pick=_pick)
    def retry(self, pick: int) -> None:
        ended = [run for run in self._runs() if run.finished_at is not None]
        with suppress(Refused):
            self.client.runs.retry(ended[pick % len(ended)].id)

    def _runs(self) -> list[Run]:
        with self.world.database.read() as tx:
            return sorted(runs.listing(tx, limit=1000), key=lambda run: run.seq)

    def _open(self) -> list[Run]:
        return [run for run in self._runs() if run.finished_at is None]

    @precondition(lambda self: self.last.unfinished)
    @rule(pick=_pick)
    def claim(self, pick: int) -> None:
        self.world.claim(self._an_open_one(pick))

    def _an_open_one(self, pick: int) -> Run:
        able = self._open()
        return able[pick % len(able)]

    @precondition(lambda self: self.last.unfinished)
    @rule(pick=_pick, way=st.sampled_from(_WAYS))
    def advance(self, pick: int, way: str) -> None:
        self.world.advance(self._an_open_one(pick), way)

    @precondition(lambda self: self.last.unfinished)
    @rule(pick=_pick, wish=st.sampled_from(["cancel", "skip", "pause", "stop", "resume"]))
    def wish(self, pick: int, wish: str) -> None:
        with suppress(Refused):
            getattr(self.client.runs, wish)(self._an_open_one(pick).id)

    @precondition(lambda self: any(run["state"] == "held" for run in self.last.unfinished))
    @rule(pick=_pick, said=st.sampled_from(["approve", "reject", "evaluate"]))
    def decide(self, pick: int, said: str) -> None:
        held = [run for run in self._runs() if run.state is RunState.HELD]
        adapter = self.world.adapter_of(held[pick % len(held)].id)
        with suppress(Refused):
            getattr(self.client.adapters, said)(adapter.id)

    @precondition(lambda self: any(each["state"] == "live" for each in self.last.adapters.values()))
    @rule()
    def roll_back(self) -> None:
        self.client.adapters.rollback(PROFILE, reason="as the machine wants")

    @precondition(lambda self: any(each["state"] == "live" for each in self.last.adapters.values()))
    @rule(pick=_pick)
    def revoke(self, pick: int) -> None:
        with self.world.database.read() as tx:
            able = [
                each
                for each in listings.adapters(tx, profile=PROFILE, limit=100)
                if each.state is not AdapterState.REVOKED
            ]
        with suppress(Refused):
            self.client.adapters.revoke(able[pick % len(able)].id, "as the machine wants")

    # --- time and erasure ---

    @rule(hours=st.sampled_from([1.0, 25.0, 24.0 * 8]))
    def sweep_later(self, hours: float) -> None:
        self.world.let_time_pass(hours)
        self.world.sweep()
        self.known.swept = True
        for dataset_id in self._datasets():
            self.client.datasets.verify(dataset_id)

    @rule(pick=_pick, num=st.integers(1, 3), how=st.sampled_from(["whole", "stop_runs", "killed"]))
    def forget(self, pick: int, num: int, how: str) -> None:
        """By the client, or by one that is killed before it has rewritten the datasets."""
        ids = sorted({self._one(pick + place) for place in range(num)})
        if how == "killed":
            forget.forget(self.world.database, ids, actor=ACTOR, reason="asked by the person")
            return
        told = self.client.experiences.forget(ids, reason="asked by the person", stop_runs=how == "stop_runs")
        assert all(outcome.state != "failed" for outcome in told.outcomes), told.outcomes
        stored = self.world.store_files()
        left = [word for word in forgotten_words(self.world.seen(), self.known) if word.encode() in stored]
        assert not left, f"still in the file of the store: {left}"

    @invariant()
    def all_of_it_holds(self) -> None:
        self.last = check_all(self.world, self.known)
        self.known.swept = False


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _says(talk: list[dict[str, str]], word: str) -> bool:
    return any(word in message["content"] for message in talk)


def _never(never: bool) -> list[str]:
    return ["deploy.when=never"] if never else []


_numbers = count(1)


def _walk(folder: Path, make_url: Callable[[Path], str], *, examples: int, steps: int, given: int | None) -> None:
    """Shrinking takes minutes: only where nobody waits for it, and where the walk is not known already."""
    number = random.randrange(1 << 32) if given is None else given
    print(f"seed of this walk: {number}")

    def machine() -> LearningMachine:
        for old in folder.glob("world-*"):
            shutil.rmtree(old)
        place = folder / f"world-{next(_numbers)}"
        place.mkdir()
        return LearningMachine(lambda: World(place, make_url(place)))

    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate, Phase.shrink] if given is None else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(machine), settings=chosen)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room: what is walked here is the logic, and the disk is not part of it."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(prefix="tunesmith-walk-", dir=memory if roomy else tmp_path) as name:
        yield Path(name)


def _sqlite_url(template: Path) -> Callable[[Path], str]:
    return lambda place: f"sqlite:///{shutil.copy(template, place / 'store.db')}"


def _postgres_url(server: Postgres) -> Callable[[Path], str]:
    return lambda place: server.create(f"learning_{next(_numbers)}", template="template_of_tests")


@pytest.mark.slow
def test_any_walk_keeps_every_promise_on_sqlite(folder: Path, sqlite_template: Path) -> None:
    _walk(folder, _sqlite_url(sqlite_template), examples=7, steps=30, given=7)


def test_any_walk_keeps_every_promise_on_postgres(folder: Path, postgres: Postgres) -> None:
    _walk(folder, _postgres_url(postgres), examples=3, steps=30, given=11)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["sqlite", "postgres"])
def test_long_walks_keep_every_promise(folder: Path, request: pytest.FixtureRequest, name: str) -> None:
    if name == "sqlite":
        make_url = _sqlite_url(request.getfixturevalue("sqlite_template"))
    else:
        make_url = _postgres_url(request.getfixturevalue("postgres"))
    _walk(folder, make_url, examples=500 if name == "sqlite" else 100, steps=60, given=None)
