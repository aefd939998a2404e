"""The `ollama` target: each version a model of its own (`support:v7`), made of the base and the adapter's GGUF.

Ollama knows no adapters beside models; what the profile's name means is known to our gateway. Versions of Ollama that
take no adapters any more say so, and then the adapter is refused.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_file
from tunesmith.core.http import Reply
from tunesmith.deployment.targets.adapter_files import folder_refusal
from tunesmith.deployment.targets.alias import Alias, StateFile, verified
from tunesmith.deployment.targets.base import Endpoint, ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.gguf_adapter import base_of, convert
from tunesmith.deployment.targets.options import TargetOptions, Text, Url, Variable, read_options
from tunesmith.deployment.targets.server import TargetServer
from tunesmith.profiles.workspace import is_this_one
from tunesmith.programs.readings import ProbeResult

_FILE = "adapter.gguf"
_ADAPTER = re.compile(r"^ADAPTER\s+\S*sha256[-:]([0-9a-f]{64})\s*$", re.MULTILINE)
_WHOLE = ("f32", "f16", "bf16")


class OllamaOptions(TargetOptions):
    model: Text
    """The base, as Ollama calls it, e.g. llama3.2:1b-instruct-fp16."""
    url: Url = "http://127.0.0.1:11434"
    """Where it listens."""
    key_env: Variable | None = None
    """Name of the environment variable with the key of a proxy in front of it."""


class OllamaTarget:
    """What Ollama has is asked for by name; what it is made of, by the hash of its adapter."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._options = read_options(OllamaOptions, "ollama", options)
        self._http = TargetServer(self._options.url, self._options.timeout_s, self._options.key_env)
        self._profile = profile
        file = StateFile.at(root, profile, "ollama", f"{self._http.url} {self._options.model}")
        self._alias, self._notes, self._order = Alias(file), file.path.with_suffix(""), Order.beside(file.path)

    def refusal(self, adapter: ServedAdapter) -> str | None:
        known = folder_refusal(adapter, "ollama", {})
        if known is not None:
            return known
        base = self._show(self._options.model)
        if base is None:
            raise TargetError(f"{self._http.url} has no model {self._options.model}; get it with: ollama pull")
        held = str((base.get("details") or {}).get("quantization_level", "")).lower()
        if held and held not in _WHOLE and self._options.quantization is None:
            return (
                f"{self._options.model} holds its weights in {held}, so answers differ from those that were judged; "
                f"if that is meant, say so: options.quantization: {held}"
            )
        try:
            found = self._adapter_of(adapter.name)
            if found is not None:
                return None if found == self._hash(adapter) else self._another(adapter.name)
            reply = self._create(adapter)
        except DataError as error:
            return str(error)
        if not reply.is_ok:
            return f"{self._http.url} cannot make a model of it: {reply.error_message}"
        self._delete(adapter.name)
        return None

    def load(self, adapter: ServedAdapter) -> None:
        verified(adapter)
        try:
            found = self._adapter_of(adapter.name)
            if found is not None:
                if found != self._hash(adapter):
                    raise TargetError(self._another(adapter.name))
                return
            self._hash(adapter)  # noted first: what is noted and not there does no harm
            reply = self._create(adapter)
        except DataError as error:
            raise TargetError(f"{adapter.name}: {error}") from error
        if not reply.is_ok:
            raise TargetError(f"{self._http.url} cannot make {_theirs(adapter.name)}: {reply.error_message}")

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        return [self._read(adapter.name, messages, max_tokens) for messages in prompts]

    def flip(self, adapter: ServedAdapter | None) -> None:
        if adapter is not None and self._adapter_of(adapter.name) is None:
            raise TargetError(f"{self._http.url} has no {_theirs(adapter.name)}; load it first")
        self._alias.set(adapter)

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        with self._order.entering(order):
            self.flip(adapter)

    def drain(self, name: str, timeout_s: float) -> None:
        """Ollama does not tell who is being answered; a model that is removed answers to the end what it has begun."""

    def unload(self, name: str) -> None:
        self._alias.refuse_if_served(name)
        if name in self.loaded() and self._adapter_of(name) == self._noted(name):
            self._http.ask("POST", "/api/generate", {"model": _theirs(name), "keep_alive": 0, "stream": False})
            self._delete(name)

    def loaded(self) -> frozenset[str]:
        said = self._http.get("/api/tags")
        models = said.get("models") if isinstance(said, dict) else None
        if not isinstance(models, list):
            raise TargetError(f"{self._http.url}/api/tags is not what Ollama answers")
        names = (str(model.get("name")).partition(":") for model in models if isinstance(model, dict))
        versions = [f"{profile}@{tag}" for profile, _, tag in names if profile == self._profile]
        return frozenset(name for name in versions if self._noted(name) is not None)  # the others were made by others

    def observe(self) -> str | None:
        live = self._alias.get()
        if live is None:
            if self._show(self._options.model) is None:
                raise TargetError(f"{self._http.url} has no model {self._options.model}; get it with: ollama pull")
            return None
        found = self._adapter_of(live.name)
        if found is None:
            raise TargetError(f"{self._http.url} has lost {_theirs(live.name)}; it must be loaded again")
        try:
            if found != self._hash(live):
                raise TargetError(f"{self._http.url} serves another {_theirs(live.name)} than was loaded")
        except DataError as error:
            raise TargetError(f"{live.name}: {error}") from error
        return verified(live)

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        name = self._options.model if adapter is None else _theirs(adapter.name)
        return [Endpoint(self._http.url, name, headers=self._http.headers)]

    def _show(self, model: str) -> dict[str, Any] | None:
        reply = self._http.ask("POST", "/api/show", {"model": model})
        if reply.status == 404:
            return None
        said = reply.json
        if not reply.is_ok or not isinstance(said, dict):
            raise TargetError(f"{self._http.url}/api/show answered {reply.status}: {reply.error_message}")
        return said

    def _adapter_of(self, name: str) -> str | None:
        """The hash of the adapter that a version is made of; None where Ollama has no such model."""
        said = self._show(_theirs(name))
        if said is None:
            return None
        found = _ADAPTER.findall(str(said.get("modelfile", "")))
        if len(found) != 1:
            raise TargetError(f"{self._http.url} has a {_theirs(name)} that is not made by tunesmith; remove it there")
        return str(found[0])

    def _convert(self, adapter: ServedAdapter, folder: str) -> Path:
        base = self._show(self._options.model)
        if base is None:
            raise TargetError(f"{self._http.url} has no model {self._options.model}; get it with: ollama pull")
        made = Path(folder) / _FILE
        convert(adapter.path, base_of(base.get("model_info") or {}), made)
        return made

    def _hash(self, adapter: ServedAdapter) -> str:
        """Of its GGUF. Conversion gives the same bytes each time, so the file itself need not be kept."""
        note = StateFile(self._notes / f"{adapter.name}.json")
        said = note.read()
        if said.get("digest") != adapter.digest:
            with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
                found = sha256_file(self._convert(adapter, folder))
            said = {"digest": adapter.digest, "sha256": found, "root": str(note.root)}
            note.write(said)
        return str(said["sha256"])

    def _noted(self, name: str) -> str | None:
        """The hash of the adapter of a version that we made; None: we did not make it."""
        note = StateFile(self._notes / f"{name}.json")
        said = note.read()
        if "sha256" not in said or not is_this_one(said.get("root", str(note.root)), note.root):
            return None  # also what the workspace made that ours was copied from
        return str(said["sha256"])

    def _another(self, name: str) -> str:
        return f"{self._http.url} has another {_theirs(name)}, which was not made here; remove or rename it there"

    def _create(self, adapter: ServedAdapter) -> Reply:
        with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
            made = self._convert(adapter, folder)
            blob = f"sha256:{sha256_file(made)}"
            if self._http.ask("HEAD", f"/api/blobs/{blob}").status != 200:
                reply = self._http.ask("POST", f"/api/blobs/{blob}", file=made)
                if not reply.is_ok:
                    raise TargetError(f"{self._http.url} does not take the adapter: {reply.error_message}")
        body = {
            "model": _theirs(adapter.name),
            "from": self._options.model,
            "adapters": {_FILE: blob},
            "stream": False,
        }
        reply = self._http.ask("POST", "/api/create", body)
        said = reply.json
        if reply.is_ok and not (isinstance(said, dict) and said.get("status") == "success"):
            raise TargetError(f"{self._http.url}/api/create did not end with success: {reply.error_message}")
        if reply.status in (408, 429, 502, 503, 504):
            raise TargetError(f"{self._http.url}/api/create answered {reply.status}: {reply.error_message}")
        return reply

    def _delete(self, name: str) -> None:
        reply = self._http.ask("DELETE", "/api/delete", {"model": _theirs(name)})
        if not reply.is_ok and reply.status != 404:
            raise TargetError(f"{self._http.url} cannot remove {_theirs(name)}: {reply.error_message}")

    def _read(self, name: str, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> ProbeResult:
        """The text, and log-probabilities where this version of Ollama tells them; it tells no tokens."""
        body = {
            "model": _theirs(name),
            "messages": list(messages),
            "stream": False,
            "logprobs": True,
            "options": {"temperature": 0.0, "num_predict": max_tokens, "repeat_penalty": 1.0},
        }
        said = self._http.post("/api/chat", body)
        try:
            told = said.get("logprobs")
            return ProbeResult(
                messages=tuple(dict(message) for message in messages),
                answer_text=said["message"]["content"],
                log_probs=None if not told else tuple(float(token["logprob"]) for token in told),
                finish=str(said["done_reason"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
            raise TargetError(
                f"{self._http.url}/api/chat is not what Ollama answers ({type(error).__name__})"
            ) from None


def _theirs(name: str) -> str:
    """support@v7 is support:v7 there: a name of theirs may not hold an @."""
    return name.replace("@", ":", 1)
