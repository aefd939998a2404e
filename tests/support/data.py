"""Builders of rows and JSONL files for the tests of dataset preparation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.datasets.example import Split
from tunesmith.datasets.formats.lines import LineImporter
from tunesmith.datasets.parse_pool import ParseRules
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PreparedDataset, PrepareOptions

# Prompts whose split is known, so that a small file always has something to train on and something held out.
HALF = PrepareOptions(heldout_share=0.4, validation_share=0.2, max_bad_share=0.5)


def a_chat(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A valid row in `messages` form; each number is another prompt."""
    messages = [
        {"role": "user", "content": f"What is {number} plus one?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]
    return {"messages": messages, **changes}


def a_pair(number: int = 0) -> dict[str, Any]:
    return {"prompt": f"What is {number} plus one?", "chosen": f"{number + 1}", "rejected": "I do not know."}


def a_label(number: int = 0, *, good: bool | None = None) -> dict[str, Any]:
    """A labelled row; of each two numbers, one is desirable."""
    is_good = number % 2 == 0 if good is None else good
    answer = f"{number + 1}" if is_good else "I do not know."
    return {"prompt": f"What is {number} plus one?", "completion": answer, "label": is_good}


def a_tool(name: str = "weather") -> dict[str, Any]:
    """The definition of a function."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": parameters}}


def a_call(city: str = "Paris", call_id: str | None = "call_0001", name: str = "weather") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps({"city": city})}}
    return call if call_id is None else {"id": call_id, **call}


def a_tool_chat(number: int = 0, *, call_id: str | None = "call_0001", **changes: Any) -> dict[str, Any]:
    """A question that is answered with the help of a function."""
    result = {"role": "tool", "content": f"{number} degrees"}
    messages = [
        {"role": "user", "content": f"How warm is it in town {number}?"},
        {"role": "assistant", "content": None, "tool_calls": [a_call(f"town {number}", call_id)]},
        result if call_id is None else {**result, "tool_call_id": call_id},
        {"role": "assistant", "content": f"It has {number} degrees."},
    ]
    return {"messages": messages, "tools": [a_tool()], **changes}


def an_importer(**changes: Any) -> LineImporter:
    return LineImporter(ParseRules(0.1, 0.05, 4 << 20, **changes))


def read_row(row: Any) -> tuple[str, list[str]] | None:
    """Shape and texts of the one row of a line; None if there is none."""
    found = an_importer().read(row if isinstance(row, bytes) else json.dumps(row).encode())
    assert len(found) < 2
    return found[0][:2] if found else None


def chats(num: int) -> list[dict[str, Any]]:
    return [a_chat(number) for number in range(num)]


def encoded(*rows: Any) -> bytes:
    """Rows as JSONL; a row may already be bytes."""
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    return b"".join(line + b"\n" for line in lines)


def a_file(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def prepared(folder: Path, content: bytes, options: PrepareOptions = HALF, name: str = "ds-1") -> PreparedDataset:
    """The dataset of one file with that content."""
    return prepare([a_file(folder, content)], folder / "datasets" / name, options)


def num_examples(dataset: PreparedDataset) -> int:
    return sum(dataset.counts[split] for split in Split)
