"""A store from before there were key labels opens: its answers belong to no key, its ratings count as they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from support.databases import an_empty_url, upgrade_to
from support.rows import ARCHITECTURE
from tunesmith.experience.queries import experiences, feedback
from tunesmith.experience.rules.feedback import aggregate
from tunesmith.profiles.rules.lock import ProfileLock
from tunesmith.store.database import connect
from tunesmith.store.schema import open_store

MESSAGES = '[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]'


@pytest.fixture(params=["sqlite", "postgres"])
def old_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store at schema 0004 with a served answer that two people have rated."""
    url = an_empty_url(request, tmp_path)
    database = connect(url)
    lock = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05).model_dump_json()
    with database.write() as tx:
        upgrade_to(tx, "0004")
        say = tx.conn.execute
        say(sa.text("INSERT INTO profiles (name, lock, locked_at) VALUES ('p', :lock, 0)"), {"lock": lock})
        say(
            sa.text(
                "INSERT INTO experiences (id, profile, natural_key, messages, state, num_rejections, in_review, "
                "created_at, source) VALUES ('xp-1', 'p', 'chatcmpl-1', :messages, 'collected', 0, :no, 7, 'serve')"
            ),
            {"messages": MESSAGES, "no": False},
        )
        say(
            sa.text(
                "INSERT INTO assessments (experience_id, profile, class_name, reasons, findings, suspicions, feedback, "
                "assessed_at) VALUES ('xp-1', 'p', 'ambiguous', '[]', '{}', '[]', '{}', 7)"
            )
        )
        for rater in ("ann", "bob"):
            say(
                sa.text(
                    "INSERT INTO feedback (id, experience_id, rater, value, is_implicit, confidence, created_at) "
                    "VALUES (:id, 'xp-1', :rater, 1.0, :no, 1.0, 7)"
                ),
                {"id": f"fb-{rater}", "rater": rater, "no": False},
            )
    database.close()
    return url


def test_a_store_without_key_labels_is_brought_up_to_date(old_url: str) -> None:
    store = open_store(old_url)
    with store.read() as tx:
        assert experiences.find(tx, "p:chatcmpl-1").key_label is None
        said = feedback.of_experience(tx, "xp-1")
    assert [each.key_label for each in said] == [None, None]
    assert aggregate(said).num == 2
    store.close()
