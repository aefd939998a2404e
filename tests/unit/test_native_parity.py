"""The native trainer's arithmetic beside TRL's: same batch, same weights, same loss and gradients to 1e-5 in fp32."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from support.native import a_micro_base, a_recipe
from tunesmith.models.adapters import new_adapter, trained_parameters
from tunesmith.models.chat import Tokenized
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.models.packs import Item, Packer, single, with_shared_prompt
from tunesmith.models.scoring import TransformersBackend, answer_log_probs, evaluating, span_log_probs
from tunesmith.profiles.profile import Method
from tunesmith.training.trainers.native.objectives import kl_partners, loss_denominators, objective_of

CPU = torch.device("cpu")
PAD = 0
PROMPTS = ["what is two and two?", "hello", "a longer question about nothing in particular", "name a colour"]
GOOD = ["four", "good day to you", "there is nothing to say about nothing", "blue"]
BAD = ["five, or perhaps six", "what?", "no", "seven"]
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl is not installed: pip install 'tunesmith[trl]'"
)
PACKERS = {
    "packed in one": Packer(100_000, PAD, is_packing=True),
    "packed in several": Packer(80, PAD, is_packing=True),
    "one by one": Packer(1, PAD, is_packing=True),
    "padded": Packer(100_000, PAD, is_packing=False),
    "padded in several": Packer(150, PAD, is_packing=False),
}


class Bench:
    """A tiny base with an adapter that is no longer where it started, as after some training."""

    def __init__(self, folder: Path) -> None:
        self.folder = a_micro_base(folder)
        torch.manual_seed(3)
        self.recipe = a_recipe(lora_dropout=0.0, lora_rank=4, desirable_weight=1.3, undesirable_weight=0.7)
        self.adapted = new_adapter(load_base(self.folder, CPU), self.recipe)
        for name, tensor in self.adapted.named_parameters():  # a random base says almost the same whatever it reads
            if "lora_" not in name and tensor.dim() > 1:
                tensor.data *= 8
        self.start = copy.deepcopy(self.adapted)
        with torch.no_grad():
            for _, tensor in trained_parameters(self.adapted):
                tensor.add_(0.05 * torch.randn_like(tensor))

    def ours(self, method: Method, items: Sequence[Item], packer: Packer) -> tuple[float, dict[str, Any]]:
        """A step's loss and gradients, pass by pass, as the step maker sums them."""
        kl_items = kl_partners(items) if method is Method.KTO else {}
        reference = answer_log_probs(TransformersBackend(self.start), [*items, *kl_items.values()], packer)
        assert reference is not None
        objective = objective_of(method, self.recipe, reference, kl_items)
        weights = loss_denominators(items)

        def score(some: Sequence[Item]) -> dict[str, list[float]]:
            found = answer_log_probs(TransformersBackend(self.adapted), some, packer)
            assert found is not None
            return found

        kl_estimate = objective.kl_estimate(items, score)
        self.adapted.zero_grad(set_to_none=True)
        total = 0.0
        for group in packer.groups(items):
            some = [items[index] for index in group]
            terms = objective.terms(some, span_log_probs(self.adapted, packer.micro_batch(some)), weights, kl_estimate)
            terms.loss.backward()
            total += float(terms.loss.detach())
        return total, {name: tensor.grad.clone() for name, tensor in trained_parameters(self.adapted)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("base"))


def encoded(text: str) -> list[int]:
    return [7 + ord(character) % 90 for character in text]


def conversation(name: str, prompt: str, answer: str) -> Tokenized:
    head, tail = encoded(prompt), [*encoded(answer), 2]
    return Tokenized(name, (1, *head, *tail), (False,) * (1 + len(head)) + (True,) * len(tail))


