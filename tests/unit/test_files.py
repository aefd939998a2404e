"""Published folders: every name in them is made durable before the folder has its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.core.errors import DataError
from tunesmith.core.files import (
    MANIFEST,
    FileTooLarge,
    NotPlainFile,
    copy_published,
    json_lines,
    publish_folder,
    read_capped,
    read_manifest,
    verify_folder,
)

STRACE = "/usr/bin/strace"


def test_published_folder_with_folders_inside_verifies_and_makes_its_parents(tmp_path: Path) -> None:
    staged = a_staged_folder(tmp_path)
    manifest = publish_folder(staged, tmp_path / "new" / "place" / "final", {"a": 1})
    found = verify_folder(tmp_path / "new" / "place" / "final", manifest.digest)
    assert set(found.files) == {"top.txt", "inner/deep/low.txt"}
    assert not staged.exists()


def test_copy_holds_what_the_manifest_lists_and_no_mode_of_the_original(tmp_path: Path) -> None:
    manifest = publish_folder(a_staged_folder(tmp_path), tmp_path / "final", {"a": 1})
    (tmp_path / "final" / "top.txt").chmod(0o4777)
    (tmp_path / "final" / "beside").symlink_to(tmp_path)
    (tmp_path / "final" / "inner" / "more.txt").write_text("more")
    assert copy_published(tmp_path / "final", tmp_path / "copy") == manifest
    made = sorted(path for path in (tmp_path / "copy").rglob("*") if not path.is_dir())
    assert [path.relative_to(tmp_path / "copy").as_posix() for path in made] == ["inner/deep/low.txt", "top.txt"]
    assert made[1].stat().st_mode & 0o7022 == 0
    assert publish_folder(tmp_path / "copy", tmp_path / "again", manifest.meta).digest == manifest.digest


def test_capped_read_takes_a_plain_file_up_to_its_limit_and_nothing_that_could_trap_it(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"x" * 10)
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert read_capped(file, 10) == b"x" * 10
    with pytest.raises(FileTooLarge):
        read_capped(file, 9)
    with pytest.raises(OSError, match="symbolic links"):
        read_capped(link, 10)
    assert read_capped(link, 10, follow_links=True) == b"x" * 10
    for place in (pipe, tmp_path):
        with pytest.raises(NotPlainFile):
            read_capped(place, 10, follow_links=True)


def test_manifest_that_is_a_link_a_pipe_or_too_large_is_refused_by_its_reason(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a plain file"):
        read_manifest(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="not a plain file"):
        read_manifest(tmp_path)
    path.unlink()
    with path.open("wb") as sink:
        sink.truncate(9 << 20)
    with pytest.raises(DataError, match="larger than any manifest"):
        read_manifest(tmp_path)


def test_json_lines_end_at_newlines_only_and_skip_blank_ones() -> None:
    # U+2028 and U+0085 end a line of a str, but not one of JSONL
    assert json_lines('{"a": "x\u2028y\x85z"}\n\n[1]\n'.encode()) == [{"a": "x\u2028y\x85z"}, [1]]
    with pytest.raises(ValueError, match="Expecting"):
        json_lines(b"{}\n{\n")


@pytest.mark.skipif(not os.path.exists(STRACE), reason="strace is not installed: apt-get install strace")
def test_publishing_syncs_every_folder_before_the_rename_and_every_new_parent(tmp_path: Path) -> None:
    a_staged_folder(tmp_path)
    script = "import sys; from pathlib import Path; from tunesmith.core.files import publish_folder; "
    script += "root = Path(sys.argv[1]); publish_folder(root / 'staged', root / 'new' / 'place' / 'final')"
    log = tmp_path / "calls"
    argv = [STRACE, "-y", "-e", "trace=fsync,rename", "-o", str(log), sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(argv, check=True)
    lines = log.read_text().splitlines()
    renamed = next(place for place, line in enumerate(lines) if line.startswith("rename(") and "/final" in line)
    before, after = lines[:renamed], lines[renamed:]
    for name in ("staged/inner>", "staged/inner/deep>", "staged>", f"{tmp_path}>", "/new>"):
        assert any(line.startswith("fsync(") and name in line for line in before), name
    assert any(line.startswith("fsync(") and "/new/place>" in line for line in after)


def a_staged_folder(root: Path) -> Path:
    (root / "staged" / "inner" / "deep").mkdir(parents=True)
    (root / "staged" / "top.txt").write_text("top")
    (root / "staged" / "inner" / "deep" / "low.txt").write_text("low")
    return root / "staged"
