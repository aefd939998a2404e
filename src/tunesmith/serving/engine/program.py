"""The engine at work: one base model, adapters beside it, and everybody's answers one token at a time."""

from __future__ import annotations

import os
import queue
import resource
import socket
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tunesmith.core.errors import ConfigError
from tunesmith.models.adapter_parts import AdapterParts, AdapterReader
from tunesmith.models.loading import load_base, pick_device
from tunesmith.profiles.architecture import read_architecture
from tunesmith.serving.engine.engine_io import (
    Answers,
    Do,
    Intake,
    Loader,
    Outbox,
    lines_of,
    row_to_answer,
    rows_to_read,
)
from tunesmith.serving.engine.heartbeat import Pulse, name_thread
from tunesmith.serving.engine.lora_layers import Sites
from tunesmith.serving.engine.scheduler import Turns
from tunesmith.serving.engine.sequence_state import EngineRefusal, Row
from tunesmith.serving.engine.tokenization import Words
from tunesmith.serving.engine_spec import EngineSpec


class EngineProgram:
    """Reads requests in threads of their own, computes in the main one."""

    def __init__(self, spec: EngineSpec, channel: socket.socket) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._inbox: queue.SimpleQueue[Do] = queue.SimpleQueue()
        self._pulse = Pulse(self._tell_pulse)
        folder, weights = Path(spec.base), Path(spec.weights or spec.base)
        model = load_base(weights, _device(spec.device))
        self._device = next(model.parameters()).device
        self._base_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        self._words = Words(folder, model, read_architecture(folder).context)
        self._sites = Sites(model)
        self._turns = Turns(model, self._sites, self._words.pad_id, spec.max_batch)
        self._loader = Loader(AdapterReader(model), self._outbox, self._inbox, self._pulse)
        self._adapters: dict[str, tuple[str, int]] = {}
        self._answers = Answers(self._outbox, self._digest_of)
        self._intake = Intake(self._take, self._outbox, self._inbox, self._pulse)

    def run(self) -> None:
        self._outbox.put({"ready": {"device": str(self._device), "base_bytes": self._base_bytes}})
        self._outbox.flush()
        self._pulse.join("compute", lambda: self._inbox.put(_nothing))
        self._pulse.start()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        with torch.inference_mode():
            while True:
                if self._turns.is_idle:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                self._pulse.beat("compute")
                self._turns.turn()
                self._outbox.flush()

    def _tell_pulse(self, report: Mapping[str, Any]) -> None:
        self._outbox.put({"alive": report})
        self._outbox.flush()

    def _listen(self) -> None:
        name_thread("listener")
        try:
            for message in lines_of(self._channel):
                if message["do"] == "ping":
                    self._pulse.ping(message["number"])
                elif message["do"] != "cancel":
                    self._intake.put(message)
                elif not self._intake.drop(message["id"]):
                    self._inbox.put(partial(self._cancel, message["id"]))
        finally:
            os._exit(0)  # the gateway closed its end, or said something that is no message

    def _take(self, message: Mapping[str, Any]) -> Do:
        """What the computing has to do about it."""
        match message["do"]:
            case "generate":
                return partial(self._admit, [row_to_answer(message, self._words, self._answers)])
            case "read":
                return partial(self._admit, rows_to_read(message, self._words, self._outbox))
            case "load":
                return partial(self._load, message)
            case "unload":
                return partial(self._unload, message)
            case "state":
                return lambda: self._outbox.put({"id": message["id"], "done": self._state()})
            case other:
                raise ConfigError(f"the gateway says {other!r}, which this engine does not know")

    def _admit(self, rows: list[Row]) -> None:
        for row in rows:
            if row.adapter is not None and row.adapter not in self._adapters:
                refusal = EngineRefusal(f"adapter {row.adapter} is not loaded", "unknown_adapter", 404)
                row.listener.failed(row, refusal)
            else:
                self._turns.waiting.append(row)

    def _cancel(self, row_id: str) -> None:
        row = self._turns.remove(row_id)
        if row is not None:
            row.listener.ended(row, "cancelled")

    def _load(self, message: Mapping[str, Any]) -> None:
        name, digest = message["name"], message["digest"]
        if name not in self._adapters:
            self._loader.read(message, lambda parts: self._add(message, parts))
        elif self._adapters[name][0] == digest:
            self._outbox.put({"id": message["id"], "done": {"bytes": self._adapters[name][1]}})
        else:
            text = f"adapter {name} is loaded with another content; a version's name is never used again"
            self._outbox.refuse(message["id"], EngineRefusal(text, "name_taken", 409))

    def _add(self, message: Mapping[str, Any], parts: AdapterParts) -> None:
        name = message["name"]
        if name not in self._adapters:
            self._sites.add(name, parts)
            self._adapters[name] = (message["digest"], parts.num_bytes)
        self._load(message)

    def _unload(self, message: Mapping[str, Any]) -> None:
        name = message["name"]
        users = sum(row.adapter == name for row in self._turns.rows())
        if users:
            text = f"adapter {name} is answering {users} requests; let them end first"
            self._outbox.refuse(message["id"], EngineRefusal(text, "in_use", 409, 1.0))
            return
        if self._adapters.pop(name, None) is not None:
            self._sites.remove(name)
        self._outbox.put({"id": message["id"], "done": {}})

    def _digest_of(self, adapter: str | None) -> str | None:
        return None if adapter is None else self._adapters[adapter][0]

    def _state(self) -> dict[str, Any]:
        is_cuda = self._device.type == "cuda"
        return {
            "adapters": {name: {"digest": digest, "bytes": size} for name, (digest, size) in self._adapters.items()},
            "rows": self._turns.num_rows,
            "waiting": len(self._turns.waiting),
            "way": self._turns.way,
            "mixes": self._sites.can_mix,
            "device": str(self._device),
            "base_bytes": self._base_bytes,
            "cache_bytes": self._turns.num_bytes,
            "device_bytes": torch.cuda.memory_reserved(self._device) if is_cuda else None,
            "most_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }


def _nothing() -> None:
    """For a thread that is only asked whether it takes the next thing to do."""


def _device(wanted: str) -> Any:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("serve.device: there is no CUDA device here; set it to auto or cpu")
    return pick_device() if wanted == "auto" else torch.device(wanted)


def serve(spec: EngineSpec, channel: socket.socket) -> None:
    """Answer until the other side of the channel is closed; does not return."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    sys.setswitchinterval(0.0005)  # a thread that reads must not hold up each of the many small steps of a pass
    EngineProgram(spec, channel).run()
