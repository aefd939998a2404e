"""The `vllm` target: adapters loaded by name over vLLM's own routes, on every replica; the alias lives in our gateway.

vLLM keys its prefix cache by the adapter's name, and names are never reused: no version answers from another's cache.
What it loaded it forgets when it restarts, and replicas share nothing: `observe` asks each of them, `load` brings back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, ValidationError, model_validator

from tunesmith.core.http import Reply
from tunesmith.deployment.targets.adapter_files import folder_refusal
from tunesmith.deployment.targets.alias import Alias, StateFile, verified
from tunesmith.deployment.targets.base import Endpoint, ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.options import TargetOptions, Text, Url, Variable, read_options
from tunesmith.deployment.targets.server import TargetServer, wait_until_idle
from tunesmith.programs.readings import ProbeResult
from tunesmith.runs.spec_paths import path_from, path_in

_LORA_INFO = re.compile(r"vllm:lora_requests_info\{(.*)\} (\S+)")
_LABEL = re.compile(r'(running|waiting)_lora_adapters="([^"]*)"')
_NUM_ACTIVE = re.compile(r"vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)")


class VllmOptions(TargetOptions):
    url: Url | None = None
    """Where it listens, e.g. http://127.0.0.1:8000."""
    urls: tuple[Url, ...] = ()
    """Instead of url: every replica."""
    model: Text | None = None
    """How vLLM calls the base; unset: the only model it lists that is no adapter."""
    key_env: Variable | None = None
    """Name of the environment variable with its API key."""
    paths: dict[Text, Text] = Field(default_factory=dict)
    """Folders of this machine and how they are called where vLLM runs, e.g. in a container."""
    max_lora_rank: int | None = None
    """The --max-lora-rank it was started with."""

    @model_validator(mode="after")
    def _one_place(self) -> VllmOptions:
        if (self.url is None) == (not self.urls):
            raise ValueError("give url, or urls for several replicas")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError("urls: the same replica is named twice")
        return self


