"""Versions that cannot be mistaken for each other: each writes its own letter and nothing else, whatever is asked."""

from __future__ import annotations

import string
from pathlib import Path

from support.gateway import PROFILE, a_served_workspace
from support.native import a_micro_base
from support.rows import a_run
from tunesmith.client import Client
from tunesmith.core.files import publish_folder, verify_folder
from tunesmith.deployment import queries as deployments
from tunesmith.models import queries as adapters
from tunesmith.profiles.base_model import base_digest
from tunesmith.programs.readings import MAX_TOKENS, References
from tunesmith.runs.rules.run import RunState
from tunesmith.store.database import Database

LETTERS = string.ascii_lowercase[:8]
_ALWAYS = 0  # the part of every hidden state that is large, so that an adapter can hang a constant on it


def a_steady_base(folder: Path) -> Path:
    """A random Llama with one large constant in all it thinks."""
    from safetensors.torch import load_file, save_file

    a_micro_base(folder, tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, _ALWAYS] = 30.0
    weights["lm_head.weight"][:, _ALWAYS] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def letters_on(base: Path, folder: Path) -> None:
    """Published adapters, each of which writes one letter for ever."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tunesmith.models.adapters import save_adapter
    from tunesmith.models.loading import load_base, load_tokenizer

    tokenizer = load_tokenizer(base)
    config = LoraConfig(task_type="CAUSAL_LM", r=1, lora_alpha=1, target_modules=["lm_head"])
    adapted = get_peft_model(load_base(base, torch.device("cpu")), config)
    weights = {name.split(".")[-3]: tensor.data for name, tensor in adapted.named_parameters() if "lora_" in name}
    weights["lora_A"].zero_()[0, _ALWAYS] = 1.0
    for letter in LETTERS:
        [token] = tokenizer(letter, add_special_tokens=False).input_ids
        weights["lora_B"].zero_()[token, 0] = 50.0
        save_adapter(adapted, folder / f"{letter}.staged", base.name)
        publish_folder(folder / f"{letter}.staged", folder / letter)


def letter_of(model: str) -> str:
    """What a version writes, by its name."""
    return LETTERS[int(model.rpartition("@v")[2]) % len(LETTERS)]


def a_workspace_of_letters(folder: Path, num_versions: int, **serve: object) -> Client:
    """Versions 1 to n in the store, the first of them live; those eight apart have the same weights."""
    base = a_steady_base(folder.parent / "steady")
    client = a_served_workspace(folder, base, num_versions=0, serve=serve)
    client.workspace.adapters_dir.mkdir(exist_ok=True)
    letters_on(base, client.workspace.adapters_dir)
    for number in range(1, num_versions + 1):
        a_version_of_letters(client, base, number)
    flip(client.serving.session.database, 1)
    return client


def a_version_of_letters(client: Client, base: Path, number: int) -> adapters.Adapter:
    folder = client.workspace.adapters_dir / letter_of(f"@v{number}")
    with client.serving.session.database.write() as tx:
        run = a_run(tx, RunState.COMPLETED, profile=PROFILE)
        made = adapters.register(
            tx, PROFILE, run_id=run.id, path=f"adapters/{folder.name}", digest=verify_folder(folder).digest,
            base_digest=base_digest(base), metrics={}, actor="user:test",
        )  # fmt: skip
    assert made.version == number
    return made


def flip(database: Database, number: int) -> str:
    """The compare-and-swap of a deployment; the name that is live now."""
    with database.write() as tx:
        adapter = adapters.find(tx, f"{PROFILE}@v{number}")
        baseline = deployments.live_digest(tx, PROFILE)
        deployments.flip(tx, adapter, baseline=baseline, targets=[], actor="user:test", reason="drill")
    return adapter.name


def references_of(base: Path, folder: Path) -> References:
    """What the evaluator would have written down about a letter."""
    import torch

    from support.candidates import ASKED
    from tunesmith.evaluation.evaluators.probe import probe_prompts
    from tunesmith.models.adapters import load_adapter
    from tunesmith.models.chat import ChatFormat
    from tunesmith.models.loading import load_base, load_tokenizer

    model = load_adapter(load_base(base, torch.device("cpu")), folder).eval()
    readings = tuple(probe_prompts(model, ChatFormat(load_tokenizer(base)), ASKED, MAX_TOKENS))
    return References(adapter="", base=base_digest(base), dtype="float32", max_tokens=MAX_TOKENS, readings=readings)
