"""Checkpoints and the artefact of a training: staged, published whole, announced, and thinned out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.domain.program import Artifact
from tunesmith.domain.task import ErrorClass
from tunesmith.files import MANIFEST, publish_folder, sha256_text
from tunesmith.modeling.adapters import num_nonfinite, save_adapter
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import ARTIFACT, CHECKPOINTS
from tunesmith.trainers.native.state import ADAPTER, BEST, SavedState, write_state

_TEMPLATE = "chat_template.jinja"


class CheckpointShelf:
    """The checkpoints of one attempt: best and last stay, and `keep` numbered ones beside them."""

    def __init__(self, program: Program, best_adapter: Path | None) -> None:
        self._program = program
        self._run = program.train_spec.run
        self.best_adapter = best_adapter
        """Folder of the best adapter so far; inside the checkpoint that this attempt resumed from, at first."""
        self._steps: dict[int, Path] = {}

    def path_of(self, step: int) -> Path | None:
        """Where this attempt published that step, if it did."""
        return self._steps.get(step)

    def save(self, state: SavedState, adapted: Any, optimizer: Any, kinds: Sequence[str]) -> Path:
        """Publish the step that the state stands at, announce it, and drop what is no longer kept."""
        step = state.standing.step
        bad = num_nonfinite(adapted)
        if bad:
            raise ProgramFailure(
                ErrorClass.NONFINITE,
                f"{bad} tensors of the adapter hold NaN or infinity after step {step}: no checkpoint was written; "
                f"the last good one is {self._last_name()}; lower recipe.lr or recipe.clip",
            )
        staged = _fresh(self._program.dir / f".staged-step-{step}")
        try:
            save_adapter(adapted, staged / ADAPTER, Path(self._run.base.path).name)
            if "best" not in kinds and self.best_adapter is not None:
                shutil.copytree(self.best_adapter, staged / BEST)
            write_state(staged, state, adapted, optimizer)
            final = self._program.dir / CHECKPOINTS / f"step-{step}"
            _remove(final)
            manifest = publish_folder(staged, final, {"step": step, "run_id": self._run.run_id})
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        self._steps[step] = final
        if "best" in kinds:
            self.best_adapter = final / ADAPTER
        self._program.checkpoint(step, final, manifest.digest, kinds)
        self._thin_out()
        return final

    def publish_artifact(self, chat_template: str, meta: dict[str, Any]) -> Artifact:
        """DIR/artifact: the best adapter, with the template it was trained with."""
        if self.best_adapter is None:
            raise ValueError("there is no adapter yet")
        staged, final = self._program.dir / ".staged-artifact", self._program.dir / ARTIFACT
        meta = {**meta, "chat_template_sha256": sha256_text(chat_template)}
        _remove(staged)
        try:
            shutil.copytree(self.best_adapter, staged)
            (staged / _TEMPLATE).write_text(chat_template)
            _remove(final)
            return Artifact(path=ARTIFACT, digest=publish_folder(staged, final, meta).digest)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _thin_out(self) -> None:
        last = max(self._steps)
        best = self.best_adapter.parent if self.best_adapter else None
        numbered = sorted(step for step, path in self._steps.items() if step != last and path != best)
        for step in numbered[: max(0, len(numbered) - self._run.checkpoints.keep)]:
            _remove(self._steps.pop(step))

    def _last_name(self) -> str:
        return f"step-{max(self._steps)}" if self._steps else "the one it resumed from, if any"


def _fresh(folder: Path) -> Path:
    _remove(folder)
    folder.mkdir(parents=True)
    return folder


def _remove(folder: Path) -> None:
    """The manifest goes first: a folder half removed is then no longer a published one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
