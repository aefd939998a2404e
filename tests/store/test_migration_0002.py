"""A store of the first schema is brought up to date with what it holds; two processes at once do it once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import an_empty_url, upgrade_to
from support.rows import ARCHITECTURE
from tunesmith.experience.queries import assessments, experiences
from tunesmith.experience.rules.experience import ExperienceClass
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.store.database import connect
from tunesmith.store.schema import HEAD, open_store

MESSAGES = '[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]'


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store at schema 0001 that holds two experiences."""
    url = an_empty_url(request, tmp_path)
    database = connect(url)
    lock = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05).model_dump_json()
    with database.write() as tx:
        upgrade_to(tx, "0001")
        tx.conn.execute(sa.text("INSERT INTO profiles (name, lock, locked_at) VALUES ('p', :lock, 0)"), {"lock": lock})
        for number in (1, 2):
            tx.conn.execute(
                sa.text(
                    "INSERT INTO experiences (id, profile, natural_key, messages, state, num_rejections, in_review, "
                    "created_at) VALUES (:id, 'p', :id, :messages, 'collected', 0, :no, 7)"
                ),
                {"id": f"xp-{number}", "messages": MESSAGES, "no": False},
            )
    database.close()
    return url


def test_experiences_of_the_first_schema_become_ambiguous_and_keep_their_text(old_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: open_store(old_url), range(4)))
    with stores[0].read() as tx:
        assert tx.execute("SELECT version_num FROM alembic_version").fetchone()[0] == HEAD
        for number in (1, 2):
            found = experiences.get(tx, f"xp-{number}")
            assert (found.messages[1]["content"], found.source, found.captured_at) == ("2", None, None)
            said = assessments.get(tx, found.id)
            assert said.class_name is ExperienceClass.AMBIGUOUS
            assert said.reasons == ("stored before there were verifiers",)
            assert (said.feedback.mean, said.feedback.num) == (None, 0)
        assert len(experiences.listing(tx, {}, 10)) == 2
    for store in stores:
        store.close()