class VllmTarget:
    """Every method speaks to all replicas; one that fails is named."""

    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._options = read_options(VllmOptions, "vllm", options)
        self._raw = dict(options)
        urls = self._options.urls or (self._options.url or "",)
        self._replicas = [TargetServer(url, self._options.timeout_s, self._options.key_env) for url in urls]
        self._profile = profile
        file = StateFile.at(root, profile, "vllm", " ".join(sorted(urls)))
        self._alias, self._order = Alias(file), Order.beside(file.path)
        self._ours = root.resolve() / ".tunesmith" / "adapters"
        self._made = StateFile(file.path.with_suffix(".loaded.json"))

    def refusal(self, adapter: ServedAdapter) -> str | None:
        known = folder_refusal(adapter, "vllm", self._raw)
        if known is not None:
            return known
        replica = self._replicas[0]
        if self._is_held(replica, adapter):
            return None
        reply = self._ask_to_load(replica, adapter)
        if not reply.is_ok:
            return f"{replica.url} cannot load it: {reply.error_message}"
        self._forget(replica, adapter.name)
        return None

    def load(self, adapter: ServedAdapter) -> None:
        verified(adapter)
        for replica in self._replicas:
            if self._is_held(replica, adapter):
                continue
            self._note(adapter)
            reply = self._ask_to_load(replica, adapter)
            if not reply.is_ok and not self._is_held(replica, adapter):  # another worker may have been faster
                raise TargetError(f"{replica.url} cannot load {adapter.name}: {reply.error_message}")

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        """The prompts go round the replicas, so that one with another template or base is found too."""
        return [
            self._read(self._replicas[number % len(self._replicas)], adapter.name, messages, max_tokens)
            for number, messages in enumerate(prompts)
        ]

    def flip(self, adapter: ServedAdapter | None) -> None:
        for replica in self._replicas:
            if adapter is not None and not self._is_held(replica, adapter):
                raise TargetError(f"{replica.url} does not hold {adapter.name}; load it first")
        self._alias.set(adapter)

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        with self._order.entering(order):
            self.flip(adapter)

    def drain(self, name: str, timeout_s: float) -> None:
        answering = ((replica.url, partial(_is_answering, replica, name)) for replica in self._replicas)
        wait_until_idle(name, timeout_s, answering)

    def unload(self, name: str) -> None:
        self._alias.refuse_if_served(name)
        for replica in self._replicas:
            if name in self._held_of_ours(replica):
                self._forget(replica, name)

    def loaded(self) -> frozenset[str]:
        """What any replica holds of ours: a leftover on one of them counts."""
        return frozenset(name for replica in self._replicas for name in self._held_of_ours(replica))

    def _held_of_ours(self, replica: TargetServer) -> list[str]:
        """Versions that were loaded from here; a profile of another workspace may have the same name."""
        noted = {name: self._theirs(path_from(self._made.root, path)) for name, path in self._made.read().items()}
        below = self._theirs(self._ours)
        return [
            name
            for name, root in _adapters(_models(replica)).items()
            if name.startswith(f"{self._profile}@") and (noted.get(name) == root or root.startswith(f"{below}/"))
        ]

    def _note(self, adapter: ServedAdapter) -> None:
        with self._made.locked():
            self._made.write({**self._made.read(), adapter.name: path_in(self._made.root, adapter.path)})

    def observe(self) -> str | None:
        live = self._alias.get()
        for replica in self._replicas:
            models = _models(replica)
            if live is None:
                self._base(replica, models)
            elif live.name not in _adapters(models):
                raise TargetError(f"{replica.url} has lost {live.name}, as after a restart; it must be loaded again")
            else:
                self._check_root(replica, live, models)
        return None if live is None else verified(live)

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        endpoints = []
        for replica in self._replicas:
            try:
                name = self._base(replica, None) if adapter is None else adapter.name
            except TargetError:
                continue
            # of several names for its base vLLM answers with the first, whichever was asked for
            endpoints.append(Endpoint(replica.url, name, headers=replica.headers, is_named=adapter is not None))
        if not endpoints:
            raise TargetError("no replica answers")
        return endpoints

    def _base(self, replica: TargetServer, models: list[dict[str, Any]] | None) -> str:
        """How the replica calls the bare base."""
        if self._options.model is not None and models is None:
            return self._options.model
        models = _models(replica) if models is None else models
        bases = [str(model["id"]) for model in models if not model.get("parent")]
        if self._options.model is not None:
            if self._options.model not in bases:
                raise TargetError(f"{replica.url} serves no model {self._options.model}; it serves: {', '.join(bases)}")
            return self._options.model
        if len(bases) != 1:
            found = ", ".join(bases) or "none"
            raise TargetError(f"{replica.url} serves {len(bases)} models; say which in options.model: {found}")
        return bases[0]

    def _is_held(self, replica: TargetServer, adapter: ServedAdapter) -> bool:
        models = _models(replica)
        if adapter.name not in _adapters(models):
            return False
        self._check_root(replica, adapter, models)
        return True

    def _check_root(self, replica: TargetServer, adapter: ServedAdapter, models: list[dict[str, Any]]) -> None:
        root, ours = _adapters(models)[adapter.name], self._theirs(adapter.path)
        if root != ours:
            raise TargetError(f"{replica.url} holds {adapter.name} from {root}, not from {ours}; unload it there")

    def _theirs(self, path: Path) -> str:
        """The path as the server sees it."""
        for ours, theirs in sorted(self._options.paths.items(), key=lambda pair: -len(pair[0])):
            if path.is_relative_to(ours):
                return str(PurePosixPath(theirs) / path.relative_to(ours))
        return str(path)

    def _ask_to_load(self, replica: TargetServer, adapter: ServedAdapter) -> Reply:
        body = {"lora_name": adapter.name, "lora_path": self._theirs(adapter.path)}
        reply = replica.ask("POST", "/v1/load_lora_adapter", body)
        if reply.status == 404 and "error" not in (reply.json or {}):
            raise TargetError(
                f"{replica.url} cannot load adapters while it runs; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        if reply.status == 404:
            raise TargetError(
                f"{replica.url} finds no adapter at {body['lora_path']}; if it sees our folders under other names, "
                "say so in options.paths"
            )
        if reply.status in (408, 429, 502, 503, 504):
            raise TargetError(f"{replica.url} answered {reply.status} to a load: {reply.error_message}")
        return reply

    def _forget(self, replica: TargetServer, name: str) -> None:
        reply = replica.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if not reply.is_ok and reply.status != 404:
            raise TargetError(f"{replica.url} cannot unload {name}: {reply.error_message}")

    def _read(
        self, replica: TargetServer, name: str, messages: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> ProbeResult:
        body = {
            "model": name,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
        }
        said = replica.post("/v1/chat/completions", body)
        prompt_ids = said.get("prompt_token_ids")
        text = None
        if prompt_ids is not None:
            text = replica.post("/detokenize", {"model": name, "tokens": prompt_ids}).get("prompt")
        answer_ids = (said.get("choices") or [{}])[0].get("token_ids")
        return _chat_reading(
            messages, said, replica.url, prompt_text=text, prompt_ids=prompt_ids, answer_ids=answer_ids
        )


def _models(replica: TargetServer) -> list[dict[str, Any]]:
    said = replica.get("/v1/models")
    models = said.get("data") if isinstance(said, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
        raise TargetError(f"{replica.url}/v1/models is not what vLLM answers")
    return models


def _adapters(models: list[dict[str, Any]]) -> dict[str, str]:
    """Names and paths of what is loaded beside the base."""
    return {str(model["id"]): str(model.get("root")) for model in models if model.get("parent")}


def _is_answering(replica: TargetServer, name: str) -> bool:
    """By its metrics: the youngest note of running adapters, unless nothing runs at all."""
    reply = replica.ask("GET", "/metrics")
    text = reply.body.decode(errors="replace")
    if not reply.is_ok or not any(float(value) for value in _NUM_ACTIVE.findall(text)):
        return False
    notes = [(float(value), labels) for labels, value in _LORA_INFO.findall(text)]
    if not notes:
        return False
    return any(name in names.split(",") for _, names in _LABEL.findall(max(notes)[1]))


def _chat_reading(
    messages: Sequence[Mapping[str, Any]],
    said: Any,
    url: str,
    *,
    prompt_text: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    answer_ids: Sequence[int] | None = None,
) -> ProbeResult:
    """A chat completion that was not streamed as a reading for the parity probe; raises TargetError if it is none."""
    try:
        choice = said["choices"][0]
        tokens = ((choice.get("logprobs") or {}).get("content")) or None
        if answer_ids is None and tokens is not None and all("id" in token for token in tokens):
            answer_ids = [int(token["id"]) for token in tokens]
        usage = said.get("usage") or {}
        return ProbeResult(
            messages=tuple(dict(message) for message in messages),
            prompt_text=prompt_text,
            prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
            num_prompt=usage.get("prompt_tokens"),
            answer_ids=None if answer_ids is None else tuple(answer_ids),
            answer_text=choice["message"].get("content") or "",
            log_probs=None if tokens is None else tuple(float(token["logprob"]) for token in tokens),
            finish=str(choice["finish_reason"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise TargetError(f"{url}: its answer is no chat completion ({type(error).__name__})") from None
