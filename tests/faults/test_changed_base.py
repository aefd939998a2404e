"""A base that changes or goes away after it was locked: no door lets it through, and all is well once it is back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fleet import Fleet, MakeFleet
from support.workspaces import PROFILE, a_base, cli
from tunesmith.core.errors import ConfigError, LockedError, Refused
from tunesmith.profiles.base_model import base_digest, known_digest

APPROVED = {"deploy": {"when": "approved"}}
CHANGED = "is not the one"


def flip_a_bit(base: Path) -> None:
    """As many bytes as before, and the time of the last change put back."""
    weights, before = base / "model.safetensors", (base / "model.safetensors").stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def repoint(base: Path) -> None:
    """base.path becomes a link to another model of the same architecture."""
    other = base.with_name("other")
    shutil.copytree(base, other)
    flip_a_bit(other)
    shutil.move(base, base.with_name("first"))
    base.symlink_to(other)


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": flip_a_bit,
    "tokenizer": lambda base: (base / "tokenizer.json").write_text('{"version": "1.0"}'),
    "chat template": lambda base: (base / "chat_template.jinja").write_text("{{ messages }}"),
    "generation config": lambda base: (base / "generation_config.json").write_text('{"temperature": 0.1}'),
    "another link": repoint,
    "missing": shutil.rmtree,
}


def base_of(fleet: Fleet) -> Path:
    return fleet.root / "models" / "tiny"


def put_back(fleet: Fleet) -> None:
    base = base_of(fleet)
    base.unlink() if base.is_symlink() else shutil.rmtree(base, ignore_errors=True)
    a_base(base)


@pytest.mark.parametrize("how", CHANGES)
def test_base_changed_between_verdict_and_approval_is_refused_until_it_is_back(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet(profile=APPROVED)
    run_id = fleet.submit()
    fleet.work()
    assert fleet.state(run_id) == "held"
    CHANGES[how](base_of(fleet))
    with pytest.raises(Refused, match="put it back"):
        fleet.client.adapters.approve(f"{PROFILE}@v1")
    with pytest.raises(Refused, match="put it back"):
        fleet.client.adapters.evaluate(f"{PROFILE}@v1")
    told = cli("adapter", "approve", f"{PROFILE}@v1", cwd=fleet.root)
    assert told.code != 0
    assert "put it back" in told.err
    assert (fleet.state(run_id), fleet.served()) == ("held", None)
    put_back(fleet)
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert fleet.state(run_id) == "deployed", fleet.client.runs.get(run_id).reason


@pytest.mark.parametrize("how", CHANGES)
def test_base_changed_between_approval_and_deployment_holds_the_run(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train", "evaluate")
    assert fleet.state(run_id) == "deploying"
    CHANGES[how](base_of(fleet))
    fleet.work()
    assert (fleet.state(run_id), fleet.served(), fleet.client.adapters.live(PROFILE)) == ("held", None, None)
    assert "put it back" in fleet.client.runs.get(run_id).reason
    put_back(fleet)
    fleet.client.adapters.approve(f"{PROFILE}@v1")
    fleet.work()
    assert fleet.state(run_id) == "deployed"


@pytest.mark.parametrize("how", CHANGES)
def test_base_changed_after_the_lock_is_seen_by_every_door_before_training(make_fleet: MakeFleet, how: str) -> None:
    fleet = make_fleet()
    queued = fleet.submit()
    CHANGES[how](base_of(fleet))
    refusals = (ConfigError, LockedError)
    with pytest.raises(refusals):
        fleet.client.profiles.check(PROFILE)
    with pytest.raises(refusals):
        fleet.submit(first=100)
    with pytest.raises(refusals):
        fleet.client.profiles.plan(PROFILE)
    told = cli("profile", "check", PROFILE, cwd=fleet.root)
    assert (told.code != 0, "base" in told.err or "chat_template" in told.err) == (True, True), told.err
    [finding] = [check for check in fleet.client.system.doctor() if check.name == f"base of {PROFILE}"]
    assert finding.state == "broken"
    assert "put it back" in finding.fix
    fleet.work()
    assert fleet.state(queued) == "failed"
    assert "put it back" in fleet.client.runs.get(queued).reason
    [attempt] = fleet.attempts(queued)
    assert not (fleet.folder(queued, attempt) / "spec.json").exists(), "no program was started for it"


def test_base_changed_between_training_and_evaluation_is_not_evaluated(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    run_id = fleet.submit()
    fleet.work("train")
    flip_a_bit(base_of(fleet))
    fleet.work()
    assert fleet.state(run_id) == "failed"
    assert f"put it back, then have it measured and deployed: tunesmith adapter deploy {PROFILE}@v1" in (
        fleet.client.runs.get(run_id).reason
    )
    put_back(fleet)
    told = cli("adapter", "deploy", f"{PROFILE}@v1", cwd=fleet.root)
    assert told.code == 0, told.err
    fleet.work()
    assert fleet.served() == fleet.client.adapters.show(f"{PROFILE}@v1").digest


@pytest.mark.parametrize("key", ["base.path=models/other", "base.family=qwen2", "base.revision=x", "role=coder"])
def test_what_the_profile_is_cannot_be_set_for_one_run(make_fleet: MakeFleet, key: str) -> None:
    fleet = make_fleet()
    flip_a_bit(a_base(fleet.root / "models" / "other"))
    with pytest.raises(ConfigError, match="belongs in the profile's own file"):
        fleet.submit(key)
    told = cli("run", "submit", PROFILE, "data-0-60.jsonl", "--set", key, cwd=fleet.root)
    assert (told.code != 0, "belongs in the profile's own file" in told.err) == (True, True), told.err
    name, _, value = key.partition("=")
    with pytest.raises(ConfigError, match="belongs in the profile's own file"):
        fleet.client.runs.submit(PROFILE, fleet.root / "data-0-60.jsonl", overrides={name: value})


def test_another_base_in_the_profile_file_is_refused_after_the_lock(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.client.profiles.lock(PROFILE)
    flip_a_bit(a_base(fleet.root / "models" / "other"))
    path = fleet.root / "profiles" / f"{PROFILE}.yaml"
    path.write_text(path.read_text().replace("models/tiny", "models/other"))
    with pytest.raises(LockedError, match="make a new profile"):
        fleet.submit()
    shutil.rmtree(fleet.root / "models" / "other")
    shutil.copytree(fleet.root / "models" / "tiny", fleet.root / "models" / "other")
    fleet.submit()  # the same content at another place is the same base


def test_adapter_changed_on_disk_after_the_deployment_is_seen_by_the_doctor(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.submit()
    fleet.work()
    weights = fleet.client.adapters.show(f"{PROFILE}@v1").path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    [finding] = [check for check in fleet.client.system.doctor() if check.name == f"adapter {PROFILE}@v1"]
    assert finding.state == "broken"


def test_known_digest_reads_again_only_what_was_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, cache = a_base(tmp_path / "base"), tmp_path / "cache"
    long_ago = 10**9
    for path in base.iterdir():
        os.utime(path, (long_ago, long_ago))
    read: list[str] = []
    monkeypatch.setattr("tunesmith.profiles.base_model.sha256_file", lambda path: (read.append(path.name), "0")[1])
    monkeypatch.setattr("tunesmith.profiles.base_model._RECENT_NS", 0)
    first = known_digest(base, cache)
    assert len(read) == 3
    assert known_digest(base, cache) == first
    assert len(read) == 3
    flip_a_bit(base)
    known_digest(base, cache)
    assert read[3:] == ["model.safetensors"], "size and time are as before; that it was changed shows all the same"


def test_known_digest_is_the_digest_whatever_the_cache_holds(tmp_path: Path) -> None:
    base, cache = a_base(tmp_path / "base"), tmp_path / "cache"
    expected = base_digest(base)
    assert known_digest(base, cache) == expected
    (cache / "bases").mkdir(parents=True, exist_ok=True)
    for note in ("", "[]", '{"v": 1, "files": {"config.json": 3}}', '{"v": 1, "files": []}'):
        for path in [*(cache / "bases").iterdir()] or [cache / "bases" / "x.json"]:
            path.write_text(note)
        assert known_digest(base, cache) == expected
    shutil.rmtree(cache)
    cache.write_text("in the way")
    assert known_digest(base, cache) == expected
