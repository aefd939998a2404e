"""Bases from a model hub: pinned, hashed, only what is needed, whole or absent, and offline afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub_server import HubModel, HubServer
from support.workspaces import BASE_CONFIG
from tunesmith.core.errors import ConfigError, DataError, Refused, UsageError
from tunesmith.core.files import read_manifest, verify_folder
from tunesmith.models.bases.fetch import fetch_base, find_fetched
from tunesmith.models.bases.hub import HubFile, Listing, choose_files, is_hub_id
from tunesmith.models.bases.hub_errors import HubError
from tunesmith.models.bases.place import bases_place, fetched_bases
from tunesmith.profiles.base_model import base_files
from tunesmith.profiles.whole_base import read_whole_base
from tunesmith.training.trainers.sim.files import safetensors_bytes

SOURCE = "acme/tiny-instruct"
TENSORS = [
    {"model.embed_tokens.weight": ([2, 2], [0.1, 0.2, 0.3, 0.4])},
    {"model.layers.0.self_attn.q_proj.weight": ([8, 8], [0.5] * 64)},
]


def model_files() -> dict[str, bytes]:
    """A model in two shards, with everything beside it that must not be fetched."""
    shards = [safetensors_bytes(tensors) for tensors in TENSORS]
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {name: names[number] for number, tensors in enumerate(TENSORS) for name in tensors}
    return {
        "config.json": json.dumps(BASE_CONFIG).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        "generation_config.json": b"{}",
        "LICENSE": b"Apache-2.0",
        "README.md": b"# tiny",
        names[0]: shards[0],
        names[1]: shards[1],
        "model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
        "pytorch_model.bin": b"a pickle",
        "modeling_tiny.py": b"print('code')",
        "consolidated.safetensors": b"the weights once more",
        "onnx/model.onnx": b"other",
        "original/tokenizer.model": b"other",
        ".gitattributes": b"",
    }


FETCHED = {name for name in model_files() if "/" not in name} - {
    "pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", ".gitattributes",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.models[SOURCE] = HubModel(model_files())
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def left_in(place: Path) -> set[str]:
    """What lies below the place, without locks."""
    return {path.name for path in place.rglob("*") if path.is_file() and not path.name.endswith(".lock")}


def test_fetch_pins_the_commit_and_takes_only_what_is_needed(hub: HubServer) -> None:
    seen: list[tuple[int, int]] = []
    base = fetch_base(SOURCE, on_progress=lambda done, total: seen.append((done, total)))
    commit = hub.models[SOURCE].commit
    assert (base.source, base.revision, base.is_new) == (SOURCE, commit, True)
    assert {path.name for path in base.folder.iterdir()} == FETCHED | {"manifest.json"}
    assert base.folder == bases_place() / "acme--tiny-instruct" / commit[:12]
    manifest = verify_folder(base.folder)
    assert manifest.meta["revision"] == commit
    assert {name: (base.folder / name).read_bytes() for name in FETCHED} == {
        name: data for name, data in model_files().items() if name in FETCHED
    }
    assert hub.asked_for("pytorch_model.bin") == hub.asked_for("modeling_tiny.py") == 0
    assert seen[-1][0] == seen[-1][1] == base.num_bytes
    assert read_whole_base(base.folder).lock.family == "llama"
    assert "manifest.json" not in {path.name for path in base_files(base.folder)}, "it is no part of the base's content"


def test_second_fetch_downloads_nothing_and_a_known_commit_asks_nobody(hub: HubServer) -> None:
    first = fetch_base(SOURCE)
    num_files = hub.asked_for("config.json")
    again = fetch_base(SOURCE)
    assert (again.folder, again.is_new) == (first.folder, False)
    assert hub.asked_for("config.json") == num_files
    hub.stop()
    assert fetch_base(SOURCE, revision=first.revision).folder == first.folder
    offline = fetch_base(SOURCE)
    assert (offline.folder, offline.is_new) == (first.folder, False)
    assert "the hub cannot be reached" in offline.note
    found = find_fetched(SOURCE)
    assert found is not None
    assert found.folder == first.folder


def test_another_commit_is_another_folder(hub: HubServer) -> None:
    first = fetch_base(SOURCE)
    hub.models[SOURCE].files["generation_config.json"] = b'{"temperature": 1}'
    second = fetch_base(SOURCE)
    assert second.revision != first.revision
    assert {base.folder for base in fetched_bases(bases_place())} == {first.folder, second.folder}
    with pytest.raises(HubError, match="has no revision"):
        fetch_base(SOURCE, revision="f" * 40)


def test_interrupted_fetch_leaves_no_base_and_goes_on_with_the_next_file(hub: HubServer) -> None:
    second = "model-00002-of-00002.safetensors"
    hub.faults.withheld.add(second)
    with pytest.raises(HubError, match=r"HTTP 403"):
        fetch_base(SOURCE)
    assert fetched_bases(bases_place()) == []
    hub.faults.withheld.clear()
    assert fetch_base(SOURCE).is_new
    assert hub.asked_for("model-00001-of-00002.safetensors") == 1, "what came stays"
    assert left_in(bases_place()) == FETCHED | {"manifest.json"}


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_bytes_that_the_hub_does_not_list_are_refused_and_fetched_again(hub: HubServer, name: str) -> None:
    hub.faults.damaged.add(name)
    with pytest.raises(DataError, match=f"{name} came with other bytes than the hub lists"):
        fetch_base(SOURCE)
    assert fetched_bases(bases_place()) == []
    hub.faults.damaged.clear()
    verify_folder(fetch_base(SOURCE).folder)


def test_base_that_was_damaged_on_disk_is_replaced(hub: HubServer) -> None:
    base = fetch_base(SOURCE)
    (base.folder / "tokenizer.json").write_text("changed")
    again = fetch_base(SOURCE)
    assert (again.folder, again.is_new) == (base.folder, True)
    verify_folder(base.folder)


def test_gated_model_says_to_accept_its_terms_and_set_a_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models[SOURCE].is_gated, hub.models[SOURCE].token = True, "hf_good"
    with pytest.raises(HubError, match=r"is gated \(HTTP 401\); accept its terms at .*/acme/tiny-instruct, .*HF_TOKEN"):
        fetch_base(SOURCE)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(HubError, match=r"is gated \(HTTP 403\).*the token in HF_TOKEN has no access"):
        fetch_base(SOURCE)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    base = fetch_base(SOURCE)
    assert "hf_good" not in json.dumps(read_manifest(base.folder).meta)


@pytest.mark.parametrize(
    ("source", "revision", "said"),
    [
        ("acme/nothing", None, r"no such model on http://127.0.0.1:\d+, or it is private; .*HF_TOKEN"),
        (SOURCE, "v9", r"has no revision 'v9'; write a branch, a tag or a commit"),
    ],
)
def test_unknown_model_and_revision_are_told(hub: HubServer, source: str, revision: str | None, said: str) -> None:
    with pytest.raises(HubError, match=said):
        fetch_base(source, revision=revision)
    assert left_in(bases_place()) == set()


@pytest.mark.parametrize(("status", "said"), [(429, "wait some minutes"), (503, "HTTP 503"), (401, "HF_TOKEN")])
def test_hub_that_refuses_is_told_with_what_to_do(hub: HubServer, status: int, said: str) -> None:
    hub.faults.status = status
    with pytest.raises(HubError, match=said):
        fetch_base(SOURCE)


def test_hub_that_cannot_be_reached_names_the_ways_without_one(hub: HubServer) -> None:
    hub.stop()
    with pytest.raises(HubError, match=r"cannot be reached .*HTTPS_PROXY.*`tunesmith base fetch smollm2`"):
        fetch_base(SOURCE)
    assert left_in(bases_place()) == set()


def test_model_that_needs_code_is_refused_before_its_weights_are_fetched(hub: HubServer) -> None:
    files = hub.models[SOURCE].files
    files["config.json"] = json.dumps({**BASE_CONFIG, "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}).encode()
    with pytest.raises(ConfigError, match="needs code of its own"):
        fetch_base(SOURCE)
    assert hub.asked_for("model-00001-of-00002.safetensors") == 0


def listing(*names: str) -> Listing:
    return Listing("a" * 40, tuple(HubFile(name, 1, None, None) for name in names))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("config.json", "tokenizer.json", "pytorch_model.bin"), "only pickled weights"),
        (("config.json", "tokenizer.json", "tiny.Q4_K_M.gguf"), "GGUF files and no safetensors"),
        (("config.json", "tokenizer.json", "adapter_model.safetensors"), r"has no model\.safetensors"),
        (("config.json", "model.safetensors"), "has no tokenizer"),
        (("tokenizer.json", "model.safetensors"), r"has no config\.json"),
        (("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"), "without an index"),
        (("config.json", "tokenizer.json", "sub/model.safetensors", "../model.safetensors"), r"no model\.safetensors"),
    ],
)
def test_listing_that_makes_no_base_is_refused_with_the_reason(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(DataError, match=said):
        choose_files(SOURCE, listing(*names))


@pytest.mark.parametrize(
    "source", ["", "tiny", "a/b/c", "../x", "a/..", "a/b\n", "a/b ", "-a/b", "http://x/y", "a/b?x", "ä/b", "a/b--c"]
)
def test_text_that_is_no_id_is_refused_without_asking(hub: HubServer, source: str) -> None:
    assert not is_hub_id(source)
    with pytest.raises(UsageError, match="cannot be fetched; write ORG/NAME"):
        fetch_base(source)
    assert hub.calls == []


def test_gguf_file_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"a GGUF file is not converted.*docs/start\.md"):
        fetch_base("models/tiny.gguf")


def test_folder_of_ones_own_is_never_replaced(hub: HubServer, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for source in (SOURCE, "smollm2"):
        with pytest.raises(Refused, match="is not empty, and nothing there was fetched by tunesmith"):
            fetch_base(source, to=mine)
    assert (mine / "thesis.txt").read_text() == "years of work"
    with pytest.raises(Refused, match="is not a folder"):
        fetch_base(SOURCE, to=mine / "thesis.txt")


def test_fetch_to_a_folder_keeps_it_there_and_refuses_another_model_in_it(hub: HubServer, tmp_path: Path) -> None:
    there = tmp_path / "models" / "tiny"
    assert fetch_base(SOURCE, to=there).folder == there
    assert not fetch_base(SOURCE, to=there).is_new
    assert fetched_bases(bases_place()) == []
    hub.models["acme/other"] = hub.models[SOURCE]
    with pytest.raises(Refused, match=f"holds {SOURCE}; name another folder"):
        fetch_base("acme/other", to=there)


def test_smollm2_has_one_revision() -> None:
    with pytest.raises(UsageError, match="has one revision"):
        fetch_base("smollm2", revision="main")


def test_place_of_bases_follows_the_environment(tmp_path: Path) -> None:
    assert bases_place({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "tunesmith" / "bases"
    assert bases_place({}).parts[-4:] == (".local", "share", "tunesmith", "bases")
    assert fetched_bases(tmp_path / "missing") == []
