"""Checkpoints and adapters that somebody made to harm: refused in one line, with the right class, nothing executed.

Three doors: what a training resumes from, what it starts from, what is registered. Most cases carry a manifest that
fits them, as an attacker would write it; only the damaged ones do not.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_recipe,
    a_train_spec,
    adapter_ref,
    resume_from,
    small_rows,
    train_here,
)
from tunesmith.core.files import canonical_json, read_manifest, sha256_file, sha256_text
from tunesmith.profiles.profile import Checkpoints, Validation
from tunesmith.programs.artifact import adapter_problems
from tunesmith.programs.host import ProgramFailure, as_failure
from tunesmith.programs.protocol import Artifact
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, ResumeSource, TrainSpec
from tunesmith.training.trainers.inputs import read_inputs
from tunesmith.training.trainers.native.state import read_state

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
REFUSALS = {ErrorClass.DATA, ErrorClass.MISMATCH, ErrorClass.NONFINITE, ErrorClass.TRANSIENT}
Harm = Callable[[Path], Any]


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def canary(tmp_path: Path) -> bytes:
    return pickle.dumps(Canary(tmp_path / "executed"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads only wait for each other where a model is this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSpec, Path, AdapterRef]:
    """A short training: its spec, where it ran, what it made."""
    root = tmp_path_factory.mktemp("hostile")
    spec = a_train_spec(
        a_base_ref(a_micro_base(root / "base")),
        a_dataset(root / "data", small_rows(40), validation_share=0.2),
        recipe=a_recipe(max_steps=5, epochs=9),
        checkpoints=Checkpoints(every_steps=1, keep=10),
        validation=Validation(every_steps=3, max_cases=4),
    )
    result = train_here(spec, root / "out")
    return spec, root / "out", adapter_ref(root / "out", result)


@pytest.fixture
def checkpoint(trained: tuple[TrainSpec, Path, AdapterRef], tmp_path: Path) -> ResumeSource:
    """A copy of a good checkpoint, with a best beside the last."""
    source = resume_from(trained[1], 4)
    shutil.copytree(source.path, tmp_path / "step-4")
    assert (tmp_path / "step-4" / "best").exists()
    return source.model_copy(update={"path": str(tmp_path / "step-4")})


@pytest.fixture
def adapter(trained: tuple[TrainSpec, Path, AdapterRef], tmp_path: Path) -> AdapterRef:
    """A copy of a good adapter."""
    shutil.copytree(trained[2].path, tmp_path / "adapter")
    return trained[2].model_copy(update={"path": str(tmp_path / "adapter")})


def vouched(folder: Path, **more: Any) -> str:
    """Write a manifest that fits whatever is in the folder now; the digest it has then."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        name: {"sha256": sha256_file(folder / name), "bytes": (folder / name).stat().st_size}
        for name in names
        if name != "manifest.json"
    }
    files |= more
    meta = read_manifest(folder).meta
    (folder / "manifest.json").write_text(canonical_json({"v": 1, "files": files, "meta": meta}))
    return sha256_text(canonical_json(files))


