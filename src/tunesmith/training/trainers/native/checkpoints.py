"""Checkpoints and the artefact of a training: copied between steps, written in the background, published, pruned."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.core.clock import boot_seconds
from tunesmith.core.files import MANIFEST, canonical_json, publish_folder, sha256_text
from tunesmith.models.adapters import num_nonfinite, write_tensors
from tunesmith.models.tuned import settings_of, tensors_of, weights_name
from tunesmith.profiles.base_model import files_beside_weights, is_whole_model
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import ARTIFACT, CHECKPOINTS, Artifact
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.rules.save_schedule import steps_to_delete
from tunesmith.training.trainers.native.optimizer import optimizer_tensors
from tunesmith.training.trainers.native.state import ADAPTER, BEST, STATE, TENSORS, SavedState


@dataclass(frozen=True)
class StateCopy:
    """A copy of everything in a checkpoint. It shares no memory with the model, so it can be written later."""

    state: SavedState
    weights: dict[str, Any]
    weights_name: str
    settings: tuple[str, str]
    """Name and content of the config file beside the weights."""
    tensors: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write into a staging folder; publishing makes it durable."""
        (folder / ADAPTER).mkdir()
        write_tensors(folder / ADAPTER / self.weights_name, self.weights)
        name, content = self.settings
        (folder / ADAPTER / name).write_text(content)
        (folder / STATE).write_text(canonical_json(self.state.model_dump(mode="json")))
        write_tensors(folder / TENSORS, self.tensors)


def copy_state(state: SavedState, model: Any, tensors: dict[str, Any], base: Path) -> StateCopy:
    """Copy the state to host memory; the only part of a save that training waits for."""
    return StateCopy(
        state=state,
        weights=tensors_of(model),
        weights_name=weights_name(model),
        settings=settings_of(model, base),
        tensors={name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()},
    )


_TEMPLATE = "chat_template.jinja"


class CheckpointManager:
    """The checkpoints of one attempt: keeps the best, the last and the `keep` newest others.

    One thread writes them, so a step never waits for the disk. At most one checkpoint is being written; the next save
    waits for it. An error of the writer is raised by the next call here.
    """

    def __init__(self, program: Program, best_adapter: Path | None) -> None:
        self._program = program
        self._run = program.train_spec.run
        self.best_adapter = best_adapter
        """Folder of the best adapter so far; inside the checkpoint that this attempt resumed from, at first.
        Valid only after `wait`, as everything below."""
        self._steps: dict[int, Path] = {}
        self._superseded: list[Path] = []
        self._best_step: int | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[float] | None = None
        self._write_s = 0.0

    def save(
        self, state: SavedState, adapted: Any, optimizer: Any, random_tensors: dict[str, Any], kinds: Sequence[str]
    ) -> None:
        """Copy the state of the current step and start writing it in the background."""
        self.wait()
        bad = num_nonfinite(adapted)
        if bad:
            raise ProgramFailure(
                ErrorClass.NONFINITE,
                f"{bad} tensors of the adapter hold NaN or infinity after step {state.standing.step}: no checkpoint "
                f"was written; the last good one is {self._last_name()}; lower recipe.lr or recipe.max_grad_norm",
            )
        tensors = {**optimizer_tensors(adapted, optimizer), **random_tensors}
        copy = copy_state(state, adapted, tensors, Path(self._run.base.path))
        self._pending = self._writer.submit(self._write, copy, tuple(kinds))

    @property
    def is_writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Wait until nothing is being written; raises the writer's error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write_s += pending.result()

    def raise_write_error(self) -> None:
        """Raise the writer's error, if there is one; never waits."""
        if not self.is_writing:
            self.wait()

    def close(self) -> None:
        """Stop the writer; an error that was not raised yet is logged."""
        try:
            self.wait()
        except Exception as error:  # another error may be ending the training, and must not be replaced
            with contextlib.suppress(OSError):
                self._program.log(f"the last checkpoint could not be written: {error}", "error")
        self._writer.shutdown()

    def path_of(self, step: int) -> Path | None:
        """Return the folder of that step's checkpoint, if this attempt published one."""
        return self._steps.get(step)

    def take_write_s(self) -> float:
        """Return the seconds spent writing in the background since the last call."""
        taken, self._write_s = self._write_s, 0.0
        return taken

    def publish_artifact(self, chat_template: str, meta: dict[str, Any]) -> Artifact:
        """Publish DIR/artifact: the best adapter with the chat template it was trained with."""
        if self.best_adapter is None:
            raise ValueError("there is no adapter yet")
        staged, final = self._program.dir / ".staged-artifact", self._program.dir / ARTIFACT
        meta = {**meta, "chat_template_sha256": sha256_text(chat_template)}
        _remove(staged)
        try:
            shutil.copytree(self.best_adapter, staged)
            if is_whole_model(staged):
                for path in files_beside_weights(Path(self._run.base.path)):
                    shutil.copy(path, staged)
            (staged / _TEMPLATE).write_text(chat_template)
            _remove(final)
            return Artifact(path=ARTIFACT, digest=publish_folder(staged, final, meta).digest)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _write(self, copy: StateCopy, kinds: Sequence[str]) -> float:
        """In the writer's thread: publish, announce, and only then prune. Returns the seconds it took."""
        began_at, step = boot_seconds(), copy.state.standing.step
        staged = self._program.dir / f".staged-step-{step}"
        _remove(staged)
        try:
            staged.mkdir(parents=True)
            copy.write(staged)
            if "best" not in kinds and self.best_adapter is not None:
                shutil.copytree(self.best_adapter, staged / BEST)
            final = self._free_name(step)
            manifest = publish_folder(staged, final, {"step": step, "run_id": self._run.run_id})
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        superseded = self._steps.get(step)
        self._steps[step] = final
        if "best" in kinds:
            self.best_adapter, self._best_step = final / ADAPTER, step
        self._program.checkpoint(step, final, manifest.digest, kinds)
        self._prune(step)
        if superseded is not None:
            self._superseded.append(superseded)
        return boot_seconds() - began_at

    def _free_name(self, step: int) -> Path:
        """Return an unused folder name: a step that is saved twice must not replace its first checkpoint, which may be
        the only good one while it is being replaced."""
        folder = self._program.dir / CHECKPOINTS
        names = (f"step-{step}" if number == 1 else f"step-{step}-{number}" for number in range(1, 1000))
        return next(folder / name for name in names if not (folder / name).exists())

    def _prune(self, last: int) -> None:
        for step in steps_to_delete(self._steps, self._best_step, last, self._run.checkpoints.keep):
            _remove(self._steps.pop(step))
        while self._superseded:  # of an earlier save, whose successor was announced before
            _remove(self._superseded.pop())

    def _last_name(self) -> str:
        return self._steps[max(self._steps)].name if self._steps else "the one it resumed from, if any"


def _remove(folder: Path) -> None:
    """Remove a folder, its manifest first, so that a half-removed folder does not count as published."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
