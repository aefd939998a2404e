"""Every trainer by name: ours, and what installed packages add under the entry-point group ``tunesmith.trainers``."""

from __future__ import annotations

from functools import cache

from tunesmith.core.errors import NotFound
from tunesmith.core.plugins import load_plugins
from tunesmith.profiles.profile import HardwareTier, Method
from tunesmith.training.trainers.base import ALL_TIERS, TrainerInfo

GROUP = "tunesmith.trainers"
_OURS = ("python", "-m", "tunesmith.training.trainers.main")
_ALL_METHODS = frozenset({Method.SFT, Method.DPO, Method.ORPO, Method.KTO})
_OUR_METRICS = frozenset({"validation_loss", "validation_reward_accuracy"})
_GPUS = ALL_TIERS - {HardwareTier.CPU}

DRY_RUN_OF = "of"
"""The option of a worker's dry run that names the trainer whose training it stands for."""
TRAINERS: dict[str, TrainerInfo] = {
    "native": TrainerInfo(
        name="native",
        tiers=ALL_TIERS,
        default_tier=HardwareTier.CPU,
        methods=_ALL_METHODS,
        argv=_OURS,
        description="our own LoRA loop over any transformers causal model, on CPU or GPU",
        takes_options=False,
        measures=_OUR_METRICS,
        tunings=frozenset({"lora", "full"}),
        quantizations=frozenset({"none", "nf4"}),
        max_processes=64,
        module="tunesmith.training.trainers.native.train",
    ),
    "trl": TrainerInfo(
        name="trl",
        tiers=ALL_TIERS,
        default_tier=HardwareTier.CPU,
        methods=frozenset({Method.SFT, Method.DPO, Method.ORPO}),
        argv=_OURS,
        description="TRL's trainers with our tokens, checkpoints and endings; needs the trl extra",
        takes_options=False,
        measures=_OUR_METRICS,
        module="tunesmith.training.trainers.trl.train",
    ),
    "unsloth": TrainerInfo(
        name="unsloth",
        tiers=_GPUS,
        default_tier=HardwareTier.CONSUMER_GPU,
        methods=frozenset({Method.SFT, Method.ORPO}),
        argv=_OURS,
        description="unsloth's kernels under TRL's trainers; on CUDA, in an environment of its own",
        takes_options=False,
        measures=_OUR_METRICS,
        module="tunesmith.training.trainers.trl.unsloth",
    ),
    "command": TrainerInfo(
        name="command",
        tiers=ALL_TIERS,
        default_tier=HardwareTier.CPU,
        methods=_ALL_METHODS,
        argv=(),
        description="any program of yours that speaks the protocol: trainer.options.argv",
    ),
    "dry-run": TrainerInfo(
        name="dry-run",
        tiers=ALL_TIERS,
        default_tier=HardwareTier.CPU,
        methods=_ALL_METHODS,
        argv=_OURS,
        description="checks base, start point and dataset as a training would, and trains nothing",
        tunings=frozenset({"lora", "full"}),
        quantizations=frozenset({"none", "nf4"}),
        max_processes=64,
        module="tunesmith.training.trainers.dry_run",
    ),
    "sim": TrainerInfo(
        name="sim",
        tiers=ALL_TIERS,
        default_tier=HardwareTier.CPU,
        methods=_ALL_METHODS,
        argv=_OURS,
        description="a scripted trainer for drills: finishes, fails, stalls, crashes or lies as it is told",
        module="tunesmith.training.trainers.sim.sim",
    ),
}


def find_trainer(name: str) -> TrainerInfo:
    """The trainer of that name; an unknown name lists the nearest known one."""
    known = {**_installed(), **TRAINERS}
    if name not in known:
        raise NotFound.named("trainer", name, known)
    return known[name]


@cache
def _installed() -> dict[str, TrainerInfo]:
    return load_plugins(GROUP, TrainerInfo, "trainer")
