"""What must hold whenever somebody looks at an application that is left alone, whatever was killed before."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from support import tables
from support.left_alone import NUM_USERS, LeftAlone
from support.workspaces import wait_for

_SLACK_S = 1.0
_LEARNT = ("deployed", "completed")


def check_all(app: LeftAlone) -> None:
    quality_is_not_below_the_start(app)
    nothing_is_stacked(app)
    wait_for(lambda: not burnt(app), 15.0, f"for reservations without a run to be let go: {burnt(app)}")
    acknowledged_is_there(app)


def quality_is_not_below_the_start(app: LeftAlone) -> None:
    version, quality = app.quality()
    assert quality >= app.start[1], f"{version} is right {quality:.0%} of the time, and the start was {app.start}"


def nothing_is_stacked(app: LeftAlone) -> None:
    runs = tables.runs
    with app.client._session.database.read() as tx:
        unfinished = tx.all(sa.select(runs.c.id).where(runs.c.automatic, runs.c.finished_at.is_(None)))
    assert len(unfinished) <= 1, f"stacked: {[row['id'] for row in unfinished]}"


def burnt(app: LeftAlone) -> dict[str, int]:
    """Experiences that are neither free, nor reserved by an unfinished run, nor consumed by a success; by why."""
    experiences, runs = tables.experiences, tables.runs
    found: Counter[str] = Counter()
    with app.client._session.database.read() as tx:
        in_use = {row["dataset_id"] for row in tx.all(sa.select(runs).where(runs.c.finished_at.is_(None)))}
        learnt = {row["id"] for row in tx.all(sa.select(runs).where(runs.c.state.in_(_LEARNT)))}
        columns = (experiences.c.state, experiences.c.dataset_id, experiences.c.run_id)
        for row in tx.all(sa.select(*columns)):
            match row["state"]:
                case "collected":
                    pass
                case "reserved" if row["dataset_id"] in in_use:
                    pass
                case "consumed" if row["run_id"] in learnt:
                    pass
                case state:
                    found[f"{state} for {row['dataset_id']}, {row['run_id']}"] += 1
    return dict(found)


def acknowledged_is_there(app: LeftAlone) -> None:
    """Every correction and every rating whose call returned, and none of another text."""
    told = dict(app.desk.corrections)  # a copy: people go on talking
    confirmed = set(app.desk.confirmed)
    experiences, feedback = tables.experiences, tables.feedback
    with app.client._session.database.read() as tx:
        joined = sa.select(experiences.c.natural_key, feedback.c.value, feedback.c.correction).join(
            feedback, feedback.c.experience_id == experiences.c.id
        )
        rows = tx.all(joined)
    corrected = {row["natural_key"]: row["correction"] for row in rows if row["correction"] is not None}
    rated = {row["natural_key"] for row in rows if row["value"] == 1.0}
    lost = {key: label for key, label in told.items() if corrected.get(key) != label}
    assert not lost, f"acknowledged corrections that are not in the store: {lost}"
    assert confirmed <= rated, f"acknowledged ratings that are not in the store: {confirmed - rated}"


def fixed_requests_were_never_learnt(app: LeftAlone) -> None:
    experiences = tables.experiences
    fixed = {message for message, _ in app.fixed}
    with app.client._session.database.read() as tx:
        rows = tx.all(sa.select(experiences.c.messages))
    asked = {message["content"] for row in rows for message in row["messages"]}
    assert not fixed & asked, "a request of the fixed set was captured"


def failures_are_within_what_is_stated(app: LeftAlone) -> None:
    """A request fails only while something that it needs is down, after four tries of the stock client."""
    outages = [(each.begun, each.ended or float("inf")) for each in app.outages]
    outside = [
        failure
        for failure in app.desk.failures
        if not any(begun - _SLACK_S <= failure.ended and failure.begun <= ended + _SLACK_S for begun, ended in outages)
    ]
    assert not outside, f"failed while nothing was down: {outside}"
    most = 2 * NUM_USERS * len(outages)
    assert len(app.desk.failures) <= most, f"{len(app.desk.failures)} failures in {len(outages)} outages"
