"""The demo's rows and its base: honest splits by day, one build per cache, a damaged one built again."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from tunesmith.core.files import verify_folder
from tunesmith.demo import base_model, dates
from tunesmith.models.chat import ChatFormat
from tunesmith.profiles.architecture import read_architecture


def answers(rows: list[dates.Row]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def prompts(rows: list[dates.Row]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def days(rows: list[dates.Row]) -> set[date]:
    numbers = (re.findall(r"\d+", answer) for answer in answers(rows))
    return {date(*map(int, found)) for found in numbers}


def test_days_of_the_base_are_none_that_a_task_asks_about() -> None:
    iso = re.compile(r"\d{4}-\d\d-\d\d")
    seen = {answer for answer in answers(dates.base_rows(5000, seed=0)) if iso.fullmatch(answer)}
    asked = days(dates.words_rows(2000, seed=1)) | days(dates.numbers_rows(2000, seed=1))
    assert not {date.fromisoformat(text) for text in seen} & asked


def test_rows_are_distinct_and_fixed_by_the_seed() -> None:
    rows = dates.mixed_rows(400, seed=7)
    assert rows == dates.mixed_rows(400, seed=7) != dates.mixed_rows(400, seed=8)
    assert len(set(prompts(rows))) == 400
    assert sum(1 for answer in answers(rows) if answer.startswith("{")) == 280


@pytest.mark.parametrize(
    ("day", "words"),
    [
        (date(2000, 3, 12), ("two thousand", "twelfth")),
        (date(2005, 3, 20), ("two thousand five", "twentieth")),
        (date(1994, 3, 23), ("nineteen ninety-four", "twenty-third")),
        (date(1950, 3, 8), ("nineteen fifty", "eighth")),
        (date(2049, 3, 9), ("twenty forty-nine", "ninth")),
    ],
)
def test_dates_are_written_as_people_say_them(day: date, words: tuple[str, str]) -> None:
    assert (dates._year(day.year), dates._ordinal(day.day)) == words


def test_shuffled_answers_are_never_at_home() -> None:
    rows = dates.numbers_rows(300, seed=1)
    shuffled = dates.shuffled_answers(rows, seed=2)
    assert prompts(shuffled) == prompts(rows)
    assert sorted(answers(shuffled)) == sorted(answers(rows))
    at_home = sum(1 for ours, theirs in zip(answers(rows), answers(shuffled), strict=True) if ours == theirs)
    assert at_home <= 3  # two prompts can have the same answer


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps instead of a hundred and fifty: the cache is looked at here, not the model."""
    monkeypatch.setattr(base_model, "_QUICK", dataclasses.replace(base_model._QUICK, steps=2))


@pytest.mark.usefixtures("_tiny")
def test_base_is_built_once_and_again_when_damaged(tmp_path: Path) -> None:
    built: list[int] = []
    folder = base_model.cached_base(tmp_path, quick=True, on_progress=lambda done, _total: built.append(done))
    digest = verify_folder(folder).digest
    assert base_model.cached_base(tmp_path, quick=True, on_progress=lambda done, _total: built.append(done)) == folder
    assert built == [1, 2]
    (folder / "model.safetensors").write_bytes(b"half")
    assert base_model.cached_base(tmp_path, quick=True) == folder
    assert verify_folder(folder).digest == digest
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [folder.name]


@pytest.mark.usefixtures("_tiny")
def test_base_is_an_ordinary_folder_with_a_chat_template(tmp_path: Path) -> None:
    from tunesmith.models.loading import load_tokenizer

    base_model.build_base(tmp_path / "base", quick=True)
    lock = read_architecture(tmp_path / "base")
    assert (lock.architecture, lock.family, lock.context) == ("LlamaForCausalLM", "llama", 256)
    assert lock.chat_template_sha256 is not None
    tokenizer = load_tokenizer(tmp_path / "base")
    example = ChatFormat(tokenizer).tokenize("e1", dates.words_rows(1, seed=1)[0]["messages"])
    assert tokenizer.decode(example.ids).startswith("<|begin|><|user|>")


@pytest.mark.slow
def test_two_processes_build_one_base(tmp_path: Path) -> None:
    code = (
        "import dataclasses, sys; from pathlib import Path; from tunesmith.demo import base_model as b; "
        "b._QUICK = dataclasses.replace(b._QUICK, steps=2); steps = []; "
        "print(b.cached_base(Path(sys.argv[1]), True, lambda done, total: steps.append(done)), len(steps))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0][0] == said[1][0]
    assert sorted(steps for _, steps in said) == ["0", "2"]
