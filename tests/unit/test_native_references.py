"""Kept reference log-probabilities: the key names all they depend on; what comes back is what was kept, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.native import a_recipe, a_train_spec
from tunesmith.core.errors import DataError
from tunesmith.models.packs import Completion, Item
from tunesmith.profiles.profile import Method, Recipe
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.runs.spec import AdapterRef, BaseModelRef, DatasetRef, RunSpec
from tunesmith.training.trainers.native.references import _NOT_IN_KEY, ReferenceCache, reference_key

PRECISION = ("cpu", "torch.float32")
KEY, OTHER = "a" * 64, "b" * 64
KEPT = {"one": [-1.5, -0.1 - 0.2], "two/drift": [-3e-300], "drei ü": [-7.25, 0.0]}


def a_run(**changes: Any) -> RunSpec:
    lock = ArchitectureLock(
        architecture="LlamaForCausalLM", family="llama", vocab_size=9, context=256, hidden_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1,
    )  # fmt: skip
    base = BaseModelRef(path="/nowhere/base", revision=None, digest="d" * 64, lock=lock, context=256)
    dataset = DatasetRef(id="ds", path="/nowhere/data", fingerprint="f" * 64, num_train=2, num_validation=1)
    return a_train_spec(base, dataset, method=Method.DPO, recipe=a_recipe(method=Method.DPO), **changes).run


def changed(run: RunSpec, part: str, **changes: Any) -> RunSpec:
    return run.model_copy(update={part: getattr(run, part).model_copy(update=changes)})


def some_items() -> list[Item]:
    completions = Completion((3, 4), (True, True)), Completion((5,), (True,), is_chosen=False)
    return [Item("a", (1, 2), completions), Item("b", (1,), completions), Item("a/drift", (1, 2), completions[:1])]


# ---- the key --------------------------------------------------------------------------------------------------------

OTHER_START = AdapterRef(id="ad", path="/nowhere/adapter", digest="e" * 64)
RUN_CHANGES: dict[str, Callable[[RunSpec], RunSpec]] = {
    "dataset": lambda run: changed(run, "dataset", fingerprint="0" * 64),
    "base": lambda run: changed(run, "base", digest="0" * 64),
    "context": lambda run: changed(run, "base", context=128),
    "start": lambda run: run.model_copy(update={"start": OTHER_START}),
    "method": lambda run: run.model_copy(update={"method": Method.KTO}),
    "code": lambda run: changed(run, "fingerprints", code="0" * 64),
    "max_length": lambda run: changed(run, "recipe", max_length=128),
    "tuning": lambda run: changed(run, "recipe", tuning="full"),
    "dora": lambda run: changed(run, "recipe", dora=True),
    "train_embeddings": lambda run: changed(run, "recipe", train_embeddings=True),
    "target_modules": lambda run: changed(run, "recipe", target_modules=("q_proj",)),
}


@pytest.mark.parametrize("what", RUN_CHANGES)
def test_key_of_a_run_that_differs_in_what_counts_is_another(what: str) -> None:
    run = a_run()
    assert reference_key(RUN_CHANGES[what](run), some_items(), PRECISION) != reference_key(run, some_items(), PRECISION)


def test_key_with_another_adapter_to_start_from_is_another() -> None:
    one = a_run(start=OTHER_START)
    two = a_run(start=OTHER_START.model_copy(update={"digest": "1" * 64}))
    assert reference_key(one, some_items(), PRECISION) != reference_key(two, some_items(), PRECISION)


@pytest.mark.parametrize("precision", [("cuda", "torch.float32"), ("cpu", "torch.bfloat16"), ("cpu",)])
def test_key_on_another_device_or_in_another_format_is_another(precision: tuple[str, ...]) -> None:
    assert reference_key(a_run(), some_items(), precision) != reference_key(a_run(), some_items(), PRECISION)


ITEM_CHANGES: dict[str, Callable[[list[Item]], list[Item]]] = {
    "one fewer": lambda items: items[:-1],
    "one more": lambda items: [*items, replace(items[0], id="c")],
    "another id": lambda items: [replace(items[0], id="z"), *items[1:]],
    "another token in a prompt": lambda items: [replace(items[0], prompt=(1, 9)), *items[1:]],
    "another token in an answer": lambda items: [
        *items[:-1], replace(items[-1], completions=(Completion((3, 9), (True, True)),))
    ],
    "a token that does not count": lambda items: [
        *items[:-1], replace(items[-1], completions=(Completion((3, 4), (True, False)),))
    ],
    "an answer that begins earlier": lambda items: [
        *items[:-1], Item("a/drift", (1,), (Completion((2, 3, 4), (False, True, True)),))
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", ITEM_CHANGES)
def test_key_of_other_items_is_another(what: str) -> None:
    others = ITEM_CHANGES[what](some_items())
    assert reference_key(a_run(), others, PRECISION) != reference_key(a_run(), some_items(), PRECISION)


def test_key_ignores_order_identity_and_settings_that_only_steer_the_training() -> None:
    run = a_run()
    steered = changed(
        run, "recipe", lr=1e-3, epochs=9.0, beta=0.7, seed=5, lora_rank=64, packing=False, micro_batch_tokens=64
    )
    other = steered.model_copy(update={"run_id": "run-2", "num_processes": 2})
    assert reference_key(other, some_items()[::-1], PRECISION) == reference_key(run, some_items(), PRECISION)


def test_settings_without_effect_are_settings_of_a_recipe() -> None:
    assert set(Recipe.model_fields) >= _NOT_IN_KEY


# ---- the shelf ------------------------------------------------------------------------------------------------------


def test_shelf_gives_back_the_same_numbers_to_the_bit(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path / "new" / "references")
    assert cache.read(KEY) is None
    cache.store(KEY, KEPT)
    assert cache.read(KEY) == KEPT
    assert cache.read(OTHER) is None
    cache.store(KEY, {"one": [1.0]})
    assert cache.read(KEY) == {"one": [1.0]}


def test_shelf_refuses_a_file_with_any_byte_changed(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path)
    cache.store(KEY, KEPT)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            found = cache.read(KEY)
        except DataError:
            continue
        assert found == KEPT, place  # the header's own spelling: a blank, the unused key


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b"\xff" * 8])
def test_shelf_refuses_what_is_no_such_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{KEY}.safetensors").write_bytes(content)
    with pytest.raises(DataError):
        ReferenceCache(tmp_path).read(KEY)


def test_shelf_refuses_half_a_file_a_foreign_one_and_what_is_no_plain_file(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path)
    cache.store(KEY, KEPT)
    good = tmp_path / f"{KEY}.safetensors"
    other = tmp_path / f"{OTHER}.safetensors"
    other.write_bytes(good.read_bytes())
    with pytest.raises(DataError, match="not what was written"):
        cache.read(OTHER)
    other.write_bytes(good.read_bytes()[:-5])
    with pytest.raises(DataError, match="cannot be read"):
        cache.read(OTHER)
    other.unlink()
    other.symlink_to(good)
    with pytest.raises(DataError, match="not a file that tunesmith keeps"):
        cache.read(OTHER)
    other.unlink()
    os.mkfifo(other)
    with pytest.raises(DataError, match="not a file that tunesmith keeps"):
        cache.read(OTHER)


def test_shelf_holds_a_bounded_number_of_files_and_drops_the_longest_unused(tmp_path: Path) -> None:
    cache = ReferenceCache(tmp_path, max_files=3)
    keys = [str(number) * 64 for number in range(5)]
    for age, key in enumerate(keys[:3]):
        cache.store(key, KEPT)
        os.utime(tmp_path / f"{key}.safetensors", (1000 + age, 1000 + age))
    assert cache.read(keys[0]) == KEPT  # used: now the youngest
    cache.store(keys[3], KEPT)
    assert [cache.read(key) is not None for key in keys] == [True, False, True, True, False]


def test_shelf_holds_a_bounded_number_of_bytes_but_always_the_newest(tmp_path: Path) -> None:
    (tmp_path / ".left.by.a.kill.tmp").write_bytes(b"x" * 400)
    os.utime(tmp_path / ".left.by.a.kill.tmp", (1000, 1000))
    ReferenceCache(tmp_path).store(KEY, KEPT)
    os.utime(tmp_path / f"{KEY}.safetensors", (2000, 2000))
    ReferenceCache(tmp_path, max_bytes=1000).store(OTHER, KEPT)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "b"]
    ReferenceCache(tmp_path, max_bytes=10).store(KEY, KEPT)
    assert [path.name[0] for path in tmp_path.iterdir()] == ["a"]
