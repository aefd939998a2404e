"""Which method a dataset's kind allows, and which one `auto` means; asked by submitting dry runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data import a_chat, a_label, a_pair, a_tool_chat, encoded
from support.workspaces import PROFILE, a_workspace, cli, submit, work_here
from tunesmith.client import Client
from tunesmith.core.errors import ConfigError

ROWS: dict[str, Callable[[int], dict[str, Any]]] = {"supervised": a_chat, "preference": a_pair, "labelled": a_label}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = a_workspace(tmp_path_factory.mktemp("methods"))
    for kind, a_row in {**ROWS, "tools": a_tool_chat}.items():
        path = client.workspace.root / f"{kind}.jsonl"
        path.write_bytes(encoded(*map(a_row, range(60))))
    yield client
    client.close()


def submitted(client: Client, kind: str, method: str) -> str:
    source: Path = client.workspace.root / f"{kind}.jsonl"
    return client.profiles.dry_run(PROFILE, source, overrides=[f"recipe.method={method}"]).method


@pytest.mark.parametrize(
    ("kind", "wanted", "method"),
    [
        ("supervised", "auto", "sft"),
        ("preference", "auto", "orpo"),
        ("labelled", "auto", "kto"),
        ("supervised", "sft", "sft"),
        ("preference", "sft", "sft"),
        ("preference", "dpo", "dpo"),
        ("preference", "orpo", "orpo"),
        ("preference", "kto", "kto"),
        ("labelled", "kto", "kto"),
        ("tools", "auto", "sft"),
    ],
)
def test_method_follows_from_the_kind_of_the_data(client: Client, kind: str, wanted: str, method: str) -> None:
    assert submitted(client, kind, wanted) == method


@pytest.mark.parametrize(
    ("kind", "method", "told"),
    [
        ("supervised", "kto", "kto needs undesirable answers too"),
        ("supervised", "dpo", "dpo needs pairs (chosen and rejected)"),
        ("supervised", "orpo", "orpo needs pairs (chosen and rejected)"),
        ("labelled", "sft", "sft cannot learn from labelled answers"),
        ("labelled", "dpo", "dpo cannot learn from labelled answers"),
        ("labelled", "orpo", "set recipe.method: kto, or prepare the desirable answers alone"),
    ],
)
def test_method_that_the_data_does_not_fit_is_refused_by_one_line(
    client: Client, kind: str, method: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        submitted(client, kind, method)
    assert told in caught.value.message
    assert "\n" not in caught.value.message


def test_show_tells_how_many_answers_are_undesirable(client: Client) -> None:
    dataset, report = client.datasets.prepare(PROFILE, [client.workspace.root / "labelled.jsonl"])
    assert dataset.kind == "labelled"
    shown = cli("dataset", "show", dataset.id, cwd=client.workspace.root)
    assert (shown.code, shown.err) == (0, "")
    (line,) = [line for line in shown.out.splitlines() if line.startswith("undesirable")]
    assert [f"{num} " in line for num in report.num_undesirable.values()] == [True] * 3
    assert cli("dataset", "verify", dataset.id, cwd=client.workspace.root).code == 0


@pytest.mark.parametrize("kind", ["labelled", "tools"])
def test_run_is_judged_on_whole_desirable_conversations(kind: str, tmp_path: Path) -> None:
    a_row = {**ROWS, "tools": a_tool_chat}[kind]
    with a_workspace(tmp_path) as client:
        source = client.workspace.root / "rows.jsonl"
        source.write_bytes(encoded(*map(a_row, range(80))))
        submit(client, data=source)
        work_here(client)
        (written,) = client.workspace.root.rglob("cases.jsonl")
        cases = [json.loads(line)["messages"] for line in written.read_text().splitlines()]
    assert len(cases) >= 10
    if kind == "labelled":
        assert all(case[-1]["role"] == "assistant" and case[-1]["content"] != "I do not know." for case in cases)
    else:
        assert all([message["role"] for message in case][:2] == ["tools", "user"] for case in cases)
        assert all(case[2]["tool_calls"] and case[3]["tool_call_id"] for case in cases)
