"""A workspace that is copied while it is served: each server answers for its own, and neither moves the other."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.gateway import a_served_workspace, a_server, ask
from support.workspaces import wait_for, work_here
from tunesmith.client import Client


def test_copy_of_a_served_workspace_is_served_beside_it(base: Path, tmp_path: Path) -> None:
    client = a_served_workspace(tmp_path / "ws", base, num_versions=2)
    with a_server(client.workspace.root) as first:
        assert ask(first, model="support").model == "support@v1"
        files = shutil.ignore_patterns("*.sock")
        shutil.copytree(client.workspace.root, tmp_path / "copy", ignore=files)
        with Client(tmp_path / "copy", actor="user:test", environ={}) as copy:
            copy.adapters.rollback("support")
            work_here(copy)  # its targets follow; the server of the original is none of them
            assert ask(first, model="support").model == "support@v1"
            for left in (copy.workspace.data_dir / "serve").glob("*.json"):
                left.unlink()  # the builder would take the server of the original for the new one
            with a_server(copy.workspace.root) as second:
                assert ask(second, model="support").model == "support@base"
                assert ask(second, model="support@v1").model == "support@v1"
                client.adapters.rollback("support")
                wait_for(lambda: ask(first, model="support").model == "support@base", 10)
        assert ask(first, model="support@v1").model == "support@v1"
    client.close()
