"""A store of the schema before tells the truth about versions and runs once it is opened; its checks still refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from support.databases import an_empty_url, upgrade_to
from tunesmith.store.database import connect
from tunesmith.store.schema import HEAD, integrity_problem, open_store

RUNS = {"run-r": "rejected", "run-d": "deployed", "run-l": "deployed", "run-c": "cancelled"}
VERSIONS = {"run-r": "candidate", "run-d": "rolled_back", "run-l": "live", "run-c": "candidate"}


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store at schema 0005 with a version per row of VERSIONS."""
    url = an_empty_url(request, tmp_path)
    database = connect(url)
    with database.write() as tx:
        upgrade_to(tx, "0005")
        say = tx.conn.execute
        say(sa.text("INSERT INTO profiles (name, lock, locked_at) VALUES ('p', '{}', 0)"))
        columns = "id, profile, path, fingerprint, kind, counts, created_at"
        say(sa.text(f"INSERT INTO datasets ({columns}) VALUES ('ds-1', 'p', 'd', 'f', 'supervised', '{{}}', 0)"))
        for number, (run_id, state) in enumerate(RUNS.items(), start=1):
            columns = "id, profile, dataset_id, state, reason, priority, automatic, body_hash, spec, created_at"
            values = ":id, 'p', 'ds-1', :state, '', 1, :no, 'b', '{}', 0"
            more = "created_by, moved_at, finished_at"
            statement = f"INSERT INTO runs ({columns}, {more}) VALUES ({values}, 'a', 0, 7)"
            say(sa.text(statement), {"id": run_id, "state": state, "no": False})
            columns = "id, profile, version, state, run_id, path, digest, base_digest, metrics, created_at"
            values = ":id, 'p', :version, :state, :run, 'a', 'd', 'b', '{}', 0"
            told = {"id": f"ad-{number}", "version": number, "state": VERSIONS[run_id], "run": run_id}
            say(sa.text(f"INSERT INTO adapters ({columns}) VALUES ({values})"), told)
    database.close()
    return url


def test_old_store_calls_rejected_and_rolled_back_what_is_so(old_url: str) -> None:
    store = open_store(old_url)
    with store.read() as tx:
        assert tx.execute("SELECT version_num FROM alembic_version").fetchone()[0] == HEAD
        said = "SELECT r.id, r.state, a.state, r.finished_at FROM runs r JOIN adapters a ON a.run_id = r.id"
        found = {row[0]: tuple(row[1:]) for row in tx.execute(said).fetchall()}
    assert found == {
        "run-r": ("rejected", "rejected", 7),
        "run-d": ("rolled_back", "rolled_back", 7),
        "run-l": ("deployed", "live", 7),
        "run-c": ("cancelled", "candidate", 7),
    }
    assert integrity_problem(store) is None
    with pytest.raises(exc.IntegrityError), store.write() as tx:
        tx.conn.execute(sa.text("UPDATE adapters SET state = 'nonsense' WHERE id = 'ad-1'"))
    with store.write() as tx:
        tx.conn.execute(sa.text("UPDATE adapters SET state = 'rejected' WHERE id = 'ad-4'"))
    store.close()
