"""The loop without queue, store or worker: prepare → train → evaluate → gate → deploy, then again with bad data.

    python examples/minimal_loop.py [FOLDER]

Read this first. The product does the same with leases, retries, checkpoints, containment and history around it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tunesmith.core.files import publish_folder
from tunesmith.datasets.example import Example, Split
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.reading import read_split
from tunesmith.datasets.report import PrepareOptions
from tunesmith.demo import dates
from tunesmith.demo.base_model import cached_base
from tunesmith.evaluation.evaluators import heldout_loss
from tunesmith.evaluation.rules.comparison import compare
from tunesmith.evaluation.rules.gate import Decision, Verdict, decide
from tunesmith.models.adapters import load_adapter, new_adapter, save_adapter
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.loading import load_base, load_tokenizer, pick_device
from tunesmith.models.packs import Packer, single
from tunesmith.models.scoring import TransformersBackend, batches_by_count, mean_nlls
from tunesmith.profiles.profile import Recipe
from tunesmith.profiles.sections.evaluation import GateSettings
from tunesmith.programs.protocol import CaseScore
from tunesmith.training.rules.memory_plan import UNPLANNED_PACK_TOKENS
from tunesmith.training.trainers.native.batch_sampler import BatchSampler
from tunesmith.training.trainers.native.distributed import TrainingGroup
from tunesmith.training.trainers.native.objectives import Sft
from tunesmith.training.trainers.native.optimizer import new_optimizer
from tunesmith.training.trainers.native.step import TrainStep

RECIPE = Recipe(
    lr=3e-3, lora_rank=8, lora_dropout=0.0, batch_tokens=1536, max_steps=30, epochs=50, train_embeddings=True
)
LOSS = heldout_loss.EVALUATOR.metrics[0]
GATE = GateSettings(min_cases=20)


@dataclass
class Loop:
    """One model under improvement: a base, what is live, and the cases it is judged on."""

    base: Path
    root: Path
    live: Path | None = None
    version: int = 0
    pool: dict[str, Example] = field(default_factory=dict)
    """Held-out cases by prompt, over all rounds; the first answer to a prompt stays the reference."""

    def round(self, jsonl: Path) -> Verdict:
        """One turn of the loop. The live adapter moves only if the gate says so."""
        self.version += 1
        data = self.root / f"data-{self.version}"
        prepare([jsonl], data, PrepareOptions())  # validated by line, split by hash of the prompt, fingerprinted
        candidate = self.train(read_split(data, Split.TRAIN))
        for example in read_split(data, Split.HELDOUT):
            self.pool.setdefault(example.group, example)
        verdict = self.judge(candidate)
        if verdict.decision is Decision.PROMOTE:
            self.deploy(candidate)
        return verdict

    def train(self, examples: list[Example]) -> Path:
        """LoRA on the base: token-weighted loss over the assistant's tokens, clipped, AdamW with warm-up."""
        torch.manual_seed(RECIPE.seed)
        chat = self.chat()
        items = [single(chat.tokenize(example.id, example.messages)) for example in examples]
        adapted = new_adapter(load_base(self.base, pick_device()), RECIPE)
        order = BatchSampler(
            [len(item) for item in items],
            seed=RECIPE.seed,
            epochs=RECIPE.epochs,
            batch_tokens=RECIPE.batch_tokens,
            max_steps=RECIPE.max_steps,
        )
        packer = Packer(UNPLANNED_PACK_TOKENS, chat.pad_id, is_packing=True)
        train_step = TrainStep(
            TransformersBackend(adapted), new_optimizer(adapted, RECIPE), RECIPE, packer, Sft(), TrainingGroup()
        )
        for step in range(order.num_steps):
            batch = [items[index] for index in order.batch(step).indices]
            made = train_step.run(step, order.num_steps, batch)
            made.raise_if_nonfinite(step)  # NaN never becomes an adapter
            if step % 10 == 0:
                print(f"  step {step:3d}  loss {made.loss:.3f}")
        return self.publish(adapted)

    def publish(self, adapted: object) -> Path:
        """Whole or absent: staged, hashed, renamed. A version's name is never reused."""
        staged, final = self.root / ".staged", self.root / f"v{self.version}"
        save_adapter(adapted, staged, self.base.name)
        publish_folder(staged, final)
        return final

    def judge(self, candidate: Path) -> Verdict:
        """Candidate and what is live on the same held-out cases, paired; the gate fails closed."""
        chat = self.chat()
        cases = [chat.tokenize(example.id, example.messages, final_only=True) for example in self.pool.values()]
        scores = {"candidate": self.score(cases, candidate), "baseline": self.score(cases, self.live)}
        report = compare(
            [case.id for case in cases],
            scores,
            (LOSS,),
            primary=LOSS,
            confidence=GATE.confidence,
            seed=1,
        )
        return decide(report, GATE, (LOSS.name,))

    def score(self, cases: list[Tokenized], adapter: Path | None) -> list[CaseScore]:
        model = load_base(self.base, pick_device())
        if adapter is not None:
            model = load_adapter(model, adapter)
        batches = batches_by_count([len(case) for case in cases], 32)
        losses = mean_nlls(model, cases, self.chat().pad_id, batches)
        assert losses is not None
        return [
            CaseScore(case_id=case.id, values={"heldout_loss": loss}) for case, loss in zip(cases, losses, strict=True)
        ]

    def deploy(self, candidate: Path) -> None:
        """One link moves in one step: readers see the old version or the new one, never neither."""
        link = self.root / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(candidate.name)
        os.replace(link, self.root / "current")
        self.live = candidate

    def chat(self) -> ChatFormat:
        return ChatFormat(load_tokenizer(self.base))


def main(root: Path) -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunesmith"
    loop = Loop(cached_base(cache, quick=True), root)
    rows = dates.mixed_rows(500, seed=7)
    expected = {"good": Decision.PROMOTE, "shuffled": Decision.REJECT}
    for name, content in (("good", rows), ("shuffled", dates.shuffled_answers(rows, seed=8))):
        jsonl = root / f"{name}.jsonl"
        jsonl.write_text("".join(json.dumps(row) + "\n" for row in content))
        print(f"{name} answers:")
        verdict = loop.round(jsonl)
        print(f"  {verdict.decision}: {'; '.join(verdict.reasons)}")
        if verdict.decision is not expected[name]:
            return 1
    print(f"live: {os.readlink(root / 'current')}")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(main(folder))
