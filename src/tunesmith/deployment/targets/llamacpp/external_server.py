"""The `llamacpp` target with `url`: a llama-server that somebody else started, and the adapters it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.targets.alias import Alias, verified
from tunesmith.deployment.targets.base import Endpoint, ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.llamacpp.files import PLAIN, Converted, LlamacppOptions
from tunesmith.deployment.targets.llamacpp.readings import read_llama
from tunesmith.deployment.targets.server import TargetServer, wait_until_idle
from tunesmith.programs.readings import ProbeResult


class ExternalLlamaServer:
    """A llama-server that somebody else started with --lora; the alias lives in our gateway."""

    def __init__(self, options: LlamacppOptions, root: Path, profile: str) -> None:
        self._made = Converted(options, root, profile)
        self._http = TargetServer(options.url or "", options.timeout_s, options.key_env)
        self._profile = profile
        self._alias, self._order = Alias(self._made.file), Order.beside(self._made.file.path)

    def refusal(self, adapter: ServedAdapter) -> str | None:
        known = self._made.refusal(adapter)
        if known is not None:
            return known
        if self._place(adapter.name) is None:
            made = self._made.folder / f"{adapter.name}.gguf"
            return f"{self._http.url} has no {adapter.name}; start it with --lora {made} and deploy again"
        return None

    def load(self, adapter: ServedAdapter) -> None:
        if self._place(adapter.name) is None:
            raise TargetError(f"{self._http.url} has no {adapter.name}; start it with --lora and its GGUF")

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        lora = [{"id": self._needed(adapter.name), "scale": 1.0}]
        return [read_llama(self._http, messages, max_tokens, lora) for messages in prompts]

    def flip(self, adapter: ServedAdapter | None) -> None:
        if adapter is not None:
            self._needed(adapter.name)
        self._alias.set(adapter)

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        with self._order.entering(order):
            self.flip(adapter)

    def drain(self, name: str, timeout_s: float) -> None:
        place = self._place(name)
        if place is not None:
            wait_until_idle(name, timeout_s, [(self._http.url, partial(self._is_answering, place))])

    def unload(self, name: str) -> None:
        """It keeps what it was started with; nobody asks for it any more."""
        self._alias.refuse_if_served(name)

    def loaded(self) -> frozenset[str]:
        names = {Path(str(told.get("path"))).name.removesuffix(".gguf") for told in self._adapters()}
        return frozenset(name for name in names if name.startswith(f"{self._profile}@"))

    def observe(self) -> str | None:
        live = self._alias.get()
        told = self._adapters()
        if live is None:
            return None
        at = next((each for each in told if _is_named(each, live.name)), None)
        if at is None:
            raise TargetError(f"{self._http.url} has no {live.name} any more; start it with --lora and its GGUF")
        try:
            theirs, ours = Path(str(at.get("path"))), self._made.gguf(live)
        except (DataError, OSError) as error:
            raise TargetError(f"{live.name}: {error}") from error
        if theirs.is_file() and sha256_file(theirs) != ours.sha256:
            raise TargetError(f"{theirs} is not the GGUF of {live.name}; start {self._http.url} with {ours.gguf}")
        return verified(live)

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        if adapter is None:
            lora = [{"id": at, "scale": 0.0} for at in range(len(self._adapters()))]
        else:
            lora = [{"id": self._needed(adapter.name), "scale": 1.0}]
        # how it caches prompts is not ours to say, and its cache does not tell adapters apart
        extra = {"lora": lora, "cache_prompt": False}
        return [Endpoint(self._http.url, self._made.model.name, extra, self._http.headers, PLAIN, is_named=False)]

    def _adapters(self) -> list[dict[str, Any]]:
        told = self._http.get("/lora-adapters")
        if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
            raise TargetError(f"{self._http.url}/lora-adapters is not what llama-server answers")
        return told

    def _place(self, name: str) -> int | None:
        return next((int(told["id"]) for told in self._adapters() if _is_named(told, name)), None)

    def _needed(self, name: str) -> int:
        place = self._place(name)
        if place is None:
            raise TargetError(f"{self._http.url} has no {name}; start it with --lora and its GGUF")
        return place

    def _is_answering(self, place: int) -> bool:
        reply = self._http.ask("GET", "/slots")
        slots = reply.json if reply.is_ok and isinstance(reply.json, list) else []
        return any(
            slot.get("is_processing")
            and any(
                each.get("id") == place and each.get("scale") for each in (slot.get("params") or {}).get("lora") or []
            )
            for slot in slots
        )


def _is_named(told: Mapping[str, Any], name: str) -> bool:
    return Path(str(told.get("path"))).name == f"{name}.gguf"
