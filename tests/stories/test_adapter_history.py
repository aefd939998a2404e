"""`adapter history`: what was live on Tuesday at 14:00?"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from support.fleet import MakeFleet
from support.workspaces import PROFILE, cli
from tunesmith.client import Client
from tunesmith.core.errors import NotFound, UsageError

V1, BASE = f"{PROFILE}@v1", f"{PROFILE}@base"


def test_history_tells_what_was_live_at_any_time(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    before = datetime.now(UTC)
    fleet.submit()
    fleet.work()
    during = datetime.now(UTC)
    fleet.client.adapters.rollback(PROFILE, reason="it is rude")
    after = datetime.now(UTC)

    def live(at: str) -> str:
        shown = cli("adapter", "history", PROFILE, "--at", at, "--json", cwd=fleet.root)
        assert shown.code == 0, shown.err
        return str(json.loads(shown.out)["version"])

    far_east = timezone(timedelta(hours=9))
    assert live(before.isoformat()) == BASE
    assert live("2020-02-29") == BASE
    assert live(during.isoformat()) == V1
    assert live(during.replace(tzinfo=None).isoformat()) == V1, "without a zone it is UTC"
    assert live(during.astimezone(far_east).isoformat()) == V1
    assert live(f"{during:%Y-%m-%dT%H:%M:%S.%fZ}") == V1
    assert live(after.isoformat()) == BASE
    spans = json.loads(cli("adapter", "history", PROFILE, "--json", cwd=fleet.root).out)
    assert [(span["version"], span["ended_as"]) for span in spans] == [(BASE, None), (V1, "rolled_back"), (BASE, None)]
    assert spans[1]["ended_reason"] == "it is rude"
    page = cli("adapter", "history", PROFILE, cwd=fleet.root, env={"COLUMNS": "200"}).out
    assert "it is rude" in page
    assert f"{during:%Y-%m-%dT%H}" in page
    for wrong in ("Tuesday 14:00", "14:00", "2026-13-01", "", "9999-12-31T23:59-14:00"):
        refused = cli("adapter", "history", PROFILE, f"--at={wrong}", cwd=fleet.root)
        assert refused.code == 2, wrong
        assert "ISO 8601" in refused.err
    tomorrow = cli("adapter", "history", PROFILE, "--at", f"{after + timedelta(days=1):%Y-%m-%d}", cwd=fleet.root)
    assert tomorrow.code == 2
    assert "in the future" in tomorrow.err


def test_profile_without_a_version_has_always_been_the_base(tmp_path: Path) -> None:
    from support.workspaces import a_workspace

    with a_workspace(tmp_path) as client:
        _only_base(client)


def _only_base(client: Client) -> None:
    (only,) = client.adapters.history(PROFILE)
    assert (only.version, only.since, only.until) == (BASE, None, None)
    with pytest.raises(NotFound, match="supprot"):
        client.adapters.history("supprot")
    with pytest.raises(UsageError, match="is not a time"):
        client.adapters.history(PROFILE, at="yesterday")
