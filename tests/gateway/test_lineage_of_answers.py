"""The id that a chat client got leads to the version that answered, through the real server and its captures."""

from __future__ import annotations

import pytest

from support.gateway import PROFILE, ServerProcess, ask
from support.workspaces import wait_for
from tunesmith.client import Client
from tunesmith.core.errors import NotFound
from tunesmith.lineage.rules.graph import Graph


def lineage_of(client: Client, answer_id: str) -> Graph:
    """As soon as the answer is stored."""

    def stored() -> Graph | None:
        try:
            return client.lineage.graph(answer_id)
        except NotFound:
            return None

    return wait_for(stored, what=f"for {answer_id}")


def test_answer_id_leads_to_the_version_that_answered_and_to_its_experience(
    server: ServerProcess, client: Client
) -> None:
    answer = ask(server, n=2)
    for answer_id in (answer.id, f"{answer.id}/1"):
        graph = lineage_of(client, answer_id)
        assert graph.focus == f"answer:{answer_id}"
        told = {(edge.source, edge.verb.value, graph.node(edge.target).name) for edge in graph.edges}
        assert (f"answer:{answer_id}", "answered by", f"{PROFILE}@v1") in told
        (experience,) = [edge.source for edge in graph.edges if edge.verb.value == "keeps"]
        assert graph.node(experience).facts["source"] == "serve"


def test_answer_of_the_base_and_one_that_was_not_kept(server: ServerProcess, client: Client) -> None:
    graph = lineage_of(client, ask(server, model=f"{PROFILE}@base").id)
    (answered,) = [edge for edge in graph.edges if edge.verb.value == "answered by"]
    assert graph.node(answered.target).kind == "base"
    refused = ask(server, store=False)
    with pytest.raises(NotFound, match="it was not captured"):
        client.lineage.graph(refused.id)
