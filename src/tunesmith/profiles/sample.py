"""Sample files written by `tunesmith init`, made from the schema itself so that they cannot say what is not so."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from tunesmith.core.section import Section, doc_of
from tunesmith.profiles.keys import Names, subsection
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.value_checks import expected

_REQUIRED_EXAMPLES: dict[Names, Any] = {
    ("name",): "example",
    ("role",): "assistant",
    ("base", "path"): "models/my-base-model",
    ("base", "family"): "llama",
}

_PROFILE_HEAD = """\
Every key of a profile: what it is for, what it may be, and its default (commented out).
Copy this file to NAME.yaml, set `name: NAME`, and remove the '#' in front of what you change.
Then run: tunesmith profile check NAME"""

_PROJECT_HEAD = """\
The settings of this workspace: what each is for, what it may be, and its default (commented out).
Any section of a profile may stand here too (recipe:, gate:, …); it then wins over every profile.
Precedence: schema defaults < profile < campaign < this file < environment < --set.
`tunesmith config explain PROFILE` shows the value of every key and who said it."""


def sample_profile() -> str:
    """profiles/example.yaml.sample"""
    return "\n".join([*_comment(_PROFILE_HEAD, 0), *_section(Profile, ())]) + "\n"


def sample_project() -> str:
    """tunesmith.yaml"""
    return "\n".join([*_comment(_PROJECT_HEAD, 0), *_section(Settings, ())]) + "\n"


def _section(section: type[Section], prefix: Names) -> list[str]:
    """One block per key: its documentation, then the key; a default is commented out, a section's name is not."""
    lines: list[str] = []
    indent = "  " * len(prefix)
    for name, info in section.model_fields.items():
        path = (*prefix, name)
        below = subsection(info)
        doc = doc_of(section, name)
        if not prefix:
            lines.append("")
        if below is not None:
            lines += [*_comment(doc, len(prefix)), f"{indent}{name}:", *_section(below, path)]
            continue
        may_be = expected(info.annotation, tuple(info.metadata))
        lines += [*_comment(doc, len(prefix)), f"{indent}{_written(path, info)}  # {may_be}"]
    return lines


def _written(path: Names, info: FieldInfo) -> str:
    if path in _REQUIRED_EXAMPLES:
        return f"{path[-1]}: {_inline(_REQUIRED_EXAMPLES[path])}"
    default = info.get_default(call_default_factory=True, validated_data={})
    assert default is not PydanticUndefined, f"{path} is required and has no example"
    return f"#{path[-1]}: {_inline(to_jsonable_python(default))}"


def _comment(text: str, depth: int) -> list[str]:
    indent = "  " * depth
    wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, 110 - len(indent))]
    return [f"{indent}# {line}" for line in wrapped]


def _inline(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
