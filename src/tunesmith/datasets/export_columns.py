"""The columns of an exported Parquet file: those that most training tools read, and `id` and `split`."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tunesmith.datasets.example import Kind

_TEXT = pa.string()
_CALL = pa.struct({"id": _TEXT, "type": _TEXT, "function": pa.struct({"name": _TEXT, "arguments": _TEXT})})
_MESSAGES = pa.list_(
    pa.struct(
        {
            "role": _TEXT,
            "content": _TEXT,
            "weight": pa.int8(),
            "tool_calls": pa.list_(_CALL),
            "tool_call_id": _TEXT,
            "name": _TEXT,
        }
    )
)
_FORMS = {
    Kind.SUPERVISED: {"messages": _MESSAGES},
    Kind.PREFERENCE: {"prompt": _MESSAGES, "chosen": _MESSAGES, "rejected": _MESSAGES},
    Kind.LABELLED: {"prompt": _MESSAGES, "completion": _MESSAGES, "label": pa.bool_()},
}


def columns_of(kind: Kind) -> Any:
    """The schema for examples of this kind; `tools` is a text of JSON, because no two definitions look alike."""
    return pa.schema({"id": _TEXT, "split": _TEXT, **_FORMS[kind], "tools": _TEXT})
