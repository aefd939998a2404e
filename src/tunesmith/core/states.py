"""What a state machine is here: an enum, a table, one check, one error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from tunesmith.core.errors import InvalidTransition

S = TypeVar("S", bound=StrEnum)


class Transitions(Generic[S]):
    """The states of one entity and which may follow which.

    States without a successor are finished; so are those of `settled`, whose work is done although a person may still
    change what became of it.
    """

    def __init__(self, entity: str, table: Mapping[S, frozenset[S]], settled: frozenset[S] = frozenset()) -> None:
        self.entity = entity
        self.table = dict(table)
        self.finished = settled | {state for state, following in self.table.items() if not following}
        self.unfinished = frozenset(self.table) - self.finished

    def allows(self, old: S, new: S) -> bool:
        return new in self.table[old]

    def check(self, entity_id: str, old: S, new: S) -> None:
        """Raise unless `new` may follow `old`; the message says what may."""
        if self.allows(old, new):
            return
        following = ", ".join(sorted(self.table[old])) or "nothing: it is finished"
        raise InvalidTransition(
            f"{self.entity} {entity_id} is {old} and cannot become {new}; what can follow: {following}"
        )
