"""A workspace is found from anywhere inside it, made once, and nothing leaves it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.config import a_workspace
from tunesmith.core.errors import NotFound, Refused, UsageError
from tunesmith.profiles.keys import schema_fields
from tunesmith.profiles.resolve import resolve, resolve_settings
from tunesmith.profiles.sample import sample_profile, sample_project
from tunesmith.profiles.settings import Settings
from tunesmith.profiles.workspace import Workspace, find_workspace, init_workspace
from tunesmith.profiles.yaml_files import parse_yaml, read_text


def uncommented(sample: str) -> str:
    """The sample with the '#' in front of every default removed."""
    return re.sub(r"^( *)#([a-z_]+:)", r"\1\2", sample, flags=re.MULTILINE)


def test_init_makes_a_workspace_that_resolves(tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path / "new" / "place")
    assert workspace.project_file.is_file()
    assert workspace.profiles_dir.is_dir()
    assert (workspace.data_dir / ".gitignore").read_text().endswith("\n*\n")
    assert resolve_settings(workspace, environ={}) == Settings()


def test_init_where_a_workspace_is_refuses_and_changes_nothing(tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path)
    workspace.project_file.write_text("worker: {poll_s: 9}\n")
    with pytest.raises(Refused, match="is a workspace already"):
        init_workspace(tmp_path)
    assert workspace.project_file.read_text() == "worker: {poll_s: 9}\n"


def test_init_keeps_profiles_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "profiles" / "example.yaml.sample").write_text("my notes")
    init_workspace(tmp_path)
    assert (tmp_path / "profiles" / "mine.yaml").read_text() == "name: mine\n"
    assert (tmp_path / "profiles" / "example.yaml.sample").read_text() == "my notes"


def test_init_on_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Refused, match="cannot make a workspace"):
        init_workspace(tmp_path / "file")


def test_init_interrupted_before_the_project_file_can_be_repeated(tmp_path: Path) -> None:
    workspace = init_workspace(tmp_path)
    workspace.project_file.unlink()
    with pytest.raises(NotFound):
        find_workspace(tmp_path, environ={})
    assert init_workspace(tmp_path).project_file.is_file()


def test_find_goes_upwards_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = init_workspace(tmp_path)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_workspace(deep, environ={}) == workspace
    monkeypatch.chdir(deep)
    assert find_workspace(environ={}) == workspace


def test_find_prefers_the_flag_over_the_variable_over_the_folder(tmp_path: Path) -> None:
    here, variable, flag = (init_workspace(tmp_path / name) for name in ("here", "variable", "flag"))
    environ = {"TUNESMITH_WORKSPACE": str(variable.root)}
    assert find_workspace(here.root, flag.root, environ) == flag
    assert find_workspace(here.root, None, environ) == variable
    assert find_workspace(here.root, None, {"TUNESMITH_WORKSPACE": ""}) == here


@pytest.mark.parametrize("name", ["missing", "empty", "empty/file", "x" * 5000])
def test_find_named_folder_that_is_none_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").write_text("")
    for explicit, environ in ((tmp_path / name, {}), (None, {"TUNESMITH_WORKSPACE": str(tmp_path / name)})):
        with pytest.raises((NotFound, UsageError)) as caught:
            find_workspace(tmp_path, explicit, environ)
        assert "\n" not in caught.value.message


def test_find_nowhere_tells_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="make a workspace with `tunesmith init`"):
        find_workspace(tmp_path, environ={})


def test_workspace_folders_lie_inside_its_root(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    names = [name for name in dir(Workspace) if name.endswith(("_dir", "_file"))]
    paths = [getattr(workspace, name) for name in names]
    assert len(set(paths)) == len(names) == 8
    assert all(path.is_relative_to(tmp_path) for path in paths)


def test_locate_takes_relative_and_absolute_paths(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.locate("models/tiny") == tmp_path / "models" / "tiny"
    assert workspace.locate("/models/tiny") == Path("/models/tiny")
    assert workspace.locate("~/models") == Path.home() / "models"


def test_sample_profile_loads_as_it_is_and_with_every_default_written_out(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    found = []
    for text in (sample_profile(), uncommented(sample_profile())):
        (workspace.profiles_dir / "example.yaml").write_text(text)
        found.append(resolve("example", workspace=workspace, environ={}))
    assert found[0].profile == found[1].profile
    said = found[1].said()
    written = {place for place in schema_fields() if any(key == place or key.startswith(f"{place}.") for key in said)}
    assert written == {key for key in schema_fields() if key.partition(".")[0] not in Settings.model_fields}


def test_sample_project_file_names_every_setting(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, project=uncommented(sample_project()))
    assert resolve_settings(workspace, environ={}) == Settings()
    tree = parse_yaml(read_text(workspace.project_file, "tunesmith.yaml"), "tunesmith.yaml").tree
    known = {key for key in schema_fields() if key.partition(".")[0] in Settings.model_fields}
    assert {f"{section}.{key}" for section, keys in tree.items() for key in keys} == {
        ".".join(key.split(".")[:2]) for key in known
    }
    assert {f"serve.hand_over.{key}" for key in tree["serve"]["hand_over"]} <= known
