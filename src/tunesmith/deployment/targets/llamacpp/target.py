"""The `llamacpp` target: adapters converted to GGUF, served by llama-server processes that it starts, or by yours.

A version is loaded by starting a process that has it and all that must stay; `current` in the state file says which
process is live. Requests always name the adapter they mean, so an answer never comes from another one's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import sha256_file
from tunesmith.deployment.targets.alias import adapter_of, adapter_to_json
from tunesmith.deployment.targets.base import Endpoint, ServedAdapter, Target, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.llamacpp import processes
from tunesmith.deployment.targets.llamacpp.external_server import ExternalLlamaServer
from tunesmith.deployment.targets.llamacpp.files import PLAIN, Converted, LlamacppOptions
from tunesmith.deployment.targets.llamacpp.processes import HeldAdapter, LlamaProcess
from tunesmith.deployment.targets.llamacpp.readings import read_llama
from tunesmith.deployment.targets.options import read_options
from tunesmith.deployment.targets.server import wait_until_idle
from tunesmith.profiles.workspace import is_this_one
from tunesmith.programs.readings import ProbeResult


def llamacpp_target(options: dict[str, Any], *, root: Path, profile: str) -> Target:
    """Whichever of the two ways the options choose."""
    chosen = read_options(LlamacppOptions, "llamacpp", options)
    return (ExternalLlamaServer if chosen.url else LlamacppTarget)(chosen, root, profile)


class LlamacppTarget:
    """Blue and green: processes of ours, detached, one more for each version that is loaded."""

    def __init__(self, options: LlamacppOptions, root: Path, profile: str) -> None:
        self._made = Converted(options, root, profile)
        self._options, self._file, self._profile = options, self._made.file, profile
        self._order = Order.beside(self._file.path)

    def refusal(self, adapter: ServedAdapter) -> str | None:
        return self._made.refusal(adapter)

    def load(self, adapter: ServedAdapter) -> None:
        with self._file.locked():
            self._ensure(adapter)

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        process, place = self._holder(adapter.name)
        lora = [{"id": place, "scale": 1.0}]
        asked = process.http(self._options.timeout_s)
        return [read_llama(asked, messages, max_tokens, lora) for messages in prompts]

    def flip(self, adapter: ServedAdapter | None) -> None:
        with self._file.locked():
            state = self._state()
            name = None if adapter is None else adapter.name
            live = self._with_default(name)
            if live is None and adapter is not None:
                raise TargetError(f"no llama-server serves {adapter.name}; load it first")
            process = live or self._start(None, ())  # the bare base, too, is served by somebody
            about = None
            if adapter is not None:
                about = adapter_to_json(adapter, self._file)
            state["processes"] = [each.to_json() for each in self._processes()]
            self._file.write({**state, "v": 1, "root": str(self._file.root), "current": process.id, "live": about})

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        with self._order.entering(order):
            self.flip(adapter)

    def drain(self, name: str, timeout_s: float) -> None:
        wait_until_idle(name, timeout_s, self._answering(name))

    def _answering(self, name: str) -> Iterator[tuple[str, Callable[[], bool]]]:
        """For `wait_until_idle`: the processes that may answer from a version."""
        current = self._state().get("current")
        for process in self._processes():
            if process.place_of(name) is None or not process.is_alive:
                continue
            whole = process.default == name and process.id != current
            yield "llama-server", partial(processes.is_busy, process, None if whole else name, self._options.timeout_s)

    def unload(self, name: str) -> None:
        with self._file.locked():
            live = adapter_of(self._state().get("live"), self._file)
            if live is not None and live.name == name:
                raise TargetError(f"{name} is served; flip to another version first")
            kept = []
            for process in self._processes():
                if process.default == name and process.id != self._state().get("current"):
                    processes.end(process)
                    continue
                held = tuple(replace(each, is_gone=each.is_gone or each.name == name) for each in process.adapters)
                kept.append(replace(process, adapters=held))
            self._write(kept)
            self._made.keep_only({each.name for process in kept for each in process.adapters})

    def loaded(self) -> frozenset[str]:
        alive = [process for process in self._processes() if process.is_alive]
        return frozenset(held.name for process in alive for held in process.adapters if not held.is_gone)

    def observe(self) -> str | None:
        state = self._state()
        if "current" not in state:
            return None
        live = adapter_of(state.get("live"), self._file)
        process = next((each for each in self._processes() if each.id == state["current"]), None)
        name = "the bare base" if live is None else live.name
        if process is None or not process.is_alive:
            raise TargetError(f"the llama-server that served {name} is gone; it must be loaded again")
        told = process.http(self._options.timeout_s).get("/lora-adapters")
        _check_told(told, process)
        if live is None:
            return None
        held = next((each for each in process.adapters if each.name == live.name), None)
        if held is None or held.digest != live.digest or sha256_file(Path(held.gguf)) != held.sha256:
            raise TargetError(f"the GGUF of {name} is not the one that was converted; it must be loaded again")
        return live.digest

    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        if adapter is None:
            process = self._any_process()
            lora = [{"id": place, "scale": 0.0} for place in range(len(process.adapters))]
        else:
            process, place = self._holder(adapter.name)
            lora = [{"id": place, "scale": 1.0}]
        asked = process.http(self._options.timeout_s)
        return [Endpoint(asked.url, self._made.model.name, {"lora": lora}, asked.headers, PLAIN, is_named=False)]

    def _ensure(self, adapter: ServedAdapter) -> None:
        """A living process whose default it is. Call it with the lock held."""
        known = self._with_default(adapter.name)
        if known is not None:
            place = known.place_of(adapter.name)
            if place is None or known.adapters[place].digest != adapter.digest:
                raise TargetError(f"{adapter.name} is loaded with another content; unload it first")
            with contextlib.suppress(TargetError):
                processes.wait_until_ready(known, self._options.timeout_s)
                return
            processes.end(known)  # it hangs
        try:
            held = self._made.gguf(adapter)
        except (DataError, OSError) as error:
            raise TargetError(f"{adapter.name}: {error}") from error
        self._make_room()
        others = {
            each.name: each
            for process in self._processes()
            if process.is_alive and process.default != adapter.name
            for each in process.adapters
            if each.name == process.default and not each.is_gone
        }
        self._start(adapter.name, (held, *others.values()))

    def _make_room(self) -> None:
        """End the oldest process that is neither live nor answering, where there would be too many."""
        current = self._state().get("current")
        alive = [process for process in self._processes() if process.is_alive]
        while len(alive) >= self._options.max_processes:
            oldest = next((each for each in alive if each.id != current and not self._is_busy(each)), None)
            if oldest is None:
                raise TargetError(
                    f"all {len(alive)} llama-server processes are answering; ask again, or set options.max_processes"
                )
            processes.end(oldest)
            alive.remove(oldest)
            self._write(alive)

    def _start(self, default: str | None, adapters: Sequence[HeldAdapter]) -> LlamaProcess:
        """One more process; the dead are taken off the list, and one that cannot start leaves nothing."""
        self._end_those_before_a_move()
        kept = [process for process in self._processes() if process.is_alive]
        for gone in self._processes():
            if not gone.is_alive:
                processes.end(gone)
        self._made.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        process = processes.planned(adapters, default, self._made.folder)
        self._write([*kept, process])
        try:
            process = processes.start(process, self._program(), self._made.model, self._made.root)
            self._write([*kept, process])
            processes.wait_until_ready(process, self._options.timeout_s)
        except BaseException:
            processes.end(process)
            self._write(kept)
            raise
        return process

    def _is_busy(self, process: LlamaProcess) -> bool:
        try:
            return processes.is_busy(process, None, self._options.timeout_s)
        except TargetError:
            return False  # it hangs, or has just died

    def _any_process(self) -> LlamaProcess:
        """The newest living one; where there is none, the bare base is served by a new one."""
        for process in self._newest_first():
            if process.is_alive:
                return process
        with self._file.locked():
            return self._with_default(None) or self._start(None, ())

    def _program(self) -> list[str]:
        """A program named by a path is found from the workspace, as everything in a profile is."""
        first, *rest = self._options.start
        return [str((self._made.root / first).resolve()) if "/" in first else first, *rest]

    def _holder(self, name: str) -> tuple[LlamaProcess, int]:
        """A living process that has the version; rather the one whose default it is."""
        found = [(each, each.place_of(name)) for each in self._newest_first() if each.is_alive]
        having = [(each, place) for each, place in found if place is not None]
        if not having:
            raise TargetError(f"no llama-server has {name}; it must be loaded again")
        return next((pair for pair in having if pair[0].default == name), having[0])

    def _with_default(self, name: str | None) -> LlamaProcess | None:
        fitting = (each for each in self._newest_first() if each.default == name and each.is_alive)
        return next((each for each in fitting if name is None or each.place_of(name) is not None), None)

    def _newest_first(self) -> list[LlamaProcess]:
        return self._processes()[::-1]

    def _processes(self) -> list[LlamaProcess]:
        try:
            return [LlamaProcess.from_json(raw) for raw in self._state().get("processes", [])]
        except (KeyError, TypeError, ValueError):
            raise TargetError(f"{self._file.path} is not what tunesmith writes; remove it and deploy again") from None

    def _write(self, kept: Sequence[LlamaProcess]) -> None:
        state = {**self._state(), "v": 1, "root": str(self._file.root)}
        self._file.write({**state, "processes": [each.to_json() for each in kept]})

    def _state(self) -> dict[str, Any]:
        """What the file says; nothing where it is a copy: its processes are those of the original."""
        state = self._file.read()
        return state if state.get("root", str(self._file.root)) == str(self._file.root) else {}

    def _end_those_before_a_move(self) -> None:
        """The workspace was moved: processes with paths of the former place are ours, and of no use any more."""
        state = self._file.read()
        former = state.get("root", str(self._file.root))
        if former != str(self._file.root) and is_this_one(former, self._file.root):
            for raw in state.get("processes", []):
                processes.end(LlamaProcess.from_json(raw))


def _check_told(told: Any, process: LlamaProcess) -> None:
    """What the process says it has must be what it was started with, and its default must not have been moved."""
    expected = [(held.gguf, 1.0 if held.name == process.default else 0.0) for held in process.adapters]
    try:
        found = [(str(each["path"]), float(each["scale"])) for each in told]
    except (KeyError, TypeError, ValueError):
        found = None
    if found != expected:
        raise TargetError("a llama-server of ours tells other adapters than it was started with; load again")
