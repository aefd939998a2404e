"""What the drills of experiences run in processes of their own."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from tunesmith.client import Client


def add_for_ever(root: str, acknowledged: str) -> None:
    """Add experiences and feedback through the client; every id is noted once the call has returned."""
    client = Client(root)
    with Path(acknowledged).open("a", buffering=1) as sink:
        for number in count():
            messages = [
                {"role": "user", "content": f"{os.getpid()} {number}?"},
                {"role": "assistant", "content": f"{os.getpid()} {number}!"},
            ]
            added = client.experiences.add("support", messages)
            sink.write(f"{added.id}\n")
            sink.write(f"{client.feedback.add(added.id, 'helpful').id}\n")


def add_the_same(root: str, num: int, told: str) -> None:
    """Add `num` interactions that every such process adds too; notes each id, and whether it was new."""
    with Client(root) as client, Path(told).open("w") as sink:
        for number in range(num):
            messages = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]
            added = client.experiences.add("support", messages, key=f"key {number}")
            sink.write(f"{added.id} {int(added.is_new)}\n")


def assemble_for_ever(root: str, acknowledged: str) -> None:
    """Assemble datasets one after the other, each from what the last one has let go of; notes each id."""
    client = Client(root)
    with Path(acknowledged).open("a", buffering=1) as sink:
        while True:
            made, _ = client.datasets.assemble("support")
            sink.write(f"{made.id}\n")
            run = client.runs.submit("support", made.id)
            client.runs.cancel(run.id)
