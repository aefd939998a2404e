"""What every verifier owes, ours and one that a package brings: total, deterministic, a score in 0..1, a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.plugins import EXAMPLES, install_module, install_project, on_path
from support.workspaces import PROFILE, a_profile, a_workspace
from tunesmith.core.errors import ConfigError
from tunesmith.core.section import Section
from tunesmith.verifiers.base import Finding, Interaction
from tunesmith.verifiers.registry import GROUP, VERIFIERS, find_verifier, settings_of, verify

INSTALLED = "ticket_number"
SETTINGS: dict[str, dict[str, Any]] = {"json_schema": {"schema": {"type": "object"}}}
TEXTS = ("", " ", "See AC-104233 and ac 7.", '{"city": "Rome"}', "\0\ud800", "9" * 5000, "é" * 3000)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with on_path(install_project(EXAMPLES, tmp_path_factory.mktemp("site"))):
        yield


@pytest.mark.parametrize("name", [*sorted(VERIFIERS), INSTALLED])
def test_verifier_says_what_it_is_and_keeps_to_it(name: str) -> None:
    verifier = find_verifier(name)
    assert verifier is not None
    assert verifier.name == name
    assert verifier.says
    assert "\n" not in verifier.says
    assert issubclass(verifier.settings, Section)
    settings = settings_of(name, SETTINGS.get(name, {}))
    for answer in TEXTS:
        for question in TEXTS:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for reference in (None, answer):
                finding = verifier.look(Interaction(turns, reference), settings)
                assert isinstance(finding, Finding)
                assert finding.score is None or 0.0 <= finding.score <= 1.0
                assert finding == verifier.look(Interaction(turns, reference), settings)
                assert finding.reason or not finding.flagged


def test_verifier_of_a_package_is_named_in_a_profile_like_ours(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile={"experience": {"verifiers": {INSTALLED: {"prefix": "AC"}}}}) as client:
        question = {"role": "user", "content": "Which ticket?"}
        told = client.experiences.add(
            PROFILE, [question, {"role": "assistant", "content": "See ac 104233, not AC-104234."}]
        )
        finding = client.experiences.show(told.id).findings[INSTALLED]
        assert (finding.score, finding.flagged) == (0.5, True)
        assert finding.reason == "ac 104233 is not written as AC-104233"
        assert told.class_name == "ambiguous"
        a_profile(client.workspace.root, experience={"verifiers": {"ticket_numbr": {}}})
        with pytest.raises(ConfigError, match="no verifier 'ticket_numbr'; did you mean 'ticket_number'"):
            client.profiles.check(PROFILE)
        a_profile(client.workspace.root, experience={"verifiers": {INSTALLED: {"prefx": "AC"}}})
        with pytest.raises(ConfigError, match="ticket_number has no setting 'prefx'; did you mean 'prefix'"):
            client.profiles.check(PROFILE)


CODE = """
from tunesmith.verifiers.base import Finding, NoSettings, Verifier
def look(interaction, settings):
    {body}
VERIFIER = Verifier("odd", "does not keep the contract", NoSettings, look)
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('x')", "the verifier failed (KeyError: 'x'); repair or uninstall its package"),
        ("return 0.5", "it returned float, not a Finding"),
        ("return Finding(1.5)", "its score is 1.5, not between 0 and 1"),
        ("return Finding(float('nan'))", "its score is nan, not between 0 and 1"),
        ("return Finding('high')", "could not convert string to float"),
    ],
)
def test_verifier_that_breaks_the_contract_flags_the_answer_and_stops_no_capture(
    tmp_path: Path, body: str, reason: str
) -> None:
    site = install_module(tmp_path, "odd_verifier", CODE.format(body=body), {GROUP: {"odd": "odd_verifier:VERIFIER"}})
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    with on_path(site):
        finding = verify(Interaction(turns), {"odd": {}})["odd"]
    assert (finding.score, finding.flagged) == (None, True)
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", r"cannot be imported \(ModuleNotFoundError: .*uninstall its package"),
        ("VERIFIER = 1", "is not a Verifier of that name"),
        (CODE.format(body="pass").replace('"odd"', '"other"'), "is not a Verifier of that name"),
    ],
)
def test_package_that_cannot_be_used_is_named(tmp_path: Path, code: str, reason: str) -> None:
    site = install_module(tmp_path, "odd_verifier", code, {GROUP: {"odd": "odd_verifier:VERIFIER"}})
    with on_path(site):
        with pytest.raises(ValueError, match=rf"the installed verifier 'odd' \(odd_verifier:VERIFIER\) {reason}"):
            settings_of("odd", {})
        assert find_verifier("odd") is None