def refused(act: Callable[[], object], folder: Path, *words: str) -> ErrorClass:
    """The class of the one-line refusal; nothing was executed."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (the class is looked at below)
        act()
    failure = as_failure(caught.value)
    assert failure.error_class in REFUSALS, failure.message
    assert "\n" not in failure.message
    assert len(failure.message) < 600
    assert all(word in failure.message for word in words), failure.message
    assert not (folder.parent / "executed").exists()
    return failure.error_class


def resume(trained: tuple[TrainSpec, Path, AdapterRef], source: ResumeSource) -> None:
    spec = trained[0].model_copy(update={"resume": source})
    train_here(spec, Path(source.path).parent / "out")


def start(trained: tuple[TrainSpec, Path, AdapterRef], adapter: AdapterRef) -> None:
    """The first thing every trainer does; what it lets through would be loaded."""
    read_inputs(trained[0].run.model_copy(update={"start": adapter}))


def train_from(trained: tuple[TrainSpec, Path, AdapterRef], adapter: AdapterRef) -> None:
    run = trained[0].run.model_copy(update={"start": adapter})
    train_here(trained[0].model_copy(update={"run": run}), Path(adapter.path).parent / "out")


def register(adapter: AdapterRef) -> None:
    folder = Path(adapter.path)
    for error_class, message in adapter_problems(
        folder.parent, Artifact(path=folder.name, digest=adapter.digest), None
    ):
        raise ProgramFailure(error_class, message)


# ---- the doors are open for what is good ----------------------------------------------------------------------------


def test_good_checkpoint_and_adapter_are_taken(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, adapter: AdapterRef
) -> None:
    assert vouched(Path(checkpoint.path)) == checkpoint.digest
    assert vouched(Path(adapter.path)) == adapter.digest
    resume(trained, checkpoint)
    shutil.rmtree(Path(checkpoint.path).parent / "out")
    train_from(trained, adapter)
    register(adapter)


# ---- pickle ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "state.json",
        "state.safetensors",
        *(f"{part}/{name}" for part in ("adapter", "best") for name in (WEIGHTS, CONFIG)),
        *("state.pt", "adapter/pytorch_model.bin", "optimizer.pkl", "best/training_args.bin", "rng_state.pth"),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "not listed"])
def test_checkpoint_with_a_pickle_in_any_file_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, canary: bytes, name: str, is_listed: bool
) -> None:
    folder = Path(checkpoint.path)
    (folder / name).write_bytes(canary)
    digest = vouched(folder) if is_listed else checkpoint.digest
    source = checkpoint.model_copy(update={"digest": digest})
    refused(lambda: read_state(source, trained[0].run), folder, Path(name).name)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG, "adapter_model.bin", "notes.pt"])
def test_adapter_with_a_pickle_in_any_file_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], adapter: AdapterRef, canary: bytes, name: str
) -> None:
    folder = Path(adapter.path)
    (folder / name).write_bytes(canary)
    for digest in (adapter.digest, None):  # under its own manifest, then under one that fits
        hostile = adapter.model_copy(update={"digest": digest or vouched(folder)})
        refused(lambda hostile=hostile: start(trained, hostile), folder, name)
        refused(lambda hostile=hostile: register(hostile), folder, name)


# ---- tensor files that lie ------------------------------------------------------------------------------------------


def _rewritten(path: Path, change: Callable[[dict[str, Any]], None], body: bytes = b"") -> None:
    """The same bytes under a changed header."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :] + body)


def _tensors(header: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])


def _overlap(header: dict[str, Any]) -> None:
    first, second = [entry for entry in _tensors(header) if len(entry["shape"]) == 2][:2]
    first["data_offsets"], first["shape"], first["dtype"] = second["data_offsets"], second["shape"], second["dtype"]


def _beyond(header: dict[str, Any]) -> None:
    _tensors(header)[-1]["shape"] = [2**62]


def _filled(path: Path, value: float) -> None:
    save_file({name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}, path)


def _one_nan(path: Path) -> None:
    tensors = load_file(path)
    name = next(name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point() and tensor.numel() > 1)
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, path)


LIES: dict[str, Harm] = {
    "header of 2^63 bytes": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:]),
    "header of 20 MB": lambda path: path.write_bytes(struct.pack("<Q", 20 << 20) + b" " * (20 << 20)),
    "header nested deep": lambda path: path.write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
    "overlap": lambda path: _rewritten(path, _overlap),
    "tensor beyond the file": lambda path: _rewritten(path, _beyond),
    "trailing bytes": lambda path: _rewritten(path, lambda header: None, b"\0" * 8),
    "empty": lambda path: path.write_bytes(b""),
    "no tensors": lambda path: path.write_bytes(struct.pack("<Q", 2) + b"{}"),
    "NaN": _one_nan,
}
WEIGHT_LIES: dict[str, Harm] = {
    **LIES,
    "all NaN": lambda path: _filled(path, float("nan")),
    "all infinite": lambda path: _filled(path, float("inf")),
    "all zero": lambda path: _filled(path, 0.0),
}


