"""`client.lineage`: the graph around any id, as a value, JSON or SVG; provenance statements and model cards."""

from __future__ import annotations

from typing import Any

from tunesmith.core.errors import UsageError
from tunesmith.lineage.collect import DEFAULT_DEPTH, collect
from tunesmith.lineage.find import find
from tunesmith.lineage.rules.graph import MAX_DEPTH, Graph
from tunesmith.runs.session import Session


class Lineage:
    def __init__(self, session: Session) -> None:
        self._session = session

    def graph(self, thing: str, *, depth: int = DEFAULT_DEPTH, with_all: bool = False) -> Graph:
        """What a thing came from and what came of it.

        `thing`: a version, run, dataset, experience, evaluation, or the id of an answer. `depth`: how many steps to
        follow either way. `with_all`: every experience of its datasets, where otherwise the first few are shown.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise UsageError(f"depth must be between 1 and {MAX_DEPTH}")
        with self._session.database.read() as tx:
            return collect(tx, self._session.workspace.data_dir, find(tx, thing), depth=depth, with_all=with_all)

    def svg(self, graph: Graph) -> str:
        """The graph as a drawing, from left to right."""
        from tunesmith.lineage.rules.drawing import draw

        return draw(graph)

    def provenance(self, adapter: str) -> dict[str, Any]:
        """A provenance statement about a version, in the shape of in-toto; its files are hashed again first."""
        from tunesmith.lineage.provenance import statement_of

        return statement_of(self._session, adapter)

    def card(self, adapter: str) -> str:
        """A model card in Markdown about a version."""
        from tunesmith.lineage.card import card_of

        return card_of(self._session, adapter)
