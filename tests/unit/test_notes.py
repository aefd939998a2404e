"""The task for a real base: notes about different days, mistakes that are mistakes, a score that is blind to format."""

from __future__ import annotations

import pytest

from support import notes


def test_notes_are_fixed_by_the_seed_and_about_different_days() -> None:
    made = notes.make_notes(500, seed=3)
    assert made == notes.make_notes(500, seed=3) != notes.make_notes(500, seed=4)
    assert len({note.right for note in made}) == len({note.text for note in made}) == 500


def test_mistakes_are_of_every_kind_and_never_right() -> None:
    made = notes.make_notes(500, seed=3)
    assert not [note for note in made if note.wrong == note.right]
    assert sum(note.wrong.startswith("The date is") for note in made) > 50
    assert sum(note.text.endswith(note.wrong) for note in made) > 50


def test_rows_ask_the_same_and_differ_in_their_answers() -> None:
    made = notes.make_notes(5, seed=3)
    for note, learnt, pair in zip(made, notes.supervised_rows(made), notes.preference_rows(made), strict=True):
        assert learnt["messages"] == [*pair["prompt"], *pair["chosen"]]
        assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == (note.right, note.wrong)
        assert pair["prompt"][-1]["content"] == note.text


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("1990-03-07", True),
        ("The note is dated 7 March 1990.", True),
        ("3/7/1990", True),
        ("7-MAR-1990", True),
        ("1990-03", False),
        ("1990-07", False),
        ("March 1990", False),
        ("8 March 1990", False),
        ("YYYY-MM-DD", False),
        ("", False),
    ],
)
def test_answer_names_the_day_in_any_form(answer: str, named: bool) -> None:
    assert notes.names_the_day(answer, "1990-03-07") is named


def test_day_and_month_of_the_same_number_are_both_wanted() -> None:
    assert notes.names_the_day("5/5/1968", "1968-05-05")
    assert not notes.names_the_day("5/1968", "1968-05-05")
