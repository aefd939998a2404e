"""Schools whose teacher is a tiny model on this machine: one that answers well, and one that never comes to an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.fleet import Fleet, MakeFleet
from support.native import a_micro_base
from support.workspaces import PROFILE
from tunesmith.client import Client

BY_REFERENCE = {"experience": {"verifiers": {"exact_match": {}}}}
DATES = {
    "the thirty-first of august nineteen fifty-eight": "1958-08-31",
    "june third nineteen sixty-five": "1965-06-03",
    "the eighth of march nineteen ninety-three": "1993-03-08",
    "september seventeenth nineteen eighty-three": "1983-09-17",
}
"""What the quick base answers right."""


def school_of(path: Path, teacher: dict[str, Any] | None = None, **policy: Any) -> dict[str, Any]:
    """A profile whose teacher is the model in a folder."""
    settings = {"kind": "local", "path": str(path), "max_tokens": 40, "temperature": 0.0, **(teacher or {})}
    return {**BY_REFERENCE, "curriculum": {"teacher": settings, **policy}}


def add_dates(client: Client, dates: dict[str, str]) -> list[str]:
    """Questions that the student answered badly, as a verifier and three people found."""
    return [_add_date(client, question, answer) for question, answer in dates.items()]


def _add_date(client: Client, question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "It is done."}]
    added = client.experiences.add(PROFILE, messages, reference=answer).id
    for rater in ("ann", "bob", "eve"):
        rated = client.feedback.add(added, "down", rater=rater)
    assert rated.class_name == "needs_improvement", rated
    return added


@contextmanager
def an_endless_school(make_fleet: MakeFleet, num: int, **policy: Any) -> Iterator[Fleet]:
    """A cycle that takes some seconds: every answer of its teacher is cut off at 200 tokens."""
    always = {"enabled": True, "min_entries": 1, "window": "00:00-24:00", "max_entries": num, **policy}
    school = school_of(Path("../endless"), {"max_tokens": 200}, **always)
    fleet = make_fleet(profile={**school, "experience": {"verifiers": {"entity_preservation": {}}}})
    a_micro_base(fleet.root.parent / "endless")
    for number in range(num):
        messages = [
            {"role": "user", "content": f"Send order {number} to Rome"},
            {"role": "assistant", "content": "It is done."},
        ]
        assert fleet.client.experiences.add(PROFILE, messages).class_name == "needs_improvement"
    try:
        yield fleet
    finally:
        fleet.end()
