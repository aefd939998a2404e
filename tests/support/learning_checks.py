"""What must hold after every step of the learning machine, read from the store's rows and the datasets' files."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from support.learning_world import Seen, World
from tunesmith.core.files import read_manifest
from tunesmith.datasets.example import Example, Split
from tunesmith.experience.assemble import MEMBERS_FILE
from tunesmith.experience.forgetting.rules import tombstone_key

_HELD = {"reserved", "consumed"}
_LEARNT = {"deployed", "completed"}


@dataclass
class Remembered:
    """What no row tells any more: who was captured, which words are whose, what was ever held out or trained."""

    keys: dict[str, str] = field(default_factory=dict)
    """By experience."""
    words: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By marker: the experiences in which it was said. Forgotten is a word that only forgotten ones have said."""
    held_out: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    swept: bool = False
    """The last step was a sweep."""


def check_all(world: World, known: Remembered) -> Seen:
    """What was looked at, where all of it holds."""
    seen = world.seen()
    none_lost(seen, known)
    states_and_datasets_agree(seen)
    history_ends_where_it_is(seen)
    one_claim_each(seen)
    consumed_by_a_success_only(seen)
    success_consumes_all(seen)
    reserved_for_somebody(world, seen, known.swept)
    held_out_is_never_trained(seen, known)
    members_are_the_examples(world, seen)
    forgotten_is_gone(world, seen, known)
    return seen


def none_lost(seen: Seen, known: Remembered) -> None:
    assert seen.experiences.keys() == known.keys.keys()
    for each, key in known.keys.items():
        row = seen.experiences[each]
        kept = tombstone_key(key) if row["state"] == "forgotten" else key
        assert row["natural_key"] == kept, each
        assert (row["messages"] == []) == (row["state"] == "forgotten"), each


def states_and_datasets_agree(seen: Seen) -> None:
    for row in seen.experiences.values():
        assert (row["dataset_id"] is not None) == (row["state"] in _HELD), row["id"]
        assert (row["run_id"] is not None) == (row["state"] == "consumed"), row["id"]


def history_ends_where_it_is(seen: Seen) -> None:
    """Every move has its event: the last one told is the state that it is in."""
    told = {
        event["entity_id"]: event["new_state"]
        for event in seen.events
        if event["entity"] == "experience" and event["new_state"] is not None
    }
    assert told == {row["id"]: row["state"] for row in seen.experiences.values()}


def one_claim_each(seen: Seen) -> None:
    """What an unfinished run learns from belongs to its dataset alone, until the run has ended."""
    claims: dict[str, set[str]] = defaultdict(set)
    for row in seen.experiences.values():
        if row["state"] == "reserved":
            claims[row["id"]].add(row["dataset_id"])
    for dataset_id in {run["dataset_id"] for run in seen.unfinished}:
        for member in seen.new_of(dataset_id):
            row = seen.experiences[member["experience_id"]]
            if row["state"] != "forgotten":
                claims[row["id"]].add(dataset_id)
                assert row["dataset_id"] == dataset_id, f"{row['id']} is {row['state']}, and {dataset_id} is in use"
    twice = {each: owners for each, owners in claims.items() if len(owners) > 1}
    assert not twice, f"in two reservations: {twice}"


def consumed_by_a_success_only(seen: Seen) -> None:
    for row in seen.experiences.values():
        if row["state"] != "consumed":
            continue
        run = seen.runs[row["run_id"]]
        assert run["state"] in _LEARNT, f"{row['id']} was consumed by a run that is {run['state']}"
        assert run["dataset_id"] == row["dataset_id"], row["id"]
        assert row["adapter_id"] is not None
        assert seen.adapters[row["adapter_id"]]["state"] != "rolled_back", f"{row['id']} was not given back"


def success_consumes_all(seen: Seen) -> None:
    """What a deployed or completed adapter has learnt is not free to be learnt as new, unless it was rolled back."""
    for run in seen.runs.values():
        made = [each for each in seen.adapters.values() if each["run_id"] == run["id"]]
        if run["state"] not in _LEARNT or {each["state"] for each in made} & {"rolled_back", "revoked"}:
            continue
        for member in seen.new_of(run["dataset_id"]):
            state = seen.experiences[member["experience_id"]]["state"]
            assert state in ("consumed", "forgotten"), f"{member['experience_id']} is {state} after {run['id']}"


def reserved_for_somebody(world: World, seen: Seen, swept: bool) -> None:
    in_use = {run["dataset_id"] for run in seen.unfinished}
    with world.database.read() as tx:
        now = tx.now
    for row in seen.experiences.values():
        if row["state"] == "reserved" and row["dataset_id"] not in in_use:
            until = seen.datasets[row["dataset_id"]]["reserved_until"]
            assert until is not None, f"{row['id']} is reserved for ever"
            assert not swept or until > now, f"{row['id']} is still reserved"


def held_out_is_never_trained(seen: Seen, known: Remembered) -> None:
    for examples in seen.examples.values():
        for split, some in examples.items():
            ever = known.held_out if split is Split.HELDOUT else known.trained
            ever.update(name for example in some for name in (example.group, _opening(example)))
    for member in seen.members:
        (known.held_out if member["split"] == "heldout" else known.trained).add(member["group_id"])
    known.held_out.update(case["case_id"] for case in seen.cases)
    assert not known.held_out & known.trained


def _opening(example: Example) -> str:
    """What the conversation began with, however long it went on."""
    return str(example.prompt[0]["content"]).casefold()


def members_are_the_examples(world: World, seen: Seen) -> None:
    done = {(row["experience_id"], row["dataset_id"]) for row in seen.erasures if row["done_at"] is not None}
    for dataset_id, dataset in seen.datasets.items():
        told = Counter(
            (member["example_id"], member["group_id"], member["split"])
            for member in seen.members
            if member["dataset_id"] == dataset_id and (member["experience_id"], dataset_id) not in done
        )
        found = seen.examples[dataset_id]
        held = Counter((each.id, each.group, split.value) for split, some in found.items() for each in some)
        assert told == held, dataset_id
        assert dataset["counts"] == {split.value: len(found[split]) for split in Split}, dataset_id
        folder = world.client.workspace.data_dir / dataset["path"]
        assert read_manifest(folder).meta["fingerprint"] == dataset["fingerprint"], dataset_id
        lines = (folder / MEMBERS_FILE).read_text(encoding="utf-8").splitlines()
        assert Counter(json.loads(line)["example"] for line in lines) == Counter(each for each, _, _ in held.elements())


def forgotten_words(seen: Seen, known: Remembered) -> dict[str, set[str]]:
    """By word that only forgotten ones have said: who they were."""
    gone = {each for each, row in seen.experiences.items() if row["state"] == "forgotten"}
    return {word: owners for word, owners in known.words.items() if owners <= gone}


def forgotten_is_gone(world: World, seen: Seen, known: Remembered) -> None:
    words = forgotten_words(seen, known)
    if not words:
        return
    stored = world.everything_stored()
    left = [word for word in words if word in stored]
    assert not left, f"still in the store: {left}"
    waiting = {(row["dataset_id"], row["experience_id"]) for row in seen.erasures if row["done_at"] is None}
    root = world.client.workspace.datasets_dir
    for folder in sorted(root.iterdir()) if root.exists() else ():
        told = world.everything_below(folder) if folder.is_dir() else folder.read_text()
        name = folder.name.partition(".")[0]
        late = [
            word for word, owners in words.items() if word in told and not any((name, x) in waiting for x in owners)
        ]
        assert not late, f"still in {folder.name}: {late}"
