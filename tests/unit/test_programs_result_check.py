"""The judge: a good attempt is believed; change any one thing about it and it is not, and the message says what."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.programs import World, adapter_ref
from tunesmith.core.errors import ProgramError
from tunesmith.core.files import canonical_json, publish_folder, sha256_file, sha256_text
from tunesmith.programs.protocol import Scores
from tunesmith.programs.result_check import CheckedResult, check_evaluate_result, check_train_result, read_scores
from tunesmith.runs.rules.task import AttemptState, ErrorClass
from tunesmith.runs.spec import EvaluateSpec, Subject, TrainSpec
from tunesmith.training.trainers.sim.files import safetensors_bytes


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("judge"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def trained(world: World) -> TrainSpec:
    """A sim training that really ran and succeeded."""
    spec = world.train_spec()
    assert world.run(spec) == 0
    assert check_train_result(spec, world.folder(spec), 0).outcome is AttemptState.SUCCEEDED
    return spec


@pytest.fixture(scope="module")
def evaluated(world: World, trained: TrainSpec) -> EvaluateSpec:
    """A sim evaluation of that training against the bare base."""
    result = json.loads((world.folder(trained) / "result.json").read_bytes())
    adapter = adapter_ref(world, trained, result["artifact"]["digest"])
    spec = world.evaluate_spec(
        (Subject(label="candidate", adapter=adapter), Subject(label="baseline", adapter=None)), num_cases=60
    )
    assert world.run(spec) == 0
    assert check_evaluate_result(spec, world.folder(spec), 0).outcome is AttemptState.SUCCEEDED
    return spec


@pytest.fixture
def copy(world: World, trained: TrainSpec, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.folder(trained), tmp_path / "copy", symlinks=True))


@pytest.fixture
def scored(world: World, evaluated: EvaluateSpec, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.folder(evaluated), tmp_path / "scored", symlinks=True))


def change(folder: Path, **fields: Any) -> None:
    """Result and stdout as if the program had said something else."""
    content = json.loads((folder / "result.json").read_bytes()) | fields
    for name in ("result.json", "stdout.json"):
        (folder / name).write_text(json.dumps(content))


def republish(folder: Path, edit: Callable[[Path], object]) -> None:
    """Change the artefact and publish it again, so that only its content is wrong."""
    staged = folder / "again"
    (folder / "artifact").rename(staged)
    edit(staged)
    manifest = publish_folder(staged, folder / "artifact")
    change(folder, artifact={"path": "artifact", "digest": manifest.digest})


def assert_failed(judgement: CheckedResult, error_class: ErrorClass, *words: str) -> None:
    assert judgement.outcome is AttemptState.FAILED
    assert judgement.error_class is error_class, judgement.error
    assert judgement.result is None
    for word in words:
        assert word in (judgement.error or "")
    assert "\n" not in (judgement.error or "")


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"base_digest": "x"}, "base_digest"),
    "base missing": ({"base_digest": None}, "base_digest"),
    "start": ({"start_digest": "x"}, "start_digest"),
    "dataset": ({"dataset_fingerprint": "x"}, "dataset_fingerprint"),
    "config": ({"config_fingerprint": "x"}, "config_fingerprint"),
    "code": ({"code_fingerprint": None}, "code_fingerprint"),
    "kind": ({"kind": "evaluate"}, "kind"),
    "attempt": ({"attempt_id": "att-other"}, "attempt_id"),
    "token": ({"token": "old"}, "token"),
    "no artifact": ({"artifact": None}, "artifact: missing"),
    "no tokens": ({"num_trained_tokens": 0}, "num_trained_tokens"),
    "no steps": ({"num_steps": 0}, "num_steps"),
    "negative": ({"num_trained_examples": -1}, "num_trained_examples"),
    "too many": ({"num_steps": 2**60}, "num_steps"),
    "endless": ({"train_s": float("inf")}, "train_s"),
    "digest": ({"artifact": {"path": "artifact", "digest": "0" * 64}}, "artifact"),
    "up": ({"artifact": {"path": "../artifact", "digest": "0"}}, "not below"),
    "absolute": ({"artifact": {"path": "/etc", "digest": "0"}}, "not below"),
    "itself": ({"artifact": {"path": ".", "digest": "0"}}, "not below"),
    "nul": ({"artifact": {"path": "a\0b", "digest": "0"}}, "not below"),
    "long name": ({"artifact": {"path": "a" * 5000, "digest": "0"}}, "not below"),
    "long path": ({"artifact": {"path": "a/" * 5000, "digest": "0"}}, "not below"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_check_one_wrong_field_is_a_mismatch_that_names_it(trained: TrainSpec, copy: Path, name: str) -> None:
    fields, word = FIELDS[name]
    change(copy, **fields)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, word)


def test_check_many_mismatches_are_all_listed(trained: TrainSpec, copy: Path) -> None:
    change(copy, base_digest="x", dataset_fingerprint="y", token="z", num_trained_tokens=0, artifact=None)
    words = ("base_digest", "dataset_fingerprint", "token", "num_trained_tokens", "artifact")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, *words)


def test_check_token_is_not_repeated_in_the_message(trained: TrainSpec, copy: Path) -> None:
    change(copy, token="secret-of-another")
    error = check_train_result(trained, copy, 0).error or ""
    assert "secret-of-another" not in error
    assert trained.attempt.token not in error


def test_check_nan_in_the_result_is_nonfinite(trained: TrainSpec, copy: Path) -> None:
    change(copy, metrics={"validation_loss": float("nan")})
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.NONFINITE, "validation_loss")


MALFORMED = {
    "empty": b"",
    "not json": b"done!",
    "list": b"[]",
    "unknown field": b'{"v":1,"surprise":1}',
    "unknown status": b'{"v":1,"kind":"train","attempt_id":"a","token":"t","status":"splendid"}',
    "deep": b"[" * 100_000,
    "large": b" " * ((1 << 20) + 1),
    "invalid utf-8": b'{"v":1,"kind":"\xff"}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_check_malformed_result_is_a_protocol_failure(trained: TrainSpec, copy: Path, name: str) -> None:
    for file in ("result.json", "stdout.json"):
        (copy / file).write_bytes(MALFORMED[name])
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL)


def test_check_stdout_that_says_more_is_a_protocol_failure(trained: TrainSpec, copy: Path) -> None:
    with (copy / "stdout.json").open("ab") as sink:
        sink.write(b"and a friendly word\n")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL, "stdout")


def test_check_stdout_flood_is_a_protocol_failure(trained: TrainSpec, copy: Path) -> None:
    with (copy / "stdout.json").open("ab") as sink:
        sink.truncate(300 << 20)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL, "stdout.json")


def test_check_stdout_with_the_same_json_in_other_words_is_believed(trained: TrainSpec, copy: Path) -> None:
    change(copy, detail={"note": "NaN here:", "value": float("nan")})
    content = json.loads((copy / "result.json").read_bytes())
    (copy / "stdout.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    assert check_train_result(trained, copy, 0).outcome is AttemptState.SUCCEEDED


@pytest.mark.parametrize("name", ["result.json", "stdout.json", "events.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "endless"])
def test_check_files_that_are_none_never_hang_or_raise(
    trained: TrainSpec, copy: Path, tmp_path: Path, name: str, kind: str
) -> None:
    saved = tmp_path / "saved"
    (copy / name).rename(saved)
    match kind:
        case "link":
            (copy / name).symlink_to(saved)
        case "pipe":
            os.mkfifo(copy / name)
        case "folder":
            (copy / name).mkdir()
        case "endless":
            (copy / name).symlink_to("/dev/zero")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL)


EXITS: dict[int, tuple[AttemptState, ErrorClass | None, str]] = {
    1: (AttemptState.FAILED, ErrorClass.PROTOCOL, "succeeded but exited 1"),
    75: (AttemptState.FAILED, ErrorClass.PROTOCOL, "exited 75"),
    76: (AttemptState.LOST, None, "keepalive"),
    -15: (AttemptState.INTERRUPTED, None, "TERM"),
    -9: (AttemptState.FAILED, ErrorClass.CRASH, "memory"),
    -11: (AttemptState.FAILED, ErrorClass.CRASH, "SIGSEGV"),
    -40: (AttemptState.FAILED, ErrorClass.CRASH, "signal 40"),
    139: (AttemptState.FAILED, ErrorClass.PROTOCOL, "139"),
}


@pytest.mark.parametrize("code", EXITS)
def test_check_success_with_another_exit_is_not_believed(trained: TrainSpec, copy: Path, code: int) -> None:
    outcome, error_class, word = EXITS[code]
    judgement = check_train_result(trained, copy, code)
    assert (judgement.outcome, judgement.error_class) == (outcome, error_class)
    assert word in (judgement.error or "")


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (0, ErrorClass.PROTOCOL),
        (1, ErrorClass.CRASH),
        (2, ErrorClass.CONFIG),
        (74, ErrorClass.TRANSIENT),
        (75, ErrorClass.CRASH),
        (127, ErrorClass.MISSING),
    ],
)
def test_check_exit_without_result_by_code(trained: TrainSpec, copy: Path, code: int, error_class: ErrorClass) -> None:
    (copy / "result.json").unlink()
    assert_failed(check_train_result(trained, copy, code), error_class)


def test_check_failed_result_keeps_its_class_and_words(trained: TrainSpec, copy: Path) -> None:
    change(copy, status="failed", error_class="oom", error="no room\nfor \x1b[31mthat\x00", artifact=None)
    judgement = check_train_result(trained, copy, 1)
    assert (judgement.outcome, judgement.error_class) == (AttemptState.FAILED, ErrorClass.OOM)
    assert judgement.error == "no room for [31mthat"
    change(copy, status="failed", error_class=None, error=None)
    assert check_train_result(trained, copy, 1).error_class is ErrorClass.BUG


def test_check_interrupted_result_needs_its_exit_code(trained: TrainSpec, copy: Path) -> None:
    change(copy, status="interrupted", artifact=None)
    assert check_train_result(trained, copy, 75).outcome is AttemptState.INTERRUPTED
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL)
    change(copy, status="interrupted", token="old")
    assert_failed(check_train_result(trained, copy, 75), ErrorClass.MISMATCH, "token")


def test_check_stopped_result_is_held_to_what_a_success_is(trained: TrainSpec, copy: Path) -> None:
    change(copy, status="stopped")
    assert check_train_result(trained, copy, 0).outcome is AttemptState.SUCCEEDED
    change(copy, status="stopped", artifact=None)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "artifact")


def test_check_events_that_break_the_protocol_spoil_a_success(trained: TrainSpec, copy: Path) -> None:
    with (copy / "events.jsonl").open("ab") as sink:
        sink.write(b'{"v":1')
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL, "half a line")
    with (copy / "events.jsonl").open("ab") as sink:
        sink.write(b"nonsense\n")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.PROTOCOL, "broke the protocol")


def test_check_last_loss_that_is_no_number_is_nonfinite(trained: TrainSpec, copy: Path) -> None:
    with (copy / "events.jsonl").open("ab") as sink:
        sink.write(b'{"v":1,"seq":999,"at":1.0,"type":"metrics","step":99,"values":{"loss":NaN}}\n')
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.NONFINITE, "99")


ARTIFACTS: dict[str, tuple[Callable[[Path], object], ErrorClass, str]] = {
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), ErrorClass.MISMATCH, "is missing"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), ErrorClass.MISMATCH, "is missing"),
    "pickle": (lambda f: (f / "optimizer.pt").write_bytes(b"\x80\x04"), ErrorClass.MISMATCH, "optimizer.pt"),
    "program": (lambda f: (f / "run.py").write_text("x"), ErrorClass.MISMATCH, "run.py"),
    "other kind": (
        lambda f: (f / "adapter_config.json").write_text('{"peft_type": "IA3"}'),
        ErrorClass.MISMATCH,
        "LoRA",
    ),
    "config is no object": (
        lambda f: (f / "adapter_config.json").write_bytes(b"[" * 99_999),
        ErrorClass.MISMATCH,
        "LoRA",
    ),
    "config of another encoding": (
        lambda f: (f / "adapter_config.json").write_text((f / "adapter_config.json").read_text(), "utf-16"),
        ErrorClass.MISMATCH,
        "LoRA",
    ),
    "config with a byte order mark": (
        lambda f: (f / "adapter_config.json").write_text((f / "adapter_config.json").read_text(), "utf-8-sig"),
        ErrorClass.MISMATCH,
        "LoRA",
    ),
    "name for a terminal": (lambda f: (f / "a\n\x1b[2Jb.txt").write_text("x"), ErrorClass.MISMATCH, "of a kind"),
    "cut weights": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"12345678"),
        ErrorClass.MISMATCH,
        "safetensors",
    ),
}


@pytest.mark.parametrize("name", ARTIFACTS)
def test_check_artifact_whose_content_is_wrong_is_refused(trained: TrainSpec, copy: Path, name: str) -> None:
    edit, error_class, word = ARTIFACTS[name]
    republish(copy, edit)
    assert_failed(check_train_result(trained, copy, 0), error_class, word)


@pytest.mark.parametrize("where", ["/", ".", "nowhere"])
def test_check_link_beside_the_files_is_refused(trained: TrainSpec, copy: Path, where: str) -> None:
    """Whoever copied the folder would follow it: to the whole disk, or round and round."""
    (copy / "artifact" / "beside").symlink_to(where)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "'beside' is a link")


NESTED = r"(([a-z_.])+)+!"
"""A pattern that takes for ever on a name of some thirty letters."""
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "huge rank": ({"r": 10**9}, "r must be"),
    "rank beyond the recipe": ({"r": 4}, "more than the recipe's lora_rank"),
    "rank of another file": ({"r": 1}, "has rank 2"),
    "no rank": ({"r": None}, "r must be"),
    "rank as text": ({"r": "2"}, "r must be"),
    "rank as truth": ({"r": True}, "r must be"),
    "code": ({"auto_mapping": {"base_model_class": "x", "parent_library": "os"}}, "auto_mapping"),
    "runtime": ({"runtime_config": {"ephemeral_gpu_offload": True}}, "runtime_config"),
    "corda": ({"corda_config": {"cache_file": "/etc/passwd"}}, "corda_config"),
    "pattern": ({"target_modules": NESTED}, "target_modules"),
    "pattern in a list": ({"target_modules": ["q_proj", NESTED]}, "target_modules"),
    "pattern of layers": ({"layers_pattern": [NESTED]}, "layers_pattern"),
    "pattern of what is left out": ({"exclude_modules": NESTED}, "exclude_modules"),
    "pattern of ranks": ({"rank_pattern": {NESTED: 2}}, "rank_pattern"),
    "pattern of scales": ({"alpha_pattern": {NESTED: 2}}, "alpha_pattern"),
    "pattern of saved modules": ({"modules_to_save": [NESTED]}, "modules_to_save"),
    "rank in a pattern": ({"rank_pattern": {"q_proj": 10**9}}, "rank_pattern"),
    "another rank in a pattern": ({"rank_pattern": {"q_proj": 1}}, "has rank 2"),
    "scale": ({"lora_alpha": 1e308}, "lora_alpha"),
    "scale beyond any float": ({"lora_alpha": 10**400}, "lora_alpha"),
    "layers": ({"layers_to_transform": [10**12]}, "layers_to_transform"),
    "many names": ({"target_modules": ["q_proj"] * 30_000}, "target_modules"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_check_hostile_settings_are_refused_before_anything_is_registered(
    trained: TrainSpec, copy: Path, name: str
) -> None:
    fields, word = CONFIGS[name]

    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))

    republish(copy, edit)
    started = time.monotonic()
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, word)
    assert time.monotonic() - started < 5.0


def test_check_settings_with_a_name_twice_are_refused(trained: TrainSpec, copy: Path) -> None:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text('{"r": 1000000000, ' + path.read_text()[1:])

    republish(copy, edit)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "stands twice")


MODULE = "base_model.model.embed"
WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other width": (lambda t: t.update({f"{MODULE}.lora_A.weight": ([2, 5], [0.1] * 10)}), "does not fit"),
    "module that the base has not": (
        lambda t: t.update({"base_model.model.model.secret.lora_A.weight": ([2, 2], [0.1] * 4)}),
        "does not fit",
    ),
    "nobody asked for it": (
        lambda t: t.update({"base_model.model.embed.weight": ([2, 2], [0.1] * 4)}),
        "modules_to_save",
    ),
    "outside the model": (lambda t: t.update({"optimizer.state": ([2, 2], [0.1] * 4)}), "does not begin with"),
    "no matrix": (lambda t: t.update({f"{MODULE}.lora_A.weight": ([8], [0.1] * 8)}), "not a matrix"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_check_weights_that_do_not_fit_the_base_are_refused(trained: TrainSpec, copy: Path, name: str) -> None:
    change_weights, word = WEIGHTS[name]
    tensors = {f"{MODULE}.lora_A.weight": ([2, 2], [0.1] * 4), f"{MODULE}.lora_B.weight": ([2, 2], [0.1] * 4)}
    change_weights(tensors)
    republish(copy, lambda f: (f / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors)))
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, word)


def with_header(header: str, body: bytes = b"") -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + body


def entry(dtype: str, shape: list[int], end: int) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [0, end]})


FILES: dict[str, tuple[bytes, str]] = {
    "a name twice": (
        with_header(f'{{"{MODULE}.lora_A.weight": {entry("F32", [2, 2], 16)}, '
                    f'"{MODULE}.lora_A.weight": {entry("F16", [2, 4], 16)}}}', b"\1" * 16),
        "stands twice",
    ),
    "whole numbers": (
        with_header(f'{{"{MODULE}.lora_A.weight": {entry("I32", [2, 2], 16)}}}', b"\1" * 16),
        "no weights",
    ),
    "endless header": ((1 << 62).to_bytes(8, "little") + b"{}", "header is larger"),
    "huge shape": (
        with_header(f'{{"{MODULE}.lora_A.weight": {entry("F32", [10**9, 192], 16)}}}', b"1" * 16), "safetensors"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_check_odd_files_of_weights_are_refused(trained: TrainSpec, copy: Path, name: str) -> None:
    data, word = FILES[name]
    republish(copy, lambda f: (f / "adapter_model.safetensors").write_bytes(data))
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, word)


def test_check_sparse_giant_is_refused_without_reading_it(trained: TrainSpec, copy: Path) -> None:
    with (copy / "artifact" / "adapter_model.safetensors").open("r+b") as sink:
        sink.truncate(1 << 40)
    started = time.monotonic()
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "at most")
    assert time.monotonic() - started < 5.0


def test_check_thousands_of_files_are_refused(trained: TrainSpec, copy: Path) -> None:
    for number in range(1100):
        (copy / "artifact" / f"{number}.txt").touch()
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "more than 1000 files")


def test_check_artifact_changed_after_publishing_is_refused(trained: TrainSpec, copy: Path) -> None:
    weights = copy / "artifact" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "not what the manifest says")


def test_check_artifact_with_an_unlisted_file_is_refused(trained: TrainSpec, copy: Path) -> None:
    (copy / "artifact" / "stowaway.json").write_text("{}")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "stowaway")


def test_check_artifact_behind_a_link_is_refused(trained: TrainSpec, copy: Path, tmp_path: Path) -> None:
    (copy / "artifact").rename(tmp_path / "elsewhere")
    (copy / "artifact").symlink_to(tmp_path / "elsewhere")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "link")


def test_check_artifact_of_linked_files_is_refused(trained: TrainSpec, copy: Path, tmp_path: Path) -> None:
    weights = copy / "artifact" / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "link")


def test_check_manifest_that_names_a_file_outside_is_refused(trained: TrainSpec, copy: Path) -> None:
    manifest = json.loads((copy / "artifact" / "manifest.json").read_bytes())
    manifest["files"]["../spec.json"] = {
        "sha256": sha256_file(copy / "spec.json"),
        "bytes": (copy / "spec.json").stat().st_size,
    }
    (copy / "artifact" / "manifest.json").write_text(json.dumps(manifest))
    digest = sha256_text(canonical_json(manifest["files"]))
    change(copy, artifact={"path": "artifact", "digest": digest})
    assert_failed(check_train_result(trained, copy, 0), ErrorClass.MISMATCH, "outside")


def test_check_artifact_where_none_was_asked_for_is_a_mismatch(trained: TrainSpec, copy: Path) -> None:
    run = trained.run.model_copy(update={"expected_artifact": "none"})
    assert_failed(
        check_train_result(trained.model_copy(update={"run": run}), copy, 0), ErrorClass.MISMATCH, "none was asked"
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=80)
    | st.dictionaries(st.text(max_size=8), st.text() | st.integers()).map(lambda fields: json.dumps(fields).encode()),
    code=st.integers(-70, 255),
)
def test_check_any_bytes_are_judged_without_an_exception(
    trained: TrainSpec, tmp_path: Path, content: bytes, code: int
) -> None:
    for name in ("result.json", "stdout.json", "events.jsonl"):
        (tmp_path / name).write_bytes(content)
    outcome = check_train_result(trained, tmp_path, code).outcome
    expected = {76: AttemptState.LOST, -15: AttemptState.INTERRUPTED}
    assert outcome is expected.get(code, AttemptState.FAILED)


def test_check_evaluate_result_good_scores_can_be_read(world: World, evaluated: EvaluateSpec) -> None:
    judgement = check_evaluate_result(evaluated, world.folder(evaluated), 0)
    assert judgement.result is not None
    scores = read_scores(world.folder(evaluated), judgement.result)
    means = {
        label: sum(score.values["heldout_loss"] for score in by_case) / len(by_case)
        for label, by_case in scores.by_subject.items()
    }
    assert means["candidate"] == pytest.approx(1.5, abs=0.05)
    assert means["baseline"] == pytest.approx(2.0, abs=0.05)


EVALUATION_FIELDS: dict[str, tuple[dict[str, Any], ErrorClass, str]] = {
    "base": ({"base_digest": "x"}, ErrorClass.MISMATCH, "base_digest"),
    "cases": ({"cases_digest": None}, ErrorClass.MISMATCH, "cases_digest"),
    "adapters": ({"detail": {}}, ErrorClass.MISMATCH, "subject_digests"),
    "token": ({"token": "old"}, ErrorClass.MISMATCH, "token"),
    "no scores": ({"scores": None}, ErrorClass.PROTOCOL, "no scores"),
    "scores elsewhere": ({"scores": {"path": "../x", "digest": "0"}}, ErrorClass.PROTOCOL, "not below"),
    "other scores": ({"scores": {"path": "scores.json", "digest": "0"}}, ErrorClass.PROTOCOL, "digest"),
}


@pytest.mark.parametrize("name", EVALUATION_FIELDS)
def test_check_evaluate_result_one_wrong_field_is_refused(evaluated: EvaluateSpec, scored: Path, name: str) -> None:
    fields, error_class, word = EVALUATION_FIELDS[name]
    change(scored, **fields)
    assert_failed(check_evaluate_result(evaluated, scored, 0), error_class, word)


def rescore(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / "scores.json").read_bytes())
    edit(content["by_subject"])
    (folder / "scores.json").write_text(json.dumps(content))
    change(folder, scores={"path": "scores.json", "digest": sha256_file(folder / "scores.json")})


SCORES: dict[str, tuple[Callable[[dict[str, Any]], object], ErrorClass]] = {
    "one case dropped": (lambda sides: sides["candidate"].pop(), ErrorClass.MISMATCH),
    "one case twice": (lambda sides: sides["candidate"].append(sides["candidate"][0]), ErrorClass.MISMATCH),
    "other order": (lambda sides: sides["baseline"].reverse(), ErrorClass.MISMATCH),
    "one side missing": (lambda sides: sides.pop("baseline"), ErrorClass.MISMATCH),
    "a third side": (lambda sides: sides.update(x=sides["baseline"]), ErrorClass.MISMATCH),
    "a text for a number": (
        lambda sides: sides["candidate"][0]["values"].update(heldout_loss="low"),
        ErrorClass.PROTOCOL,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_check_evaluate_result_scores_that_do_not_fit_are_refused(
    evaluated: EvaluateSpec, scored: Path, name: str
) -> None:
    edit, error_class = SCORES[name]
    rescore(scored, edit)
    assert_failed(check_evaluate_result(evaluated, scored, 0), error_class)


def refer(folder: Path, edit: Callable[[dict[str, Any]], object], path: str = "references.json") -> None:
    content = json.loads((folder / "references.json").read_bytes())
    edit(content)
    (folder / path).write_text(json.dumps(content))
    change(folder, references={"path": path, "digest": sha256_file(folder / path)})


REFERENCES: dict[str, tuple[Callable[[dict[str, Any]], object], ErrorClass, str]] = {
    "of another adapter": (lambda said: said.update(adapter="x"), ErrorClass.MISMATCH, "references.adapter"),
    "of another base": (lambda said: said.update(base="x"), ErrorClass.MISMATCH, "references.base"),
    "without an answer": (lambda said: said["readings"][0].pop("answer_text"), ErrorClass.PROTOCOL, "malformed"),
    "with NaN": (lambda said: said["readings"][0].update(log_probs=[float("nan")]), ErrorClass.PROTOCOL, "malformed"),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_check_evaluate_result_references_that_do_not_fit_are_refused(
    evaluated: EvaluateSpec, scored: Path, name: str
) -> None:
    edit, error_class, word = REFERENCES[name]
    refer(scored, edit)
    assert_failed(check_evaluate_result(evaluated, scored, 0), error_class, word)


def test_check_evaluate_result_references_elsewhere_or_altered_are_refused(
    evaluated: EvaluateSpec, scored: Path
) -> None:
    refer(scored, lambda said: None, "other.json")
    assert_failed(check_evaluate_result(evaluated, scored, 0), ErrorClass.MISMATCH, "references.path")
    change(scored, references={"path": "references.json", "digest": "0" * 64})
    assert_failed(check_evaluate_result(evaluated, scored, 0), ErrorClass.PROTOCOL, "digest")


def test_check_evaluate_result_without_references_is_believed(evaluated: EvaluateSpec, scored: Path) -> None:
    """An evaluator may leave them out; who can be asked then serves nothing of it."""
    change(scored, references=None)
    assert check_evaluate_result(evaluated, scored, 0).outcome is AttemptState.SUCCEEDED


def test_check_evaluate_result_nan_and_errors_are_left_to_the_gate(evaluated: EvaluateSpec, scored: Path) -> None:
    def edit(sides: dict[str, Any]) -> None:
        sides["candidate"][0]["values"]["heldout_loss"] = float("nan")
        sides["candidate"][1] |= {"values": {}, "error": "failed"}

    rescore(scored, edit)
    assert check_evaluate_result(evaluated, scored, 0).outcome is AttemptState.SUCCEEDED


def test_check_evaluate_result_changed_cases_are_refused(world: World, evaluated: EvaluateSpec, tmp_path: Path) -> None:
    other = tmp_path / "cases.jsonl"
    other.write_text('{"id": "case-0", "messages": []}\n')
    cases = evaluated.cases.model_copy(update={"path": str(other)})
    judgement = check_evaluate_result(evaluated.model_copy(update={"cases": cases}), world.folder(evaluated), 0)
    assert_failed(judgement, ErrorClass.PROTOCOL, "digest")


def test_read_scores_without_scores_is_a_program_error(world: World, trained: TrainSpec) -> None:
    result = check_train_result(trained, world.folder(trained), 0).result
    assert result is not None
    with pytest.raises(ProgramError, match="no scores"):
        read_scores(world.folder(trained), result)


def test_scores_with_nan_survive_the_file() -> None:
    of_before = '{"v":1,"by_subject":{"candidate":[{"case_id":"a","values":{"loss":NaN},"answers":{},"error":null}]}}'
    text = of_before.replace('"answers"', '"not_applicable":[],"answers"')
    assert Scores.model_validate_json(text).model_dump_json() == text
    assert Scores.model_validate_json(of_before).model_dump_json() == text
