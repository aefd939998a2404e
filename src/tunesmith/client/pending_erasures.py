"""Items of the inbox about datasets that still hold the text of something forgotten."""

from __future__ import annotations

from tunesmith.client.inbox import InboxItem
from tunesmith.datasets import queries as datasets
from tunesmith.experience.forgetting import forget
from tunesmith.experience.forgetting.queries import erasures
from tunesmith.experience.forgetting.queries.erasures import Pending
from tunesmith.runs.session import Session
from tunesmith.store.database import Tx

_NAMED = 3


def read_erasures(session: Session) -> list[InboxItem]:
    with session.database.read() as tx:
        return [_item(tx, pending) for pending in erasures.pending(tx)]


def _item(tx: Tx, pending: Pending) -> InboxItem:
    dataset = datasets.get(tx, pending.dataset_id)
    reading = forget.readers_of(tx, pending)
    why = "a worker rewrites it at its next sweep"
    what_to_do = f"start a worker; if it stays, `dataset verify {dataset.id}` says why: remove its folder then"
    if reading:
        why = f"{', '.join(reading[:_NAMED])} still {'reads' if len(reading) == 1 else 'read'} it"
        what_to_do = f"wait, or `experience forget {pending.experience_ids[0]} --stop-runs`"
    elif failure := forget.last_failure(tx, dataset.id, pending.since):
        why = f"the rewrite failed: {failure}"
        what_to_do = (
            f"fix that, then `experience forget {pending.experience_ids[0]}`; "
            f"if `dataset verify {dataset.id}` says that it is damaged, remove its folder first"
        )
    num = len(pending.experience_ids)
    return InboxItem(
        "erasure",
        dataset.id,
        dataset.profile,
        pending.since,
        f"the text of {num} forgotten {'experience' if num == 1 else 'experiences'} is still in it: {why}",
        what_to_do,
        num=num,
        newest=pending.experience_ids[-_NAMED:],
    )
