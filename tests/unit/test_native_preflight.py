"""Before hours are spent: what cannot be trained is refused by name, on real tiny bases; new symbols are found."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.native import (
    a_base_ref,
    a_dataset,
    a_micro_base,
    a_program,
    a_recipe,
    a_train_spec,
    events_of,
    quick_base,
    rows_of,
    small_rows,
)
from tunesmith.core.errors import ConfigError, DataError
from tunesmith.demo import dates
from tunesmith.models.adapters import new_adapter, save_adapter, trained_parameters
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.models.scoring import batches_by_count, mean_nlls
from tunesmith.profiles.profile import Checkpoints, TargetSettings
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import Log
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, DatasetRef, RunSpec
from tunesmith.training.trainers.native.preflight import (
    Preflight,
    check_base,
    check_before_loading,
    check_room,
    choose_embeddings,
    embeddings_wanted,
    room_needed,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_micro_base(tmp_path_factory.mktemp("preflight") / "base")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    return a_dataset(tmp_path_factory.mktemp("preflight-data") / "data", small_rows(60))


def tokens(chat: ChatFormat, rows: Any) -> list[Tokenized]:
    return [chat.tokenize(f"ex-{number}", row["messages"]) for number, row in enumerate(rows)]


def a_chat(folder: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(folder))


def prepared(folder: Path, data: DatasetRef, out: Path, **changes: Any) -> Program:
    return a_program(a_train_spec(a_base_ref(folder), data, **changes), out)


def look(base: Path, data: DatasetRef, out: Path, rows: Any, model: Any = None, **changes: Any) -> Preflight:
    """The preflight of these rows on a base, or on a model made from it."""
    chat = a_chat(base)
    program = prepared(base, data, out, **changes)
    return check_base(program, model if model is not None else load_base(base, CPU), chat, tokens(chat, rows))


# ---- a base that can be trained -------------------------------------------------------------------------------------


def test_random_base_passes_with_the_loss_of_an_even_guess(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    found = look(micro, data, tmp_path / "out", small_rows(80))
    assert found.base_loss == pytest.approx(math.log(262), abs=0.2)
    assert found.as_json() == {"base_loss": found.base_loss, "num_sampled": 64, "new_symbols": []}
    assert torch.equal(torch.get_rng_state(), state)
    assert not [event for event in events_of(tmp_path / "out") if isinstance(event, Log)]


def test_base_loss_is_the_mean_over_all_trained_tokens(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    chat, base = a_chat(micro), load_base(micro, CPU)
    examples = tokens(chat, small_rows(12))
    found = look(micro, data, tmp_path / "out", small_rows(12))
    means = mean_nlls(base, examples, chat.pad_id, batches_by_count([len(example) for example in examples], 4))
    assert means is not None
    total = sum(mean * example.num_trained for mean, example in zip(means, examples, strict=True))
    assert found.base_loss == pytest.approx(total / sum(example.num_trained for example in examples), rel=1e-5)


def test_long_conversations_are_sampled_thinly(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    chat, base = a_chat(micro), load_base(micro, CPU)
    base.config.max_position_embeddings = 4096
    spec = a_train_spec(a_base_ref(micro, context=4096), data)
    long = [Tokenized(f"ex-{number}", (7,) * 3000, (False, *[True] * 2999)) for number in range(30)]
    assert check_base(a_program(spec, tmp_path / "out"), base, chat, long).num_sampled == 6


# ---- a base that cannot ---------------------------------------------------------------------------------------------


def test_base_with_nan_is_refused_naming_the_example(tmp_path: Path, data: DatasetRef) -> None:
    base = a_micro_base(tmp_path / "base", nan_in="model.norm.weight")
    with pytest.raises(ProgramFailure, match=r"example ex-\d+ is not a finite number") as failure:
        look(base, data, tmp_path / "out", small_rows(9))
    assert failure.value.error_class is ErrorClass.NONFINITE


def test_base_that_is_far_worse_than_guessing_is_refused(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    broken = load_base(micro, CPU)
    with torch.no_grad():
        broken.model.norm.weight.mul_(10_000)
    with pytest.raises(ProgramFailure, match=r"guessing evenly over its vocabulary would give 5\.6") as failure:
        look(micro, data, tmp_path / "out", small_rows(9), broken)
    assert failure.value.error_class is ErrorClass.CONFIG


def test_base_that_is_worse_than_guessing_is_told(data: DatasetRef, tmp_path: Path) -> None:
    """The demo's base with the ids of its tokens permuted, as with a tokenizer of another model."""
    base = quick_base()
    odd = load_base(base, CPU)
    order = torch.randperm(262, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight = odd.get_input_embeddings().weight
        weight.copy_(weight[order].clone())
    found = look(base, data, tmp_path / "out", dates.words_rows(64, seed=7), odd)
    assert math.log(262) + 0.5 < found.base_loss < 2 * math.log(262) + 3
    (log,) = [event for event in events_of(tmp_path / "out") if isinstance(event, Log)]
    assert (log.level, "less likely than an even guess" in log.message) == ("warning", True)


def test_tokenizer_beyond_the_embeddings_is_refused_naming_the_token(
    micro: Path, data: DatasetRef, tmp_path: Path
) -> None:
    small = load_base(micro, CPU)
    small.resize_token_embeddings(80)
    with pytest.raises(ConfigError, match=r"example ex-0 uses token \d+ \('.+'\), but the embeddings have 80 rows"):
        look(micro, data, tmp_path / "a", small_rows(9), small)
    small.resize_token_embeddings(2)
    with pytest.raises(ConfigError, match=r"the end of an answer uses token 2 \('<\|end\|>'\)"):
        look(micro, data, tmp_path / "b", small_rows(9), small)


def test_unknown_target_module_is_refused_before_anything_is_asked(
    micro: Path, data: DatasetRef, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no module 'c_attn'"):
        look(micro, data, tmp_path / "out", small_rows(9), recipe=a_recipe(target_modules=("q_proj", "c_attn")))


def test_example_without_a_trained_token_is_refused_by_name(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    chat = a_chat(micro)
    silent = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    with pytest.raises(DataError, match="ex-9"):
        chat.tokenize("ex-9", silent["messages"])
    examples = [*tokens(chat, small_rows(3)), Tokenized("ex-9", (7, 8, 9), (True, False, False))]
    with pytest.raises(DataError, match="ex-9: no token of it would be trained"):
        check_base(prepared(micro, data, tmp_path / "out"), load_base(micro, CPU), chat, examples)


def test_example_longer_than_the_context_is_refused(micro: Path, data: DatasetRef, tmp_path: Path) -> None:
    program = prepared(micro, data, tmp_path / "out")
    check_before_loading(program, 2, [10, 256])
    with pytest.raises(ConfigError, match="an example has 257 tokens, the base takes 256"):
        check_before_loading(program, 2, [10, 257])
    with pytest.raises(DataError, match="nothing to train on"):
        check_before_loading(program, 0, [])
    chat = a_chat(micro)
    long = Tokenized("ex-1", (7,) * 257, (False, *[True] * 256))
    with pytest.raises(DataError, match="ex-1: 257 tokens do not fit into the base's 256"):
        check_base(program, load_base(micro, CPU), chat, [long])


# ---- room on the disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dora": True},
        {"target_modules": ("q_proj", "mlp.up_proj")},
        {"train_embeddings": True},
        {"train_embeddings": "auto"},
    ],
    ids=str,
)
def test_room_is_that_of_the_adapter_and_its_optimizer(
    tmp_path: Path, data: DatasetRef, tied: bool, change: dict[str, Any]
) -> None:
    base = a_micro_base(tmp_path / "base", tied=tied)
    recipe = a_recipe(**change, max_steps=1)
    run = a_train_spec(a_base_ref(base), data, recipe=recipe).run
    embeddings = "train_embeddings" in change
    adapted = new_adapter(load_base(base, CPU), recipe, train_embeddings=embeddings)
    save_adapter(adapted, tmp_path / "adapter", "base")
    file = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    moments = 2 * 4 * sum(tensor.numel() for _, tensor in trained_parameters(adapted))
    needed = room_needed(run, [100], with_embeddings=embeddings)
    assert 2 * file + moments <= needed / 4 <= 2 * file + moments + (64 << 10)


def test_room_grows_with_the_checkpoints_that_are_kept_and_no_further_than_the_steps(
    micro: Path, data: DatasetRef
) -> None:
    def needed(keep: int, **recipe: Any) -> int:
        spec = a_train_spec(
            a_base_ref(micro), data, recipe=a_recipe(**recipe), checkpoints=Checkpoints(every_steps=1, keep=keep)
        )
        return room_needed(spec.run, [100] * 1000, with_embeddings=False)

    assert needed(2) * 7 == needed(4) * 5
    assert needed(1000, max_steps=10) == needed(10)


def test_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path: Path) -> None:
    check_room(tmp_path, 5 << 20, free=5 << 20)
    with pytest.raises(ProgramFailure, match=r"5\.0 MiB needed, 4\.0 MiB free") as failure:
        check_room(tmp_path, 5 << 20, free=4 << 20)
    assert failure.value.error_class is ErrorClass.DISK
    with pytest.raises(ProgramFailure, match=r"1024\.00 GiB needed"):
        check_room(tmp_path, 1 << 40, free=4 << 20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a program's events are still open there


def test_real_disk_that_is_too_small_is_refused(micro: Path, data: DatasetRef, small_disk: Path) -> None:
    fits = prepared(micro, data, small_disk / "a", recipe=a_recipe(lora_rank=1))
    check_before_loading(fits, 1, [100])
    large = prepared(micro, data, small_disk / "b", recipe=a_recipe(lora_rank=128))
    with pytest.raises(ProgramFailure, match=r"needed, 1\.0 MiB free|needed, 0\.9 MiB free"):
        check_before_loading(large, 1, [100])


# ---- new symbols ----------------------------------------------------------------------------------------------------


NEW = ("<call>", "\t\t")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's base with two tokens that nobody ever wrote, one of which is no text to show."""
    folder = tmp_path_factory.mktemp("extended") / "base"
    tokenizer, model = load_tokenizer(quick_base()), load_base(quick_base(), CPU)
    tokenizer.add_tokens(list(NEW))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_symbols_that_the_base_never_wrote_are_found_and_named(
    extended: Path, data: DatasetRef, tmp_path: Path
) -> None:
    rows = rows_of((f"day {number}", f"<call>{number}\t\t") for number in range(30))
    found = look(extended, data, tmp_path / "out", rows)
    assert set(found.new_symbols) == set(NEW)
    assert embeddings_wanted(a_run(extended, data), found)


def test_symbol_that_is_too_rare_in_the_sample_is_not_judged(extended: Path, data: DatasetRef, tmp_path: Path) -> None:
    rows = rows_of((f"day {number}", "<call>" if number < 4 else str(number)) for number in range(30))
    assert look(extended, data, tmp_path / "out", rows).new_symbols == ()


@pytest.mark.parametrize("rows", [dates.mixed_rows(64, seed=7), dates.words_rows(64, seed=7)], ids=["new", "old"])
def test_base_that_has_written_every_symbol_has_no_new_ones(data: DatasetRef, tmp_path: Path, rows: Any) -> None:
    found = look(quick_base(), data, tmp_path / "out", rows)
    assert found.new_symbols == ()
    assert not embeddings_wanted(a_run(quick_base(), data), found)


def a_run(base: Path, data: DatasetRef, **changes: Any) -> RunSpec:
    said = changes.pop("said", "auto")
    return a_train_spec(a_base_ref(base), data, recipe=a_recipe(train_embeddings=said), **changes).run


FOUND = Preflight(5.0, 64, ("{", "}"))
NOTHING = Preflight(5.0, 64, ())
VLLM = (TargetSettings(), TargetSettings(name="live", options={"for": "vllm"}))


@pytest.mark.parametrize(
    ("said", "found", "targets", "trained", "reason"),
    [
        ("auto", FOUND, (TargetSettings(),), True, "the base never writes {, }"),
        ("auto", NOTHING, (TargetSettings(),), False, "can write every symbol"),
        ("auto", FOUND, VLLM, False, "target live cannot serve trained embeddings"),
        ("auto", NOTHING, VLLM, False, "can write every symbol"),
        (True, NOTHING, (TargetSettings(),), True, "recipe.train_embeddings is true"),
        (False, FOUND, (TargetSettings(),), False, "will be learnt badly: {, }"),
        (False, NOTHING, (TargetSettings(),), False, "recipe.train_embeddings is false"),
    ],
)
def test_embeddings_are_chosen_with_a_reason(
    micro: Path, data: DatasetRef, said: Any, found: Preflight, targets: Any, trained: bool, reason: str
) -> None:
    run = a_run(micro, data, said=said, targets=targets)
    choice = choose_embeddings(run, found)
    assert choice.train is embeddings_wanted(run, found) is trained
    assert reason in choice.reason


@pytest.mark.parametrize("has", [True, False])
def test_embeddings_follow_the_adapter_that_a_run_starts_from(
    micro: Path, data: DatasetRef, tmp_path: Path, has: bool
) -> None:
    save_adapter(new_adapter(load_base(micro, CPU), a_recipe(), train_embeddings=has), tmp_path / "start", "base")
    start = AdapterRef(id="ad-7", path=str(tmp_path / "start"), digest="d")
    for found in (FOUND, NOTHING):
        choice = choose_embeddings(a_run(micro, data, start=start), found)
        assert (choice.train, "starts from" in choice.reason) == (has, True)
    if has:
        with pytest.raises(ConfigError, match=r"adapter ad-7 .* target live cannot serve"):
            choose_embeddings(a_run(micro, data, start=start, targets=VLLM), FOUND)


def test_many_new_symbols_are_counted_rather_than_listed(micro: Path, data: DatasetRef) -> None:
    choice = choose_embeddings(a_run(micro, data), Preflight(5.0, 64, tuple("abcdefghij")))
    assert choice.reason == "the base never writes a, b, c, d, e, f, g, h and 2 more"
