"""Builders for what is forgotten: datasets whose examples were made from experiences, and dumps to search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from support.rows import ACTOR, dump
from support.workspaces import PROFILE
from tunesmith.client import Client
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.reading import read_split
from tunesmith.datasets.report import MemberRole
from tunesmith.datasets.tables import members
from tunesmith.experience.queries import experiences
from tunesmith.store.database import Database

SECRET = "zebrafish"
"""A word that nobody but the person to be forgotten has said."""
PARTED = {"data": {"heldout_share": 0.3, "validation_share": 0.2, "screens": ["email"]}}
"""A profile whose datasets have something in every split."""


def add(client: Client, question: str, answer: str, **about: Any) -> str:
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return client.experiences.add(PROFILE, talk, **about).id


def a_dataset_of(
    client: Client, num: int, *, twice: bool = False, suspects: Sequence[str] = ()
) -> tuple[str, dict[Split, list[Example]]]:
    """A dataset of `num` prompts, and its examples; `twice`: with two answers each."""
    rows = [
        {"prompt": f"Question number {n} of {num}", "completion": f"Answer {answer} to number {n}"}
        for n in range(num)
        for answer in range(1 + twice)
    ]
    rows += [{"prompt": question, "completion": "It is so."} for question in suspects]
    file = client.workspace.root / f"rows-{num}-{twice}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset, _ = client.datasets.prepare(PROFILE, [file])
    folder = client.workspace.data_dir / dataset.path
    return dataset.id, {split: read_split(folder, split) for split in Split}


def as_member(
    client: Client,
    database: Database,
    dataset_id: str,
    example: Example,
    split: Split,
    experience_id: str | None = None,
) -> str:
    """The experience that an example of a dataset was made from; as assembly records it."""
    talk = [{"role": each["role"], "content": each["content"]} for each in example.messages]
    with database.write() as tx:
        known = experience_id or experiences.add(tx, PROFILE, example.id, talk, actor=ACTOR)[0]
        tx.run(
            members.insert().values(
                dataset_id=dataset_id, experience_id=known, example_id=example.id, group_id=example.group,
                split=split.value, role=MemberRole.GOLD, reason="as the test wants",
            )
        )  # fmt: skip
    return known


def everything_stored(database: Database) -> str:
    """Every value of every row, as one text."""
    return repr(dump(database))


def everything_on_disk(folder: Path) -> bytes:
    """Every byte below a folder, with Parquet read: its pages are compressed."""
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        found.append(path.read_bytes())
        if path.suffix == ".parquet":
            found.append(json.dumps(pq.read_table(path).to_pylist(), ensure_ascii=False).encode())
    return b"\n".join(found)
