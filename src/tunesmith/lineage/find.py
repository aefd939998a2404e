"""What an id means: a version, a run, a dataset, an experience, an evaluation, or the answer that a client got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import NotFound, UsageError, did_you_mean, quoted
from tunesmith.datasets import queries as datasets
from tunesmith.experience.queries import experiences
from tunesmith.experience.rules.experience import ExperienceState
from tunesmith.lineage import queries
from tunesmith.lineage.rules.graph import NodeKind
from tunesmith.models import queries as adapters
from tunesmith.runs.queries import runs
from tunesmith.store.database import Tx

KINDS = (
    "a version (support@v3 or ad-…), a run (run-…), a dataset (ds-…), an experience (xp-…), an evaluation (ev-…) "
    "or the id of an answer (chatcmpl-…)"
)
_ANSWERS = ("chatcmpl-", "cmpl-")
_BY_PREFIX: dict[str, tuple[NodeKind, Callable[[Tx, str], Any]]] = {
    "ad": (NodeKind.VERSION, adapters.find),
    "run": (NodeKind.RUN, runs.find),
    "ds": (NodeKind.DATASET, datasets.find),
    "xp": (NodeKind.EXPERIENCE, experiences.find),
    "ev": (NodeKind.EVALUATION, queries.find_evaluation),
}
_LISTED = {
    NodeKind.VERSION: "`tunesmith adapter list`",
    NodeKind.RUN: "`tunesmith run list`",
    NodeKind.DATASET: "`tunesmith dataset list`",
    NodeKind.EXPERIENCE: "`tunesmith experience list`",
    NodeKind.EVALUATION: "`tunesmith run show RUN`",
}


@dataclass(frozen=True)
class Found:
    kind: NodeKind
    id: str


def find(tx: Tx, text: str) -> Found:
    """What the text names; an error lists the nearest known name, or the kinds of id that there are."""
    if text.startswith(_ANSWERS):
        return _answer(tx, text)
    if ":" in text:
        return _experience(experiences.find(tx, text))
    if "@v" in text:
        return _version(tx, text)
    prefix = text.partition("-")[0]
    if "-" in text and prefix in _BY_PREFIX:
        kind, look = _BY_PREFIX[prefix]
        try:
            return Found(kind, look(tx, text).id)
        except NotFound as error:
            close = did_you_mean(text, queries.newest_ids(tx, prefix))
            hint = close if close.endswith("?") else f"; {_LISTED[kind]} shows what is there"
            raise NotFound(f"{error.message.partition(';')[0]}{hint}") from None
    raise _unknown(tx, text)


def _version(tx: Tx, text: str) -> Found:
    try:
        return Found(NodeKind.VERSION, adapters.find(tx, text).id)
    except (NotFound, UsageError):
        raise NotFound.named("version", text, queries.version_names(tx)) from None


def _answer(tx: Tx, text: str) -> Found:
    experience_id = queries.experience_with_key(tx, text)
    if experience_id is None:
        raise NotFound(
            f"no answer {quoted(text)} is kept as an experience: it was not captured, is not stored yet, or another "
            "workspace served it; `tunesmith experience list` shows what is there"
        )
    return _experience(experiences.get(tx, experience_id), is_answer=True)


def _experience(found: experiences.Experience, *, is_answer: bool = False) -> Found:
    """A forgotten answer is known by nothing but the experience that is left of it."""
    if is_answer and found.state is not ExperienceState.FORGOTTEN:
        return Found(NodeKind.ANSWER, found.natural_key)
    return Found(NodeKind.EXPERIENCE, found.id)


def _unknown(tx: Tx, text: str) -> UsageError | NotFound:
    profile = text.removesuffix("@base").removesuffix("@live")
    names = queries.profile_names(tx)
    if profile in names:
        live = adapters.live(tx, profile)
        hint = "nothing but the bare base is live" if live is None else f"{live.name} is live now"
        return UsageError(f"{quoted(text)} is a profile, not one version of it; {hint}. Name {KINDS}")
    close = did_you_mean(text, queries.version_names(tx))
    advice = f"{close} Name {KINDS}" if close.endswith("?") else f"; name {KINDS}"
    return NotFound(f"nothing is called {quoted(text)}{advice}")
