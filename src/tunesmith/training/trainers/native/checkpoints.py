"""Checkpoints and the artefact of a training: copied, written beside the training, published whole, thinned out."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunesmith.core.clock import boot_seconds
from tunesmith.core.files import MANIFEST, publish_folder, sha256_text
from tunesmith.models.adapters import num_nonfinite
from tunesmith.profiles.base_model import files_beside_weights, is_whole_model
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.messages import Artifact
from tunesmith.programs.protocol import ARTIFACT, CHECKPOINTS
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.rules.save_schedule import to_remove
from tunesmith.training.trainers.native.optimizer import optimizer_tensors
from tunesmith.training.trainers.native.state import ADAPTER, BEST, SavedState
from tunesmith.training.trainers.native.state_copy import StateCopy, copy_state

_TEMPLATE = "chat_template.jinja"


class CheckpointShelf:
    """The checkpoints of one attempt: best and last stay, and `keep` numbered ones beside them.

    One thread writes, so that a step never waits for a disk. At most one checkpoint is on its way; the next one waits
    for it. What the writer ran into is raised to the training at its next call here.
    """

    def __init__(self, program: Program, best_adapter: Path | None) -> None:
        self._program = program
        self._run = program.train_spec.run
        self.best_adapter = best_adapter
        """Folder of the best adapter so far; inside the checkpoint that this attempt resumed from, at first.
        Settled only after `settle`, as everything below."""
        self._steps: dict[int, Path] = {}
        self._superseded: list[Path] = []
        self._best_step: int | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[float] | None = None
        self._write_s = 0.0

    def save(
        self, state: SavedState, adapted: Any, optimizer: Any, random_tensors: dict[str, Any], kinds: Sequence[str]
    ) -> None:
        """Copy the step that the state stands at, and leave the writing to the writer."""
        self.settle()
        bad = num_nonfinite(adapted)
        if bad:
            raise ProgramFailure(
                ErrorClass.NONFINITE,
                f"{bad} tensors of the adapter hold NaN or infinity after step {state.standing.step}: no checkpoint "
                f"was written; the last good one is {self._last_name()}; lower recipe.lr or recipe.clip",
            )
        memory = {**optimizer_tensors(adapted, optimizer), **random_tensors}
        copy = copy_state(state, adapted, memory, Path(self._run.base.path))
        self._pending = self._writer.submit(self._write, copy, tuple(kinds))

    @property
    def is_writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def settle(self) -> None:
        """Wait until nothing is being written; raises what the writer ran into."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write_s += pending.result()

    def look(self) -> None:
        """Between two steps: raises what the writer ran into, and waits for nothing."""
        if not self.is_writing:
            self.settle()

    def close(self) -> None:
        """The end of the writer; a failure that nobody was told yet is at least logged."""
        try:
            self.settle()
        except Exception as error:  # something else is ending the training, and must not be covered up
            with contextlib.suppress(OSError):
                self._program.log(f"the last checkpoint could not be written: {error}", "error")
        self._writer.shutdown()

    def path_of(self, step: int) -> Path | None:
        """Where this attempt published that step, if it did."""
        return self._steps.get(step)

    def take_write_s(self) -> float:
        """Seconds that were spent on writing, beside the training, since the last call."""
        taken, self._write_s = self._write_s, 0.0
        return taken

    def publish_artifact(self, chat_template: str, meta: dict[str, Any]) -> Artifact:
        """DIR/artifact: the best adapter, with the template it was trained with."""
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
        """In the writer's thread: publish, announce, and only then drop what is no longer kept; how long it took."""
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
        self._thin_out(step)
        if superseded is not None:
            self._superseded.append(superseded)
        return boot_seconds() - began_at

    def _free_name(self, step: int) -> Path:
        """A step saved twice, e.g. because it turned out to be the best, never takes the place of the first one:
        for a moment that would be the only good one, and gone."""
        folder = self._program.dir / CHECKPOINTS
        names = (f"step-{step}" if number == 1 else f"step-{step}-{number}" for number in range(1, 1000))
        return next(folder / name for name in names if not (folder / name).exists())

    def _thin_out(self, last: int) -> None:
        for step in to_remove(self._steps, self._best_step, last, self._run.checkpoints.keep):
            _remove(self._steps.pop(step))
        while self._superseded:  # of an earlier save: its successor has been announced for long
            _remove(self._superseded.pop())

    def _last_name(self) -> str:
        return self._steps[max(self._steps)].name if self._steps else "the one it resumed from, if any"


def _remove(folder: Path) -> None:
    """The manifest goes first: a folder half removed is then no longer a published one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
