"""Files that people and attackers write: read as plain values, or refused with one line that names the place."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from support.config import HEAD, a_workspace, write_profile
from tunesmith.core.errors import ConfigError
from tunesmith.profiles.resolve import resolve
from tunesmith.profiles.yaml_files import MAX_BYTES, parse_inline, parse_yaml, read_text


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        parse_yaml(read_text(path, "profiles/x.yaml"), "profiles/x.yaml")
    assert time.monotonic() - started < 1.0
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ("a: !!python/object/apply:os.system ['true']", 1, "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("a: !!str 1", 1, "the tag 'tag:yaml.org,2002:str' is not allowed"),
        ("a: !secret x", 1, "the tag '!secret' is not allowed"),
        ("a: 1\nb: !!python/name:os.system ''", 2, "is not allowed"),
        ("a: 1\nb: 2\na: 3", 3, "a: written twice, first on line 1"),
        ("a:\n  b: 1\n  b: 1", 3, "a.b: written twice, first on line 2"),
        ("a: {<<: {b: 1}}", 1, "merge keys"),
        ("a: [1,\n2\n", 3, "(while parsing a flow sequence that begins on line 1)"),
        ("a:\n\tb: 1", 2, "not valid YAML"),
        ("a: b: c", 1, "not valid YAML"),
        ("a: 1\n---\nb: 2", 2, "a second document"),
        ("? [a, b]\n: 1", 1, "a key must be plain text"),
        ("a: *b", 1, "stands for nothing"),
        ("a: &b [*b]", 1, "stands for nothing"),
        ("a: " + "[" * 5000, 1, "nested deeper"),
        ("a: " + "9" * 5000, 1, "has more than"),
        ("a: 0." + "9" * 5000, 1, "has more than"),
        (b"a: 1\nb: \xff\xfe", 2, "not UTF-8"),
        ("a: 1".encode("utf-16"), 1, "not UTF-8"),
    ],
)
def test_yaml_hostile_or_broken_refused_with_line(tmp_path: Path, content: str | bytes, line: int, reason: str) -> None:
    message = refusal(tmp_path / "x.yaml", content)
    assert message.startswith(f"profiles/x.yaml:{line}: ")
    assert reason in message


@pytest.mark.parametrize("content", ["- a\n- b", "just text", "3"])
def test_yaml_top_level_not_a_mapping_refused(tmp_path: Path, content: str) -> None:
    assert "must be a mapping" in refusal(tmp_path / "x.yaml", content)


def test_yaml_nul_character_refused(tmp_path: Path) -> None:
    assert "not valid YAML" in refusal(tmp_path / "x.yaml", b"a: \x00")


def test_yaml_alias_bomb_refused_quickly(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than 10000 values" in refusal(tmp_path / "x.yaml", "\n".join(lines))


def test_yaml_modest_alias_means_what_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &here {b: 1}\nc: *here")
    assert parse_yaml(read_text(tmp_path / "x.yaml", "x"), "x").tree == {"a": {"b": 1}, "c": {"b": 1}}


def test_yaml_too_large_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with path.open("wb") as sink:
        sink.truncate(5 << 30)  # sparse: 5 GB that take no room
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        parse_yaml(read_text(path, "x.yaml"), "x.yaml")


def test_yaml_largest_allowed_file_answers_within_a_second(tmp_path: Path) -> None:
    many = "".join(f"k{n}: v\n" for n in range(200_000))[:MAX_BYTES]
    assert "more than 10000 values" in refusal(tmp_path / "x.yaml", many)


def test_yaml_fifo_and_folder_refused_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "folder.yaml", "zero.yaml"):
        with pytest.raises(ConfigError, match="not a regular file"):
            parse_yaml(read_text(tmp_path / name, name), name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("2_000_000", 2_000_000),
        ("010", 10),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("'1e-4'", "1e-4"),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{a: 1}", {"a": 1}),
        (".inf", math.inf),
        ("1e999", math.inf),
    ],
)
def test_plain_scalars_mean_what_people_expect(text: str, value: object) -> None:
    parsed = parse_inline(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_yaml_byte_order_mark_is_ignored_and_crlf_keeps_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    document = parse_yaml(read_text(path, "x.yaml"), "x.yaml")
    assert document.tree == {"a": 1, "b": {"c": 2}}
    assert document.where(("b", "c")) == "x.yaml:3"
    assert document.where(("b", "c", "deeper")) == "x.yaml:3"


def test_exponent_without_dot_reaches_the_recipe_as_a_number(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "recipe:\n  lr: 1e-4\n", HEAD)
    assert resolve("dates", workspace=workspace, environ={}).profile.recipe.lr == 1e-4
