"""The story of a suspect: prepared by command, shown on the screen, quarantined on disk, and never given to a run."""

from __future__ import annotations

import json
from pathlib import Path

from support.workspaces import a_jsonl, a_workspace, cli
from tunesmith.datasets.example import Split


def test_suspects_are_told_by_prepare_and_show_and_kept_aside(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        root = client.workspace.root
        source = a_jsonl(root / "rows.jsonl")
        leak = {"prompt": "Who answers questions about orders?", "completion": "Ask maria.garcia@gmail.com for it."}
        with source.open("a") as sink:
            sink.write(json.dumps(leak) + "\n")
        made = cli("dataset", "prepare", "support", source, cwd=root)
        assert made.code == 0, made
        shown = cli("dataset", "show", made.last_line, cwd=root)
        for said in (made.out + made.err, shown.out + shown.err):
            flat = " ".join(said.split())
            assert "1 suspect row was quarantined" in flat
            assert "email" in flat
            assert "rows.jsonl line 61" in flat
            assert "maria" not in flat
        folder = client.workspace.datasets_dir / made.last_line
        [kept] = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
        assert [message["content"] for message in kept["messages"]] == list(leak.values())
        assert sum(client.datasets.show(made.last_line)[0].counts.values()) == 60
        assert cli("dataset", "verify", made.last_line, cwd=root).code == 0
        assert all("maria" not in str((folder / f"{split}.parquet").read_bytes()) for split in Split)

        off = cli("dataset", "prepare", "support", source, "--set", "data.screens=none", cwd=root)
        assert off.code == 0, off
        assert sum(client.datasets.show(off.last_line)[0].counts.values()) == 61
        chosen = cli("dataset", "prepare", "support", source, "--set", "data.screens=[link, secret]", cwd=root)
        assert chosen.last_line == off.last_line  # the same content
        wrong = cli("dataset", "prepare", "support", source, "--set", "data.screens=[secrets]", cwd=root)
        assert wrong.code != 0
        assert "secret" in wrong.err
