"""The engine program: one base model, its adapters, and the loop that runs the scheduler."""

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
from tunesmith.models.adapter_weights import AdapterReader, AdapterWeights
from tunesmith.models.loading import load_base, pick_device
from tunesmith.profiles.architecture import read_architecture
from tunesmith.serving.engine.engine_io import (
    Action,
    Loader,
    MessageQueue,
    ResponseWriter,
    StreamListener,
    lines_of,
    probe_sequences,
    stream_sequence,
)
from tunesmith.serving.engine.heartbeat import HeartbeatReporter, name_thread
from tunesmith.serving.engine.lora_layers import LoraLayers
from tunesmith.serving.engine.scheduler import Scheduler
from tunesmith.serving.engine.sequence_state import EngineRefusal, SequenceState
from tunesmith.serving.engine.tokenization import PromptTokenizer
from tunesmith.serving.engine_spec import EngineSpec


class EngineProgram:
    """Reads requests in other threads, computes in the main one."""

    def __init__(self, spec: EngineSpec, channel: socket.socket) -> None:
        self._channel = channel
        self._writer = ResponseWriter(channel)
        self._inbox: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._heartbeat = HeartbeatReporter(self._send_heartbeat)
        folder, weights = Path(spec.base), Path(spec.weights or spec.base)
        model = load_base(weights, _device(spec.device))
        self._device = next(model.parameters()).device
        self._base_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        self._tokenizer = PromptTokenizer(folder, model, read_architecture(folder).context)
        self._lora_layers = LoraLayers(model)
        self._scheduler = Scheduler(model, self._lora_layers, self._tokenizer.pad_id, spec.max_batch)
        self._loader = Loader(AdapterReader(model), self._writer, self._inbox, self._heartbeat)
        self._adapters: dict[str, tuple[str, int]] = {}
        self._stream_listener = StreamListener(self._writer, self._digest_of)
        # its thread makes an action of each message (`_action_for`) and puts it into the inbox that `run` empties
        self._message_queue = MessageQueue(self._action_for, self._writer, self._inbox, self._heartbeat)

    def run(self) -> None:
        self._writer.put({"ready": {"device": str(self._device), "base_bytes": self._base_bytes}})
        self._writer.flush()
        self._heartbeat.register("compute", lambda: self._inbox.put(_nothing))
        self._heartbeat.start()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        with torch.inference_mode():
            while True:
                if self._scheduler.is_idle:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                self._heartbeat.beat("compute")
                self._scheduler.step()
                self._writer.flush()

    def _send_heartbeat(self, report: Mapping[str, Any]) -> None:
        self._writer.put({"heartbeat": report})
        self._writer.flush()

    def _listen(self) -> None:
        name_thread("listener")
        try:
            for message in lines_of(self._channel):
                if message["op"] == "ping":
                    self._heartbeat.ping(message["number"])
                elif message["op"] != "cancel":
                    self._message_queue.put(message)
                elif not self._message_queue.drop(message["id"]):
                    self._inbox.put(partial(self._cancel, message["id"]))
        finally:
            os._exit(0)  # the gateway closed its end, or sent an invalid line

    def _action_for(self, message: Mapping[str, Any]) -> Action:
        """The action that a message asks of the compute thread."""
        match message["op"]:
            case "generate":
                return partial(self._admit, [stream_sequence(message, self._tokenizer, self._stream_listener)])
            case "probe":
                return partial(self._admit, probe_sequences(message, self._tokenizer, self._writer))
            case "load":
                return partial(self._load, message)
            case "unload":
                return partial(self._unload, message)
            case "state":
                return lambda: self._writer.put({"id": message["id"], "done": self._state()})
            case other:
                raise ConfigError(f"unknown operation {other!r}")

    def _admit(self, sequences: list[SequenceState]) -> None:
        for sequence in sequences:
            if sequence.adapter is not None and sequence.adapter not in self._adapters:
                refusal = EngineRefusal(f"adapter {sequence.adapter} is not loaded", "unknown_adapter", 404)
                sequence.listener.failed(sequence, refusal)
            else:
                self._scheduler.waiting.append(sequence)

    def _cancel(self, sequence_id: str) -> None:
        sequence = self._scheduler.remove(sequence_id)
        if sequence is not None:
            sequence.listener.ended(sequence, "cancelled")

    def _load(self, message: Mapping[str, Any]) -> None:
        name, digest = message["name"], message["digest"]
        if name not in self._adapters:
            self._loader.read(message, lambda parts: self._add(message, parts))
        elif self._adapters[name][0] == digest:
            self._writer.put({"id": message["id"], "done": {"bytes": self._adapters[name][1]}})
        else:
            text = f"adapter {name} is loaded with other content; a version name must not be reused"
            self._writer.refuse(message["id"], EngineRefusal(text, "name_taken", 409))

    def _add(self, message: Mapping[str, Any], parts: AdapterWeights) -> None:
        name = message["name"]
        if name not in self._adapters:
            self._lora_layers.add(name, parts)
            self._adapters[name] = (message["digest"], parts.num_bytes)
        self._load(message)

    def _unload(self, message: Mapping[str, Any]) -> None:
        name = message["name"]
        users = sum(sequence.adapter == name for sequence in self._scheduler.sequences())
        if users:
            text = f"adapter {name} is answering {users} requests; drain it first"
            self._writer.refuse(message["id"], EngineRefusal(text, "in_use", 409, 1.0))
            return
        if self._adapters.pop(name, None) is not None:
            self._lora_layers.remove(name)
        self._writer.put({"id": message["id"], "done": {}})

    def _digest_of(self, adapter: str | None) -> str | None:
        return None if adapter is None else self._adapters[adapter][0]

    def _state(self) -> dict[str, Any]:
        is_cuda = self._device.type == "cuda"
        return {
            "adapters": {name: {"digest": digest, "bytes": size} for name, (digest, size) in self._adapters.items()},
            "running": self._scheduler.num_sequences,
            "waiting": len(self._scheduler.waiting),
            "runner": self._scheduler.runner_kind,
            "mixed_batch": self._lora_layers.supports_mixed_batch,
            "device": str(self._device),
            "base_bytes": self._base_bytes,
            "cache_bytes": self._scheduler.num_bytes,
            "device_bytes": torch.cuda.memory_reserved(self._device) if is_cuda else None,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }


def _nothing() -> None:
    """A no-op action: wakes the compute thread for its heartbeat."""


def _device(wanted: str) -> Any:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("serve.device: there is no CUDA device here; set it to auto or cpu")
    return pick_device() if wanted == "auto" else torch.device(wanted)


def serve(spec: EngineSpec, channel: socket.socket) -> None:
    """Serve until the gateway closes the channel; does not return."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    sys.setswitchinterval(0.0005)  # the default of 5 ms would let reader threads delay every kernel launch of a pass
    EngineProgram(spec, channel).run()
