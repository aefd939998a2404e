"""The unsloth trainer: unsloth loads the base and makes the adapter, everything else is as in the trl trainer.

unsloth wants CUDA and other versions of the core packages than ours, so it lives in an environment of its own, and
what follows its import could not be run where this was written: that part is kept as thin as it can be.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from tunesmith.core.errors import ConfigError
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import Result
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import RunSpec
from tunesmith.training.trainers.trl.train import Look, train_with


def train(program: Program) -> Result:
    """Entry point, called by `tunesmith.training.trainers.main`."""
    run = program.train_spec.run
    _refuse_what_it_cannot_do(run)
    _import_first()
    return train_with(program, _fast_model)


def _refuse_what_it_cannot_do(run: RunSpec) -> None:
    if run.start is not None:
        raise ConfigError("trainer unsloth starts from the base only; submit with --start base, or use trainer trl")
    if run.recipe.dora:
        raise ConfigError("recipe.dora: trainer unsloth has no kernels for it; turn it off, or use trainer trl")
    if run.recipe.train_embeddings is True:
        raise ConfigError("recipe.train_embeddings: trainer unsloth does not train them here; use trainer trl")


def _import_first() -> None:
    """It patches transformers, peft and trl, so it must be imported before them."""
    hint = "use trainer trl or native here"
    if importlib.util.find_spec("unsloth") is None:
        raise ProgramFailure(
            ErrorClass.CONFIG,
            "trainer unsloth needs unsloth, which is not installed here; it needs an environment of its own with CUDA "
            f"(pip install unsloth); {hint}",
        )
    try:
        import unsloth  # noqa: F401
    except Exception as error:  # it raises whatever it likes where there is no GPU
        reason = " ".join(str(error).split())[:200]
        raise ProgramFailure(ErrorClass.CONFIG, f"unsloth cannot be imported here ({reason}); {hint}") from None
    import torch

    if not torch.cuda.is_available():
        raise ProgramFailure(ErrorClass.CONFIG, f"trainer unsloth needs CUDA, and there is none; {hint}")


def _fast_model(run: RunSpec, look: Look) -> Any:
    """unsloth's own loading and adapter, from local safetensors only, in the precision of the base."""
    from unsloth import FastLanguageModel

    recipe = run.recipe
    model, _ = FastLanguageModel.from_pretrained(
        model_name=run.base.path,
        max_seq_length=min(recipe.max_length, run.base.context),
        load_in_4bit=False,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    if look(model):
        raise ConfigError(
            "recipe.train_embeddings: this data needs trained embeddings, which trainer unsloth does not do here; "
            "use trainer trl, or set it to false"
        )
    return FastLanguageModel.get_peft_model(
        model,
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=recipe.target_modules if isinstance(recipe.target_modules, str) else [*recipe.target_modules],
        use_rslora=recipe.rslora,
        random_state=recipe.seed,
        use_gradient_checkpointing="unsloth",
    )
