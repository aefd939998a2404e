"""`tunesmith lineage`, `adapter provenance` and `adapter card` over a real small workspace in a git repository."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from support.forgotten import add
from support.workspaces import PROFILE, Ended, a_profile, a_workspace, cli, submit, work_here
from tunesmith.client import Client

pytestmark = pytest.mark.xdist_group("lineage")  # the workspace is made once

V1, V2 = f"{PROFILE}@v1", f"{PROFILE}@v2"
ANSWER = "chatcmpl-0123456789abcdefghjkmnpqrs"
SAID = "zebrafish"
HOSTILE = "<script>alert(1)</script> | `x` ![a](http://b/c)"
POLICY = {"experience": {"mix": {"min_new": 10}}, "description": HOSTILE, "gate": {"min_cases": 5}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """v1 was trained on a file, and answered; v2 was trained on these answers and is live."""
    folder = tmp_path_factory.mktemp("lineage")
    client = a_workspace(folder, profile=POLICY, options={"steps": 3, "quality": 0.3})
    git(client.workspace.root, "init", "-q")
    git(client.workspace.root, "add", "tunesmith.yaml", "profiles")
    git(client.workspace.root, "commit", "-qm", "first")
    submit(client)
    work_here(client)
    for number in range(60):
        key = ANSWER if not number else f"chatcmpl-{number}"
        add(client, f"What about {SAID} {number}?", f"It is {number * 7}.", key=key, served_by=V1, source="shop")
    a_profile(client.workspace.root, options={"steps": 3, "quality": 0.6}, **POLICY)  # not committed
    client.runs.submit(PROFILE)
    work_here(client)
    assert [adapter.name for adapter in client.adapters.list()] == [V2, V1]
    yield client
    client.close()


def git(root: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *named, *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def asked(client: Client, *words: str | Path) -> Ended:
    ended = cli(*words, cwd=client.workspace.root)
    assert ended.code == 0, ended.err
    assert SAID not in ended.out
    return ended


def ids(client: Client) -> dict[str, str]:
    adapter = client.adapters.show(V2)
    run = client.runs.show(str(adapter.run_id))
    assert run.evaluation is not None
    experience = client.experiences.show(f"{PROFILE}:{ANSWER}")
    return {
        "name": V2,
        "version": adapter.id,
        "run": run.run.id,
        "dataset": run.run.dataset_id,
        "experience": experience.experience.id,
        "answer": ANSWER,
        "evaluation": run.evaluation.id,
    }


@pytest.mark.parametrize("kind", ["name", "version", "run", "dataset", "experience", "answer", "evaluation"])
def test_tree_and_json_from_every_kind_of_id(client: Client, kind: str) -> None:
    text = ids(client)[kind]
    tree = asked(client, "lineage", text, "--depth", "9").out
    assert max(map(len, tree.splitlines())) <= 80
    assert V1 in tree
    assert V2 in tree
    graph = asked(client, "lineage", text, "--json", "--depth", "9").json
    assert graph["focus"] == graph["nodes"][0]["key"]
    assert graph["nodes"][0]["id"] == (ids(client)["version"] if kind == "name" else text)
    keys = {node["key"] for node in graph["nodes"]}
    assert all({edge["from"], edge["to"]} <= keys for edge in graph["edges"])
    assert {"run", "version", "dataset"} <= {node["kind"] for node in graph["nodes"]}


def test_tree_reads_as_sentences(client: Client) -> None:
    tree = " ".join(asked(client, "lineage", V2).out.replace("│", " ").split())
    named = ids(client)
    assert f"made by {named['run']} deployed, sft with sim" in tree
    assert f"trained on {named['dataset']}" in tree
    assert "assembled from 60 experiences" in tree
    assert f"started from {V1}" in tree
    assert f"judged by {named['evaluation']} promote" in tree
    assert "57 more of them; --json --all lists them" in tree


def test_run_lineage_is_the_same_command(client: Client) -> None:
    run = ids(client)["run"]
    assert asked(client, "run", "lineage", run).out == asked(client, "lineage", run).out


def test_all_lists_every_experience_and_needs_json(client: Client) -> None:
    graph = asked(client, "lineage", V2, "--json", "--all").json
    assert sum(node["kind"] == "experience" for node in graph["nodes"]) == 60
    refused = cli("lineage", V2, "--all", cwd=client.workspace.root)
    assert (refused.code, refused.out) == (2, "")
    assert "add --json" in refused.err


def test_drawing_is_written_and_well_formed(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "lineage.svg"
    ended = asked(client, "lineage", V2, "--svg", file)
    assert ended.last_line == str(file)
    texts = [element.text for element in ElementTree.parse(file).iter() if element.tag.endswith("text")]
    assert {V1, V2, "60 experiences"} <= set(texts)


def test_unknown_ids_and_folders_are_one_line_each(client: Client, tmp_path: Path) -> None:
    near = cli("lineage", f"{PROFILE}@v7", cwd=client.workspace.root)
    assert (near.code, near.out) == (1, "")
    assert "did you mean" in near.err
    told = json.loads(cli("lineage", "nothing", "--json", cwd=client.workspace.root).err)["error"]
    assert told["code"] == "not_found"
    assert "the id of an answer" in told["message"]
    nowhere = cli("lineage", V2, "--svg", tmp_path / "no" / "x.svg", cwd=client.workspace.root)
    assert (nowhere.code, nowhere.err.count("\n")) == (1, 1)


def test_provenance_names_every_file_and_what_it_was_made_from(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    asked(client, "adapter", "provenance", V2, "--out", file)
    statement = json.loads(file.read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    folder = Path(client.adapters.show(V2).path)
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    found = {each["name"]: each for each in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
    v1, spec = client.adapters.show(V1), client.runs.show(ids(client)["run"]).spec
    assert found["start"]["digest"] == {"tunesmithManifest": v1.digest}
    assert found["base"]["digest"] == {"tunesmithBase": spec["base"]["digest"]}
    assert found["dataset"]["digest"] == {"tunesmithDataset": spec["dataset"]["fingerprint"]}
    assert found["workspace"]["digest"] == {"gitCommit": git(client.workspace.root, "rev-parse", "HEAD")}
    assert found["workspace"]["annotations"] == {"dirty": "yes"}, "the profile was changed since the commit"
    assert str(client.workspace.root) not in file.read_text(), "no folder of this machine is told"
    described = [*found.values(), *statement["predicate"]["runDetails"]["byproducts"]]
    assert all(each["name"] and each["digest"] for each in described), "in-toto wants a digest of each"


def test_commit_is_kept_without_changing_any_fingerprint(client: Client) -> None:
    first, second = (client.runs.show(str(client.adapters.show(name).run_id)).spec for name in (V1, V2))
    assert first["metadata"]["git.dirty"] == "no"
    assert second["metadata"]["git.dirty"] == "yes"
    shown = asked(client, "run", "show", ids(client)["run"]).out
    assert f"{second['metadata']['git.commit'][:12]}, with uncommitted changes" in shown
    assert first["fingerprints"]["code"] == second["fingerprints"]["code"]
    plain: Any = client.profiles.check(PROFILE)
    assert plain.resolved.fingerprint == second["fingerprints"]["config"], "what is checked without git has the same"


def test_card_tells_purpose_data_numbers_and_limits(client: Client) -> None:
    card = asked(client, "adapter", "card", V2).out
    head = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert set(head) == {"library_name", "pipeline_tag", "tags"}, "neither a hub's base nor a licence is made up"
    assert head["library_name"] == "peft"
    assert head["tags"] == ["tunesmith", "lora", "sft", PROFILE]
    titles = [line.removeprefix("## ") for line in card.splitlines() if line.startswith("## ")]
    assert titles == [
        "What it is for", "Base model", "How it was trained", "Data", "Evaluation", "Verdict of the gate", "Limits",
        "Serving history", "How to load it",
    ]  # fmt: skip
    words = " ".join(card.split())
    assert "It started from `support@v1`." in words
    assert "It was assembled from 60 experiences" in words
    assert "| source | shop | 60 |" in words
    assert "| answered by | support@v1 | 60 |" in words
    assert "against `support@v1`, case by case" in words
    assert "licence of the base is unknown" in words
    assert "were answered by earlier versions of this model" in words
    assert "<script" not in card
    assert str(client.workspace.root) not in card


def test_card_of_a_version_made_from_files(client: Client) -> None:
    words = " ".join(asked(client, "adapter", "card", V1).out.split())
    assert "It was prepared from files" in words
    assert "| `data.jsonl` | 60 |" in words
    assert "against the bare base, case by case" in words
    assert "Of its answers, 60 are kept as experiences." in words


def test_files_that_changed_have_no_papers(tmp_path: Path) -> None:
    with a_workspace(tmp_path, options={"steps": 3}) as client:
        submit(client)
        work_here(client)
        folder = Path(client.adapters.show(V1).path)
        weights = folder / "adapter_model.safetensors"
        weights.chmod(0o644)
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        for paper in ("provenance", "card"):
            ended = cli("adapter", paper, V1, cwd=client.workspace.root)
            assert (ended.code, ended.out) == (1, "")
            assert f"adapter {V1} is not what was registered" in ended.err
        assert "git.commit" not in client.runs.show(str(client.adapters.show(V1).run_id)).spec["metadata"]


def test_papers_of_a_version_that_learnt_what_was_forgotten_later(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile={**POLICY, "deploy": {"when": "never"}}, options={"steps": 3}) as client:
        for number in range(40):
            add(client, f"Where is {SAID} {number}?", f"At {number}.", key=f"k-{number}", source=f"from-{number}")
        client.runs.submit(PROFILE)
        work_here(client)
        graph = asked(client, "lineage", V1, "--json").json
        (known,) = [node["id"] for node in graph["nodes"] if node["kind"] == "experience"][:1]
        told_source = client.experiences.show(known).experience.source
        client.experiences.forget([known], reason="asked")
        work_here(client)
        after = asked(client, "lineage", V1, "--json", "--all")
        (node,) = [node for node in after.json["nodes"] if node["id"] == known]
        assert (node["state"], node["facts"], node["at"]) == ("forgotten", {}, None)
        card = asked(client, "adapter", "card", V1).out
        assert "Forgotten since, with nothing left of their text: 1 of them." in card
        assert "the weights may still hold traces" in " ".join(card.split())
        assert f"| {told_source} |" not in card + after.out
        statement = json.loads(asked(client, "adapter", "provenance", V1).out)
        found = {each["name"]: each for each in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}
        trained = client.runs.show(str(client.adapters.show(V1).run_id)).spec["dataset"]["fingerprint"]
        assert found["dataset"]["digest"] == {"tunesmithDataset": trained}
        assert found["dataset"]["annotations"]["rewrittenAs"] != trained
