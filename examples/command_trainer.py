"""A trainer of your own in sixty lines, for `trainer.kind: command`. README.md says how a profile uses it.

What it learns is a toy: by gradient descent, numbers that stand for the dataset go into one LoRA matrix. The rest is
what any trainer does: check what it was given, make steps and tell about them, save, hear wishes, end with a result.
"""

import hashlib
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tunesmith.core.files import publish_folder, verify_folder
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, host
from tunesmith.programs.protocol import Artifact, Result, ResultStatus
from tunesmith.training.trainers.inputs import read_inputs
from tunesmith.training.trainers.sim.files import safetensors_bytes

LAYER, RANK, LR = "base_model.model.model.layers.0.self_attn.q_proj", 2, 0.1
ENDINGS = {"stop": ResultStatus.STOPPED, "pause": ResultStatus.INTERRUPTED, "cancel": ResultStatus.INTERRUPTED}


def train(program: Program) -> Result:
    spec, run = program.train_spec, program.train_spec.run
    program.phase(Phase.HASH)
    inputs = asdict(read_inputs(run))  # digests of base, start and data, recomputed from the bytes
    state = {"step": 0, "learnt": [0.0] * (RANK * run.base.lock.hidden_size)}
    if spec.resume is not None:
        verify_folder(Path(spec.resume.path), spec.resume.digest)
        state = json.loads((Path(spec.resume.path) / "state.json").read_bytes())
    size, num_steps = len(state["learnt"]), run.recipe.max_steps or 20
    wanted = [byte / 2550 for byte in hashlib.shake_256(run.dataset.fingerprint.encode()).digest(size)]
    program.phase(Phase.TRAIN)
    status = ResultStatus.SUCCEEDED
    while status is ResultStatus.SUCCEEDED and state["step"] < num_steps:
        time.sleep(0.05)  # a real step takes its time too
        gaps = [want - have for want, have in zip(wanted, state["learnt"], strict=True)]
        state = {"step": state["step"] + 1, "learnt": [w - (1 - LR) * gap for w, gap in zip(wanted, gaps, strict=True)]}
        step, loss = state["step"], sum(gap * gap for gap in gaps) / size
        program.metrics(step, {"loss": loss, "grad_norm": 2 * loss**0.5, "lr": LR, "tokens": float(step * size)})
        program.progress(step, num_steps)
        wishes = program.requests()
        if step % run.validation.every_steps == 0 or step == num_steps:
            program.validation(step, {run.validation.best_metric: loss}, is_best=True)
        if step % 50 == 0 or step == num_steps or wishes or program.terminating:
            staged = write_adapter(program.dir / ".staged", state, "adapter")
            (staged / "state.json").write_text(json.dumps(state))
            final = program.dir / "checkpoints" / f"step-{step}"
            program.checkpoint(step, final, publish_folder(staged, final).digest, ["best", "last"])
        for wish in wishes:
            status = ENDINGS.get(wish.kind.value, status)
            program.ack(wish.id, f"at step {step}")
        status = ResultStatus.INTERRUPTED if program.terminating else status
    done = {"num_steps": state["step"], "num_trained_tokens": state["step"] * size, "best_step": state["step"]}
    if status is ResultStatus.INTERRUPTED:
        return program.result(status, **inputs, **done)
    digest = publish_folder(write_adapter(program.dir / ".staged", state), program.dir / "artifact").digest
    return program.result(status, **inputs, **done, artifact=Artifact(path="artifact", digest=digest))


def write_adapter(folder: Path, state: dict, below: str = "") -> Path:
    """A LoRA adapter as PEFT and every server read it: a config and safetensors."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / below).mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
    }
    (folder / below / "adapter_config.json").write_text(json.dumps(config))
    width = len(state["learnt"]) // RANK
    ones = [1.0 / width] * (RANK * width)
    weights = {
        f"{LAYER}.lora_A.weight": ([RANK, width], ones),
        f"{LAYER}.lora_B.weight": ([width, RANK], state["learnt"]),
    }
    (folder / below / "adapter_model.safetensors").write_bytes(safetensors_bytes(weights))
    return folder


if __name__ == "__main__":
    sys.exit(host(train))
