"""Detectors: one contract for all that are installed, and where their findings go."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from support.workspaces import PROFILE, a_profile, a_workspace, cli
from tunesmith.core.errors import ConfigError
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PrepareOptions
from tunesmith.datasets.screens import detectors
from tunesmith.datasets.screens.detectors import GROUP, check_installed, detector
from tunesmith.datasets.screens.finding import Hit, redacted

TOLD = "Maria Okafor, 12 Harbour Lane, born 4 May 1971, pays with 4111 1111 1111 1111."


class Harbours:
    """A detector of the tests: takes every lane for an address."""

    def find(self, text: str) -> Iterator[Hit]:
        place = text.find("Harbour Lane")
        if place >= 0:
            yield Hit(place, place + 12, "a postal address, by the test", redacted("Harbour Lane", 0))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The test's detector as if a package had brought it."""
    point = EntryPoint("harbours", f"{__name__}:Harbours", GROUP)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(detectors, "entry_points_of", lambda group: {point.name: point} if group == GROUP else {})
    detector.cache_clear()
    yield "harbours"
    detector.cache_clear()


@pytest.mark.parametrize("name", ["harbours", "presidio"])
def test_detector_finds_places_in_a_text_and_never_repeats_them(name: str, installed: str) -> None:
    if name != installed:
        pytest.importorskip("presidio_analyzer", reason="the extra tunesmith[presidio] is not installed")
    found = list(detector(name).find(TOLD))
    assert found
    for hit in found:
        assert 0 <= hit.start < hit.end <= len(TOLD)
        assert TOLD[hit.start : hit.end] not in f"{hit.reason} {hit.excerpt}"
    assert list(detector(name).find(TOLD)) == found
    assert list(detector(name).find("")) == []
    assert list(detector(name).find("The sky is blue.")) == []


def test_what_a_detector_finds_is_kept_aside(tmp_path: Path, installed: str) -> None:
    rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(60)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "Who?", "completion": TOLD}]))
    plain = prepare([source], tmp_path / "plain", PrepareOptions(), num_processes=1)
    assert plain.report.num_quarantined == 0
    made = prepare([source], tmp_path / "made", PrepareOptions(detectors=(installed,)), num_processes=1)
    assert [(each.screen, each.num) for each in made.report.quarantine] == [("detector", 1)]
    assert "Harbour" not in json.dumps(made.report.model_dump(mode="json"))


def test_captured_answer_is_searched_too(tmp_path: Path, installed: str) -> None:
    with a_workspace(tmp_path, profile={"data": {"detectors": [installed], "screens": "none"}}) as client:
        talk = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": TOLD}]
        assert client.experiences.add(PROFILE, talk).class_name == "quarantined"


def test_detector_that_is_not_installed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no detector 'presidoi'.*presidio"):
        check_installed("presidoi")
    with a_workspace(tmp_path) as client:
        a_profile(client.workspace.root, data={"detectors": ["nobody"]})
        with pytest.raises(ConfigError, match=r"data\.detectors: no detector 'nobody'"):
            client.profiles.check(PROFILE)


def test_what_the_screens_do_not_find_is_said_where_a_person_decides(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        rows = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(60)]
        file = client.workspace.root / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset, _ = client.datasets.prepare(PROFILE, [file])
        for words in (("profile", "check", PROFILE), ("dataset", "show", dataset.id)):
            told = " ".join(cli(*words, cwd=client.workspace.root).out.split())
            assert "do not find names, postal addresses, birthdays" in told
            assert "test card numbers" in told
            assert "data.detectors" in told