def _expected(harm: str) -> set[ErrorClass]:
    if "NaN" in harm or "infinite" in harm:
        return {ErrorClass.NONFINITE}
    return {ErrorClass.MISMATCH, ErrorClass.DATA}


@pytest.mark.parametrize("part", ["adapter", "best"])
@pytest.mark.parametrize("harm", WEIGHT_LIES)
def test_checkpoint_whose_weights_lie_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, part: str, harm: str
) -> None:
    folder = Path(checkpoint.path)
    WEIGHT_LIES[harm](folder / part / WEIGHTS)
    source = checkpoint.model_copy(update={"digest": vouched(folder)})
    assert refused(lambda: read_state(source, trained[0].run), folder) in _expected(harm)


@pytest.mark.parametrize("harm", LIES)
def test_checkpoint_whose_state_lies_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, harm: str
) -> None:
    folder = Path(checkpoint.path)
    LIES[harm](folder / "state.safetensors")
    source = checkpoint.model_copy(update={"digest": vouched(folder)})
    is_well_formed = harm in ("NaN", "no tensors")
    act = resume if is_well_formed else lambda trained, source: read_state(source, trained[0].run)
    refused(lambda: act(trained, source), folder)


@pytest.mark.parametrize("harm", WEIGHT_LIES)
def test_adapter_whose_weights_lie_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], adapter: AdapterRef, harm: str
) -> None:
    folder = Path(adapter.path)
    WEIGHT_LIES[harm](folder / WEIGHTS)
    hostile = adapter.model_copy(update={"digest": vouched(folder)})
    assert refused(lambda: start(trained, hostile), folder) in _expected(harm)
    assert refused(lambda: register(hostile), folder) in _expected(harm)