def items_of(method: Method, nll: str = "conversation") -> list[Item]:
    good = [conversation(f"g{n}", *pair) for n, pair in enumerate(zip(PROMPTS, GOOD, strict=True))]
    bad = [conversation(f"b{n}", *pair) for n, pair in enumerate(zip(PROMPTS, BAD, strict=True))]
    match method:
        case Method.SFT:
            return [single(one) for one in good]
        case Method.KTO:
            labels = (True, False, True, False)
            some = [good[0], bad[1], good[2], bad[3]]
            return [with_shared_prompt(one.id, [one], [label]) for one, label in zip(some, labels, strict=True)]
        case _:
            context = method is Method.ORPO and nll == "conversation"
            return [
                with_shared_prompt(f"p{n}", pair, (True, False), counts_context=context)
                for n, pair in enumerate(zip(good, bad, strict=True))
            ]


def assert_same(
    ours: tuple[float, dict[str, Any]], theirs: tuple[float, dict[str, Any]], tolerance: float = 1e-5
) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance, abs=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(tensor.abs().max()) for tensor in theirs[1].values())
    assert largest > 1e-4, "nothing to compare"
    for name, tensor in theirs[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=0.0, atol=tolerance * max(1.0, largest), msg=name)


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("method", [Method.SFT, Method.DPO, Method.ORPO, Method.KTO])
def test_step_is_the_same_however_it_is_packed_shared_or_accumulated(bench: Bench, method: Method, packer: str) -> None:
    items = items_of(method)
    apart = [Item(item.id, (), tuple(_whole(item, n) for n in range(len(item.completions))), item.counts_context)
             for item in items]  # fmt: skip
    alone = Packer(1, PAD, is_packing=False)
    expected = bench.ours(method, apart if method is not Method.KTO else items, alone)
    assert_same(bench.ours(method, items, PACKERS[packer]), expected)


def _whole(item: Item, number: int) -> Any:
    """An answer with the prompt in front, so that nothing is shared."""
    completion = item.completions[number]
    return type(completion)(
        item.prompt + completion.ids, (False,) * len(item.prompt) + completion.loss_mask, completion.is_chosen
    )


def test_examples_in_one_pack_do_not_see_each_other(bench: Bench) -> None:
    first, *others = items_of(Method.DPO)
    batch = Packer(100_000, PAD, is_packing=True).micro_batch
    with evaluating(bench.adapted):
        alone = span_log_probs(bench.adapted, batch([first]))
        for company in ([*others], [others[0]], [others[1], others[1]]):
            together = span_log_probs(bench.adapted, batch([*company, first]))[-3:]
            torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)


@needs_trl
@pytest.mark.parametrize("method", [Method.SFT, Method.DPO, Method.ORPO, Method.KTO])
def test_loss_and_gradients_agree_with_trl(bench: Bench, method: Method, tmp_path: Path) -> None:
    items = items_of(method)
    theirs = THEIRS[method](bench, items, tmp_path)
    for packer in PACKERS.values():
        assert_same(bench.ours(method, items, packer), theirs)


def _settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": len(PROMPTS),
        **more,
    }


