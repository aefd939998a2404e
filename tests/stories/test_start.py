"""Starting on one's own model: what `tunesmith init --base --task` prints works, and a refusal leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.gateway import a_server
from support.hub_server import HubModel, HubServer
from support.native import a_micro_base
from support.workspaces import a_base, a_jsonl, a_profile, cli, write_settings
from tunesmith.client import Client
from tunesmith.core.errors import ConfigError, Refused, UsageError
from tunesmith.profiles.workspace import is_workspace


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_micro_base(tmp_path_factory.mktemp("bases") / "tiny base")


def a_whole_base(folder: Path) -> Path:
    a_base(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def printed_commands(out: str) -> list[list[str]]:
    """The numbered commands of the output, without what is said about them."""
    return [shlex.split(line)[1:] for line in re.findall(r"^  \d  (tunesmith .*?)(?:  .*)?$", out, flags=re.MULTILINE)]


@pytest.mark.slow
def test_printed_commands_lead_from_nothing_to_a_deployed_version(tmp_path: Path, tiny: Path) -> None:
    made = cli("init", "my-models", "--base", str(tiny), "--task", "support", cwd=tmp_path)
    assert made.code == 0, made.err
    root = tmp_path / "my-models"
    assert made.last_line == str(root)
    serve, worker, submit = printed_commands(made.out)
    assert (serve, worker) == (["serve"], ["worker"])
    assert submit == ["run", "submit", "support", "examples.jsonl"]

    # what is shortened; and random weights learn too little at the usual rate to matter to the gate
    write_settings(root, {"watch": {"for_s": 0.2, "interval_s": 0.1}, "recipe": {"lr": 0.01}})
    checked = cli("profile", "check", "support", "--json", cwd=root)
    assert checked.code == 0, checked.err
    assert checked.json["warning"] is None
    (campaign,) = cli("campaign", "list", "--json", cwd=root).json
    assert (campaign["name"], campaign["state"]) == ("support", "active")

    a_jsonl(root / "examples.jsonl", n=100)
    with a_server(root, *serve[1:], "--port", "0") as server:
        submitted = cli(*submit, cwd=root)
        assert submitted.code == 0, submitted.err
        assert "held-out" not in submitted.out + submitted.err, "no warning: the first round can be judged"
        assert cli(*worker, "--until-idle", cwd=root, timeout_s=120.0).code == 0
        (run,) = cli("run", "list", "--json", cwd=root).json
        assert (run["id"], run["state"]) == (submitted.last_line, "deployed"), run
        asked = [{"role": "user", "content": "What is 7 plus 7?"}]
        answer = server.api.chat.completions.create(model="support", messages=asked)  # type: ignore[call-overload]
    assert answer.model == "support@v1"
    assert answer.usage.completion_tokens <= 128, "answers.max_tokens holds"


@pytest.mark.parametrize("task", ["support", "triage", "a1"])
def test_first_round_opens_and_can_be_judged_at_the_number_that_was_printed(tmp_path: Path, task: str) -> None:
    """Another task has other prompts here, so another draw of what is held out."""
    always = {"TUNESMITH__CAMPAIGN__WINDOW": "00:00-24:00"}
    Client.init(tmp_path / "ws", base=a_whole_base(tmp_path / "tiny"), task=task).close()
    lines = [{"prompt": f"{task}: what is {i} plus {i}?", "completion": f"It is {i + i}."} for i in range(100)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Client(tmp_path / "ws", environ=always) as client:
        assert not client.campaigns.next_round(task).status.decision.opens
        client.experiences.import_files(task, [tmp_path / "chats.jsonl"])
        decision = client.campaigns.next_round(task).status.decision
        assert decision.opens, decision.why_not
        assert client.profiles.heldout_warning(task) is None
        mixed = client.datasets.preview_assembly(task)
        assert (mixed.warning, mixed.num_new >= 50) == (None, True)


def test_relative_base_is_found_from_anywhere_afterwards(tmp_path: Path) -> None:
    a_whole_base(tmp_path / "here" / "tiny")
    made = cli("init", "ws", "--base", "tiny", "--task", "support", cwd=tmp_path / "here")
    assert made.code == 0, made.err
    assert "cd ws" in made.out
    for place in (tmp_path, tmp_path / "here" / "ws" / "profiles"):
        done = cli("profile", "check", "support", "--workspace", str(tmp_path / "here" / "ws"), cwd=place)
        assert done.code == 0, done.err


def test_init_in_a_workspace_adds_a_profile_and_touches_no_other(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    with Client.init(tmp_path / "ws", base=base, task="first") as client:
        first = (client.workspace.profiles_dir / "first.yaml").read_text()
        settings = client.workspace.project_file.read_text()
    added = cli("init", "--base", str(base), "--task", "second", "--no-campaign", cwd=tmp_path / "ws")
    assert added.code == 0, added.err
    assert "The workspace has now profile second (profiles/second.yaml) and no campaign." in added.out
    again = cli("init", "--base", str(base), "--task", "first", cwd=tmp_path / "ws")
    assert again.code == 1
    assert "profile first is there already" in again.err
    with Client(tmp_path / "ws") as client:
        assert [entry.name for entry in client.profiles.list()] == ["first", "second"]
        assert [each.profile for each in client.campaigns.list()] == ["first"]
        assert (client.workspace.profiles_dir / "first.yaml").read_text() == first
        assert client.workspace.project_file.read_text() == settings


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--base", "tiny"], 2, "--base and --task belong together"),
        (["--task", "support"], 2, "--base and --task belong together"),
        (["--no-campaign"], 2, "--base and --task belong together"),
        (["--base", "tiny", "--task", "Not A Name"], 2, "cannot name a model"),
        (["--base", "tiny", "--task", "support", "--tier", "gpu"], 2, "--tier: no 'gpu'"),
        (["--base", "missing", "--task", "support"], 1, "no such folder, and no id of a model on a hub"),
        (["--base", "", "--task", "support"], 1, "no such folder"),
        (["--base", "./missing", "--task", "support"], 1, "no such folder"),
        (["--base", "a/b/c", "--task", "support"], 1, "no such folder"),
        (["--base", "tiny/config.json", "--task", "support"], 1, "is a file"),
        (["--base", "untemplated", "--task", "support"], 1, "has no chat template"),
    ],
)
def test_refused_start_leaves_nothing(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    a_whole_base(tmp_path / "tiny")
    a_base(tmp_path / "untemplated")
    before = sorted(tmp_path.rglob("*"))
    done = cli("init", "deep/ws", *words, cwd=tmp_path)
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
    assert sorted(tmp_path.rglob("*")) == before


def test_profile_that_fails_its_check_is_taken_back_and_the_workspace_stays(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    Client.init(tmp_path / "ws").close()
    (tmp_path / "ws" / "tunesmith.yaml").write_text("recipe: {max_length: 99999}\n")
    with pytest.raises(ConfigError, match="99999 is more than the context"):
        Client.init(tmp_path / "ws", base=base, task="support")
    assert sorted(path.name for path in (tmp_path / "ws" / "profiles").iterdir()) == ["example.yaml.sample"]
    assert is_workspace(tmp_path / "ws")
    with Client(tmp_path / "ws") as client:
        assert client.campaigns.list() == []


def test_failed_start_in_a_folder_of_ones_own_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = a_whole_base(tmp_path / "tiny")
    mine = tmp_path / "project"
    (mine / "profiles").mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    monkeypatch.setenv("TUNESMITH__RECIPE__MAX_LENGTH", "99999")
    for folder in (mine, tmp_path / "new" / "deep" / "ws"):
        with pytest.raises(ConfigError, match="more than the context"):
            Client.init(folder, base=base, task="support")
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if "tiny" not in path.parts} == {
        "project", "project/notes.txt", "project/profiles",
    }  # fmt: skip


def test_second_init_at_the_same_time_is_refused_and_spoils_nothing(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    (tmp_path / "ws").mkdir()
    handle = os.open(tmp_path / "ws", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another `tunesmith init` works here now"):
            Client.init(tmp_path / "ws", base=base, task="support")
        assert list((tmp_path / "ws").iterdir()) == []
    finally:
        os.close(handle)
    with ThreadPoolExecutor(4) as pool:
        tries = list(pool.map(lambda _: _tried(tmp_path / "ws", base), range(4)))
    assert sum(tries) == 1, "the others are told that it is there, or that somebody is at it"
    with Client(tmp_path / "ws") as client:
        assert client.profiles.check("support").profile.name == "support"
        assert len(client.campaigns.list()) == 1


def _tried(root: Path, base: Path) -> bool:
    try:
        Client.init(root, base=base, task="support").close()
    except Refused:
        return False
    return True


def test_file_in_the_place_of_the_workspace_stays(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    (tmp_path / "ws").write_text("mine")
    with pytest.raises(Refused, match="cannot make a workspace"):
        Client.init(tmp_path / "ws", base=base, task="support")
    assert (tmp_path / "ws").read_text() == "mine"


def test_base_of_another_content_under_a_locked_name_is_refused_and_taken_back(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    with Client.init(tmp_path / "ws", base=base, task="support") as client:
        file = client.workspace.profiles_dir / "support.yaml"
    file.unlink()
    other = a_whole_base(tmp_path / "other")
    (other / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises((ConfigError, Refused)):
        Client.init(tmp_path / "ws", base=other, task="support")
    assert not file.exists()


def test_python_client_wants_both_words_and_a_link_to_nowhere_counts_as_a_profile(tmp_path: Path) -> None:
    base = a_whole_base(tmp_path / "tiny")
    with pytest.raises(UsageError, match="belong together"):
        Client.init(tmp_path / "ws", base=base)
    Client.init(tmp_path / "ws").close()
    (tmp_path / "ws" / "profiles" / "support.yaml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused, match="is there already"):
        Client.init(tmp_path / "ws", base=base, task="support")


def test_init_without_a_base_says_how_to_go_on(tmp_path: Path) -> None:
    made = cli("init", "ws", cwd=tmp_path)
    assert made.code == 0
    assert "tunesmith init --base BASE --task NAME" in made.out
    with Client(tmp_path / "ws") as client:
        a_profile(client.workspace.root, "mine")
        assert [entry.name for entry in client.profiles.list()] == ["mine"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    base = a_whole_base(tmp_path / "on the hub")
    with HubServer() as server:
        server.models["acme/tiny"] = HubModel({path.name: path.read_bytes() for path in base.iterdir()})
        yield server


def test_base_of_a_hub_is_fetched_once_and_then_used_without_it(tmp_path: Path, hub: HubServer) -> None:
    env = {"HF_ENDPOINT": hub.url, "XDG_DATA_HOME": str(tmp_path / "data")}
    made = cli("init", "one", "--base", "acme/tiny", "--task", "support", cwd=tmp_path, env=env)
    assert made.code == 0, made.err
    text = (tmp_path / "one" / "profiles" / "support.yaml").read_text()
    assert f"revision: {hub.models['acme/tiny'].commit}" in text
    hub.stop()
    offline = cli("init", "two", "--base", "acme/tiny", "--task", "support", cwd=tmp_path, env=env)
    assert offline.code == 0, offline.err
    known = cli("base", "fetch", "acme/tiny", cwd=tmp_path, env=env)
    assert "acme/tiny is here already, and whole." in known.out
    assert "the hub cannot be reached" in known.err
    (listed,) = cli("base", "list", "--json", cwd=tmp_path, env=env).json
    assert listed["source"] == "acme/tiny"
    assert listed["folder"] == known.last_line
    assert listed["folder"] in text
    missing = cli("init", "three", "--base", "acme/other", "--task", "support", cwd=tmp_path, env=env)
    assert missing.code == 1
    assert "cannot be reached" in missing.err
    assert "was taken for a hub id" in missing.err
    assert not (tmp_path / "three").exists()
