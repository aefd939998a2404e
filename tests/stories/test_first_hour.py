"""The first hour of a new user on a real base, shortened: the README's commands, a stock client, a first version live.

Nothing here goes round the command line or the HTTP routes. What is shortened: few requests, few steps, a short watch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from support.gateway import ServerProcess, a_server
from support.notes import Note, make_notes
from support.real_base import PackageUnavailable, cached_smollm2, default_cache
from support.workspaces import Ended, cli
from tunesmith.openai import learn_from

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1800)]  # the first run fetches and converts the weights
NUM_NOTES = 64
_CUT, _ROOMY = 3, 24
"""Tokens of an answer: with so few every answer is cut."""
_TIMEOUT_S = 900.0
_CHANGES: dict[str, dict[str, Any]] = {
    "data": {"heldout_share": 0.4},
    "gate": {"min_cases": 15},
    "experience": {"mix": {"min_new": 20}},
    "recipe": {"epochs": 5, "batch_tokens": 512, "lr": 1e-3, "max_length": 256},
    "watch": {"for_s": 1.0, "interval_s": 0.2, "quality": {"min_s": 1.0, "max_s": 3.0}},
    "answers": {"max_tokens": 20},
}
"""What the owner of few data sets in the profile that `tunesmith init` wrote."""


@pytest.fixture(scope="module")
def base() -> Path:
    try:
        return cached_smollm2(default_cache())
    except PackageUnavailable as error:
        pytest.skip(error.message)


class FirstHour:
    """A workspace as the README makes it."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.root = folder / "my-models"
        made = cli("init", "my-models", "--base", str(base), "--task", "support", cwd=folder)
        assert made.code == 0, made.err
        self.profile = self.root / "profiles" / "support.yaml"

    def run(self, *words: str, timeout_s: float = 120.0) -> Ended:
        done = cli(*words, cwd=self.root, timeout_s=timeout_s)
        assert done.code == 0, f"tunesmith {' '.join(words)}: {done.out}{done.err}"
        return done

    def change(self, changes: dict[str, dict[str, Any]]) -> None:
        said = yaml.safe_load(self.profile.read_text())
        self.profile.write_text(
            yaml.safe_dump({**said, **{key: {**said.get(key, {}), **changes[key]} for key in changes}})
        )


@pytest.fixture(scope="module")
def hour(base: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstHour:
    return FirstHour(tmp_path_factory.mktemp("first_hour"), base)


@pytest.fixture(scope="module")
def server(hour: FirstHour) -> Iterator[ServerProcess]:
    hour.run("profile", "check", "support")
    with a_server(hour.root, "--port", "0") as process:
        yield process


def a_client(server: ServerProcess) -> Any:
    """As the README has it."""
    return learn_from(OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=300.0))


def use_it(client: Any, notes: list[Note]) -> Counter[str]:
    """Ask, and correct every answer; how the answers ended. Every second one is cut after a few tokens."""

    def one(numbered: tuple[int, Note]) -> str:
        number, note = numbered
        max_tokens = _CUT if number % 2 else _ROOMY
        answer = client.chat.completions.create(model="support", messages=note.prompt, max_tokens=max_tokens)
        client.feedback(answer, "irrelevant" if number % 3 else None, correction=note.right)
        return str(answer.choices[0].finish_reason)

    with ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(one, enumerate(notes)))


def test_from_init_to_a_deployed_first_version_without_a_dead_end_and_no_correction_lost(
    hour: FirstHour, server: ServerProcess
) -> None:
    client = a_client(server)
    endings = use_it(client, make_notes(NUM_NOTES, seed=5))
    assert endings["length"] >= NUM_NOTES // 2, "the base's answers are cut, as in every first hour"

    kept = hour.run("experience", "list", "--profile", "support", "--json", "--limit", "1000").json
    assert sum(row["feedback"]["num_corrections"] for row in kept) == NUM_NOTES, "no correction is lost"

    told = hour.run("dataset", "assemble", "support", "--dry-run")
    assert "held-out cases" in told.out + told.err
    assert "gate.min_cases" in told.out + told.err, "the numbers, and the setting that helps"
    hour.change(_CHANGES)  # not refused: nothing was trained yet
    assert "40% of prompts" in hour.run("profile", "check", "support").out

    run_id = hour.run("run", "submit", "support").last_line
    hour.run("worker", "--until-idle", timeout_s=_TIMEOUT_S)
    (run,) = hour.run("run", "list", "--json").json
    assert (run["id"], run["state"]) == (run_id, "deployed"), run

    note = make_notes(NUM_NOTES + 1, seed=6)[-1]
    answer = client.chat.completions.create(model="support", messages=note.prompt, temperature=0)
    assert answer.model == "support@v1"
    said = answer.choices[0].message.content or ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", said.strip()), f"it has learnt the form: {said!r}"
    assert answer.choices[0].finish_reason == "stop"
    assert server.health()["status"] == "ok"
    assert "support@v1" in hour.run("adapter", "live", "support").out


def test_a_base_that_does_not_stop_is_cut_where_the_profile_says(server: ServerProcess) -> None:
    """After the first hour, in which the owner set answers.max_tokens."""
    asked = [{"role": "user", "content": "Tell me a very long story about the sea, with many chapters."}]
    answer = a_client(server).chat.completions.create(model="support@base", messages=asked)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 20)