def _padded(rows: list[list[int]], value: int) -> Any:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _rows(items: Sequence[Item]) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of every answer, first answers first."""
    num = len(items[0].completions)
    return [(list(item.prompt), list(item.completions[n].ids)) for n in range(num) for item in items]


def _as_batch(rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    whole = [prompt + answer for prompt, answer in rows]
    return {
        "input_ids": _padded(whole, PAD),
        "attention_mask": _padded([[1] * len(row) for row in whole], 0),
        "completion_mask": _padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows], 0),
    }


def _texts(bench: Bench, **columns: list[Any]) -> dict[str, Any]:
    from datasets import Dataset

    return {"train_dataset": Dataset.from_dict(columns), "processing_class": load_tokenizer(bench.folder)}


def _trl_model(bench: Bench) -> Any:
    model = copy.deepcopy(bench.adapted)
    model.train()
    return model


def _measured(model: Any, loss: Any) -> tuple[float, dict[str, Any]]:
    loss.backward()
    return float(loss.detach()), {name: tensor.grad.clone() for name, tensor in trained_parameters(model)}


def _trl_sft(bench: Bench, items: Sequence[Item], tmp_path: Path) -> tuple[float, dict[str, Any]]:
    from trl import SFTConfig, SFTTrainer

    model = _trl_model(bench)
    rows = [(list(item.completions[0].ids), list(item.completions[0].loss_mask)) for item in items]
    data = {
        "input_ids": [ids for ids, _ in rows],
        "labels": [[i if t else -100 for i, t in zip(ids, trained, strict=True)] for ids, trained in rows],
    }
    trainer = SFTTrainer(model, args=SFTConfig(**_settings(tmp_path, max_length=None)), **_texts(bench, **data))
    batch = trainer.data_collator([dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)])
    num = sum(item.num_trained for item in items)
    return _measured(model, trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(num)))


def _trl_dpo(bench: Bench, items: Sequence[Item], tmp_path: Path) -> tuple[float, dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    model = _trl_model(bench)
    texts = _texts(bench, prompt=PROMPTS, chosen=GOOD, rejected=BAD)
    trainer = DPOTrainer(model, args=DPOConfig(**_settings(tmp_path, beta=bench.recipe.beta)), **texts)
    _put_start(trainer.model, bench)
    return _measured(model, trainer.compute_loss(trainer.model, _as_batch(_rows(items))))


def _trl_kto(bench: Bench, items: Sequence[Item], tmp_path: Path) -> tuple[float, dict[str, Any]]:
    from trl import KTOConfig, KTOTrainer

    model = _trl_model(bench)
    labels = [item.completions[0].is_chosen for item in items]
    texts = _texts(bench, prompt=PROMPTS, completion=GOOD, label=labels)
    recipe = bench.recipe
    weights = {"desirable_weight": recipe.desirable_weight, "undesirable_weight": recipe.undesirable_weight}
    trainer = KTOTrainer(model, args=KTOConfig(**_settings(tmp_path, beta=recipe.beta, **weights)), **texts)
    _put_start(trainer.model, bench)
    partners = list(kl_partners(items).values())
    drift = {f"KL_{name}": value for name, value in _as_batch(_rows(partners)).items()}
    batch = {**_as_batch(_rows(items)), **drift, "label": torch.tensor(labels)}
    return _measured(model, trainer.compute_loss(trainer.model, batch))


def _put_start(model: Any, bench: Bench) -> None:
    """TRL keeps a copy of an adapter that it is given as the reference; ours is the one that training started from."""
    if "ref" not in model.peft_config:
        return
    own = dict(bench.start.named_parameters())
    for name, tensor in model.named_parameters():
        if ".ref." in name:
            tensor.data.copy_(own[name.replace(".ref.", ".default.")])


def _trl_orpo(bench: Bench, items: Sequence[Item], tmp_path: Path) -> tuple[float, dict[str, Any]]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = _trl_model(bench)
    texts = _texts(bench, prompt=PROMPTS, chosen=GOOD, rejected=BAD)
    trainer = ORPOTrainer(model, args=ORPOConfig(**_settings(tmp_path, beta=bench.recipe.beta)), **texts)
    rows = _rows(items)
    batch: dict[str, Any] = {}
    for name, some in (("chosen", rows[: len(items)]), ("rejected", rows[len(items) :])):
        made = _as_batch(some)
        batch |= {f"{name}_input_ids": made["input_ids"], f"{name}_attention_mask": made["attention_mask"]}
        batch[f"{name}_labels"] = made["input_ids"].masked_fill(made["completion_mask"] == 0, -100)
    loss, _ = trainer.get_batch_loss_metrics(trainer.model, batch)
    return _measured(model, loss)


Theirs = Callable[[Bench, Sequence[Item], Path], tuple[float, dict[str, Any]]]
THEIRS: dict[Method, Theirs] = {
    Method.SFT: _trl_sft,
    Method.DPO: _trl_dpo,
    Method.ORPO: _trl_orpo,
    Method.KTO: _trl_kto,
}
