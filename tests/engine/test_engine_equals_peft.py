"""One pass for rows of many adapters gives each row what transformers and peft give it alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine import KINDS, a_lively_base, an_adapter, asking
from tunesmith.models.adapter_weights import AdapterReader
from tunesmith.models.adapters import load_adapter
from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import stop_ids
from tunesmith.models.loading import load_base, load_tokenizer
from tunesmith.serving.engine.lora_layers import LoraLayers
from tunesmith.serving.engine.scheduler import Scheduler
from tunesmith.serving.engine.sequence_state import EngineRefusal, SequenceState
from tunesmith.serving.engine.tokenization import PromptTokenizer

CPU = torch.device("cpu")
# what peft says about merging and shards, which nobody does here
pytestmark = [
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True"),
]


class Collected:
    """Hears what becomes of rows."""

    def __init__(self) -> None:
        self.finished: dict[str, str] = {}
        self.refused: dict[str, EngineRefusal] = {}

    def delta(self, row: SequenceState, text: str, tokens: Any) -> None:
        pass

    def ended(self, row: SequenceState, finish: str) -> None:
        self.finished[row.id] = finish

    def failed(self, row: SequenceState, refusal: EngineRefusal) -> None:
        self.refused[row.id] = refusal


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / request.param
    return a_lively_base(folder, tied=request.param == "tied")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {kind: an_adapter(base, folder / kind, kind, seed=number).path for number, kind in enumerate(KINDS)}


@cache
def reference(base: Path, folder: Path | None) -> Any:
    """As transformers and peft load it, without any of our code for serving."""
    model = load_base(base, CPU)
    return model if folder is None else load_adapter(model, folder)


def alone(base: Path, folder: Path | None, prompt: tuple[int, ...], num: int) -> list[int]:
    """What it writes greedily."""
    model = reference(base, folder)
    stops = sorted(stop_ids(reference(base, None), ChatFormat(load_tokenizer(base))))
    made = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=num, do_sample=False, eos_token_id=stops)
    return list(made[0, len(prompt) :].tolist())


def test_mixed_rows_joining_and_leaving_at_random_equal_peft_alone(base: Path, adapters: dict[str, Path]) -> None:
    model = load_base(base, CPU)
    lora_layers, reader = LoraLayers(model), AdapterReader(model)
    for kind, folder in adapters.items():
        lora_layers.add(kind, reader.read(folder))
    tokenizer = PromptTokenizer(base, model, 256)
    scheduler, heard, luck = Scheduler(model, lora_layers, tokenizer.pad_id, 7), Collected(), random.Random(5)
    rows: list[SequenceState] = []
    with torch.inference_mode():
        while len(rows) < 30 or not scheduler.is_idle:
            if len(rows) < 30 and luck.random() < 0.4:
                kind = luck.choice([None, *adapters])
                asked = asking(
                    "".join(luck.choices("abcdefg ", k=luck.randint(1, 40))), kind, max_tokens=luck.randint(1, 24)
                )
                row = SequenceState.of(asked, tokenizer.prompt_of(asked), 256, tokenizer, heard)
                row.id = str(len(rows))
                rows.append(row)
                scheduler.waiting.append(row)
            if rows and luck.random() < 0.03:
                scheduler.remove(luck.choice(rows).id)
            scheduler.step()
    assert not heard.refused
    assert lora_layers.supports_mixed_batch
    for row in rows:
        expected = alone(base, None if row.adapter is None else adapters[row.adapter], row.prompt, row.max_new)
        assert row.ids == (expected if row.id in heard.finished else expected[: len(row.ids)]), row.adapter
    said = {tuple(row.ids) for row in rows}
    assert len(said) > 20, "rows that all say the same prove nothing"
