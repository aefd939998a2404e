"""Options of the `llamacpp` target, and the GGUF that is made of an adapter for it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pydantic import Field, model_validator

from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.targets.adapter_files import folder_refusal
from tunesmith.deployment.targets.alias import StateFile, verified
from tunesmith.deployment.targets.base import ServedAdapter
from tunesmith.deployment.targets.gguf_adapter import convert, read_base
from tunesmith.deployment.targets.llamacpp.processes import HeldAdapter
from tunesmith.deployment.targets.options import TargetOptions, Text, Url, Variable

_OURS = frozenset({"-m", "--model", "--host", "--port", "--api-key", "--api-key-file", "--cache-ram", "-cram"})
_OURS |= {"--slots", "--no-slots", "--lora", "--lora-scaled", "--lora-init-without-apply"}
"""Arguments that the target sets itself."""
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""llama.cpp cuts unlikely tokens by default; a request that does not ask for it gets what other servers give."""


class LlamacppOptions(TargetOptions):
    model: Text
    """The base as GGUF: a path, from the workspace or absolute."""
    start: tuple[Text, ...] = ()
    """llama-server and its own arguments; model, adapters, host, port and key are added here."""
    max_processes: int = Field(default=3, ge=2, le=64)
    """Most processes at once: the live version, the next one, and others that are asked for by their exact names."""
    url: Url | None = None
    """Instead: a server that somebody else runs; then only adapters that it was started with."""
    key_env: Variable | None = None
    """With url: name of the environment variable with its API key."""

    @model_validator(mode="after")
    def _one_way(self) -> LlamacppOptions:
        if bool(self.start) == (self.url is not None):
            raise ValueError("give start (we run llama-server) or url (somebody else does)")
        if self.key_env is not None and self.url is None:
            raise ValueError("key_env: only with url; a server that we start gets a key of its own")
        taken = [word for word in self.start if word.partition("=")[0] in _OURS]
        if taken:
            raise ValueError(f"start: {taken[0]} is set by tunesmith; remove it")
        return self


class Converted:
    """The adapter's GGUF, made once beside the state file and trusted only by its hash."""

    def __init__(self, options: LlamacppOptions, root: Path, profile: str) -> None:
        self.options, self.root, self.profile = options, root, profile
        self.model = (root / Path(options.model).expanduser()).resolve()
        which = f"{options.url or ' '.join(options.start)} {self.model}"
        self.file = StateFile.at(root, profile, "llamacpp", which)
        self.folder = self.file.path.with_suffix("")

    def refusal(self, adapter: ServedAdapter) -> str | None:
        known = folder_refusal(adapter, "llamacpp", {})
        if known is not None:
            return known
        try:
            base = read_base(self.model)
            if base.is_quantized and self.options.quantization is None:
                held = base.file_type
                return (
                    f"{self.model.name} holds its weights in {held}, so answers differ from those that were judged; "
                    f"if that is meant, say so: options.quantization: {held}"
                )
            self.gguf(adapter)
        except (DataError, OSError) as error:
            return str(error)
        return None

    def gguf(self, adapter: ServedAdapter) -> HeldAdapter:
        """Convert the adapter, unless that was done; raises DataError."""
        if any(char in str(self.folder) for char in ",:"):
            raise DataError(f"{self.folder}: llama-server takes no path with a comma or colon; move the workspace")
        target, note = self.folder / f"{adapter.name}.gguf", StateFile(self.folder / f"{adapter.name}.json")
        said = note.read()
        if said.get("digest") != adapter.digest or not target.is_file() or sha256_file(target) != said.get("sha256"):
            verified(adapter)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            convert(adapter.path, read_base(self.model), target)
            said = {"digest": adapter.digest, "sha256": sha256_file(target)}
            note.write(said)
        return HeldAdapter(adapter.name, adapter.digest, str(target), str(said["sha256"]))

    def keep_only(self, names: Collection[str]) -> None:
        """Remove the files of every other version; what is needed again is converted again."""
        for path in self.folder.glob("*.gguf"):
            if path.stem not in names:
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
