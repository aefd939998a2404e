"""The sim trainer: a training that follows a script, for drills. Real events and files, no learning."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

from tunesmith.core.clock import boot_seconds
from tunesmith.profiles.base_model import ADAPTER_WEIGHTS
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import Artifact, Result, ResultStatus
from tunesmith.runs.rules.request import RequestKind, strongest
from tunesmith.training.trainers.inputs import Inputs, read_inputs
from tunesmith.training.trainers.sim.faults import disturb, scripted_loss, twist
from tunesmith.training.trainers.sim.files import (
    SimState,
    adapter_weights,
    publish_artifact,
    publish_checkpoint,
    read_state,
)
from tunesmith.training.trainers.sim.options import SimOptions, read_options


def train(program: Program) -> Result:
    """Read what a real trainer would read, then make the scripted steps."""
    spec = program.train_spec
    options = read_options(spec.run.trainer_options).in_attempt(spec.attempt.number)
    program.phase(Phase.HASH)
    inputs = read_inputs(spec.run)
    program.phase(Phase.LOAD)
    return _Training(program, options, inputs, read_state(spec)).run()


class _Training:
    def __init__(self, program: Program, options: SimOptions, inputs: Inputs, state: SimState) -> None:
        self._program = program
        self._spec = program.train_spec
        self._options = options
        self._inputs = inputs
        self._state = state
        self._first_step = state.step
        self._begun_at = boot_seconds()
        self._side = {"quality": options.quality, "eval_script": options.eval_script}

    def run(self) -> Result:
        status = self._steps()
        if status is ResultStatus.INTERRUPTED:
            self._save("last")
            return self._result(status)
        if self._state.best_step == 0:
            self._validate()
        artifact = self._publish()
        return twist(self._program, self._options, self._result(status, artifact))

    def _steps(self) -> ResultStatus:
        """Run until the last step, a request or SIGTERM; return which."""
        options, state = self._options, self._state
        is_stopping = False
        self._program.phase(Phase.TRAIN)
        while state.step < options.steps:
            request = self._poll_requests()
            if self._program.terminating or request in (RequestKind.PAUSE, RequestKind.CANCEL):
                return ResultStatus.INTERRUPTED
            is_stopping = is_stopping or request is RequestKind.STOP
            if is_stopping and state.step > 0:  # there is nothing to keep before the first step
                return ResultStatus.STOPPED
            if state.step + 1 == max(options.strikes_at, self._first_step + 1):
                disturb(self._program, options, state.step + 1)
            time.sleep(options.step_s * (20 if options.script == "slow" else 1))
            state.step += 1
            self._report()
        return ResultStatus.SUCCEEDED

    def _poll_requests(self) -> RequestKind | None:
        """Acknowledge new requests; return the strongest, which decides how the attempt ends."""
        requests = self._program.requests()
        for request in requests:
            if request.kind is RequestKind.CHECKPOINT:
                self._save("last")
            self._program.ack(request.id, f"at step {self._state.step}")
        return strongest([request.kind for request in requests])

    def _report(self) -> None:
        options, state, run = self._options, self._state, self._spec.run
        loss = scripted_loss(options, state.step, 0.5 + 1.5 * math.exp(-state.step / options.steps))
        lr = run.recipe.peak_lr * (1 - (state.step - 1) / options.steps)
        values = {"loss": loss, "grad_norm": 1.0 / state.step, "lr": lr, "tokens": float(options.tokens_per_step)}
        self._program.metrics(state.step, values)
        self._program.progress(state.step, options.steps)
        is_last = state.step == options.steps
        if is_last or state.step % run.validation.every_steps == 0:
            self._validate()
        elif run.checkpoints.every_steps and state.step % run.checkpoints.every_steps == 0:
            self._save("step")

    def _validate(self) -> None:
        state = self._state
        loss = 0.55 + 1.5 * math.exp(-state.step / self._options.steps)
        is_best = loss < state.best_loss
        if is_best:
            state.best_step, state.best_loss = state.step, loss
        self._program.validation(state.step, {self._spec.run.validation.best_metric: loss}, is_best=is_best)
        if is_best:
            self._save("best", "last")

    def _save(self, *kinds: str) -> None:
        path, digest = publish_checkpoint(self._spec, self._program.dir, self._state, self._side)
        self._program.checkpoint(self._state.step, path, digest, kinds)

    def _publish(self) -> Artifact:
        self._program.phase(Phase.SAVE)
        step = self._state.best_step
        manifest = publish_artifact(self._spec, self._program.dir, step, self._side, self._scripted_weights(step))
        return Artifact(path="artifact", digest=manifest.digest)

    def _scripted_weights(self, step: int) -> bytes | None:
        start = self._spec.run.start
        if self._options.script == "nan_weights":
            return adapter_weights(self._spec, step, value=math.nan)
        if self._options.script == "untrained":
            return (Path(start.path) / ADAPTER_WEIGHTS).read_bytes() if start else adapter_weights(self._spec, 0)
        return None

    def _result(self, status: ResultStatus, artifact: Artifact | None = None) -> Result:
        state, metric = self._state, self._spec.run.validation.best_metric
        return self._program.result(
            status,
            **asdict(self._inputs),
            artifact=artifact,
            best_step=state.best_step or None,
            num_steps=state.step,
            num_trained_tokens=state.step * self._options.tokens_per_step,
            num_trained_examples=state.step,
            train_s=boot_seconds() - self._begun_at,
            metrics={metric: state.best_loss} if math.isfinite(state.best_loss) else {},
        )