# ---- cut ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", f"adapter/{WEIGHTS}", f"best/{CONFIG}"])
def test_checkpoint_cut_at_any_sixteenth_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, name: str
) -> None:
    """Under its own manifest, which notices, and under one that fits the cut, where the content does not."""
    folder, run = Path(checkpoint.path), trained[0].run
    whole, manifest = (folder / name).read_bytes(), (folder / "manifest.json").read_bytes()
    for sixteenth in range(16):
        (folder / "manifest.json").write_bytes(manifest)
        (folder / name).write_bytes(whole[: len(whole) * sixteenth // 16])
        assert refused(lambda: read_state(checkpoint, run), folder, name) is ErrorClass.TRANSIENT
        source = checkpoint.model_copy(update={"digest": vouched(folder)})
        refused(lambda source=source: read_state(source, run), folder)


# ---- manifests that lead elsewhere ----------------------------------------------------------------------------------


def _link_file(folder: Path) -> None:
    (folder / "state.json").rename(folder.parent / "elsewhere.json")
    (folder / "state.json").symlink_to(folder.parent / "elsewhere.json")


def _link_folder(folder: Path) -> None:
    (folder / "best").rename(folder.parent / "elsewhere")
    (folder / "best").symlink_to(folder.parent / "elsewhere")


def _link_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere.json")


def _pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def _names(name: str) -> Harm:
    return lambda folder: vouched(folder, **{name: {"sha256": "0" * 64, "bytes": 0}})


ELSEWHERE: dict[str, Harm] = {
    "..": _names("../../etc/passwd"),
    "absolute": _names("/etc/passwd"),
    "hidden ..": _names("adapter/../../x"),
    "NUL": _names("state\0.json"),
    "link": _link_file,
    "linked folder": _link_folder,
    "linked manifest": _link_manifest,
    "pipe": _pipe,
    "huge manifest": lambda folder: (folder / "manifest.json").write_bytes(b" " * (9 << 20)),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("harm", ELSEWHERE)
def test_checkpoint_whose_manifest_leads_elsewhere_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, harm: str
) -> None:
    folder = Path(checkpoint.path)
    ELSEWHERE[harm](folder)
    assert refused(lambda: read_state(checkpoint, trained[0].run), folder) is ErrorClass.TRANSIENT


def test_checkpoint_with_a_link_beside_its_files_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource
) -> None:
    folder = Path(checkpoint.path)
    (folder / "more").symlink_to("/etc")
    refused(lambda: read_state(checkpoint, trained[0].run), folder, "more does not belong there")


# ---- of something else ----------------------------------------------------------------------------------------------


def _restated(folder: Path, **changes: Any) -> str:
    state = json.loads((folder / "state.json").read_bytes())
    for name, value in changes.items():
        place = state
        *parents, last = name.split("__")
        for parent in parents:
            place = place[parent]
        place[last] = value
    (folder / "state.json").write_text(json.dumps(state))
    return vouched(folder)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"identity__run_id": "run-9"}, "run_id"),
        ({"identity__base.digest": "0" * 64}, "base.digest"),
        ({"identity__world_size": 2}, "world_size is 1 now and was 2 there"),
        ({"identity__dataset.fingerprint": "0" * 64}, "dataset.fingerprint"),
        ({"identity__surprise": "x" * 100_000}, "surprise"),
        ({"standing__step": 3}, "expected step 4"),
        ({"standing__last_lr": 0.5}, "learning rate"),
        ({"position": 77}, "is at a position"),
        ({"accumulation": 3}, "state.json"),
        ({"standing__best_value": "much"}, "state.json"),
        ({"random": {}}, "rank-0"),
        ({"random__rank-0__python": [3, [1, 2], None]}, "cannot be restored"),
        ({"v": 2}, "state.json"),
    ],
)
def test_checkpoint_of_something_else_is_refused_by_field(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, changes: dict[str, Any], field: str
) -> None:
    folder = Path(checkpoint.path)
    source = checkpoint.model_copy(update={"digest": _restated(folder, **changes)})
    assert refused(lambda: resume(trained, source), folder, field) is ErrorClass.DATA


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{" * 17_000_000, b"null", b"\xff\xfe", b'{"v": NaN}'])
def test_checkpoint_whose_state_is_no_state_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, content: bytes
) -> None:
    folder = Path(checkpoint.path)
    (folder / "state.json").write_bytes(content)
    source = checkpoint.model_copy(update={"digest": vouched(folder)})
    assert refused(lambda: read_state(source, trained[0].run), folder, "state.json") is ErrorClass.DATA


def test_optimizer_of_another_step_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource
) -> None:
    folder = Path(checkpoint.path)
    shutil.copy(Path(resume_from(trained[1], 2).path) / "state.safetensors", folder / "state.safetensors")
    source = checkpoint.model_copy(update={"digest": vouched(folder)})
    assert refused(lambda: resume(trained, source), folder, "is not at step 4") is ErrorClass.DATA


def test_adapter_of_another_base_is_refused(
    trained: tuple[TrainSpec, Path, AdapterRef], checkpoint: ResumeSource, adapter: AdapterRef
) -> None:
    """By its shapes, because it says nothing about its base that could be believed."""

    def narrow(path: Path) -> None:
        tensors = load_file(path)
        save_file({name: tensor[..., :-1].contiguous() for name, tensor in tensors.items()}, path)

    for folder, weights in ((Path(checkpoint.path), f"adapter/{WEIGHTS}"), (Path(adapter.path), WEIGHTS)):
        narrow(folder / weights)
    hostile = adapter.model_copy(update={"digest": vouched(Path(adapter.path))})
    refused(lambda: train_from(trained, hostile), Path(adapter.path))
    shutil.rmtree(Path(adapter.path).parent / "out")
    source = checkpoint.model_copy(update={"digest": vouched(Path(checkpoint.path))})
    refused(lambda: resume(trained, source), Path(checkpoint.path))
