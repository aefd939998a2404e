"""A target: copies of the adapters in one folder, and an nginx map that says which of them a profile means.

FOLDER/support@v7/     the adapter
FOLDER/support.conf    `include` it in nginx.conf, and let nginx reload when it changes:
                       map $profile $adapter { support /srv/adapters/support@v7; }
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError
from tunesmith.core.files import copy_published, publish_folder, verify_folder, write_atomic
from tunesmith.deployment.targets.base import ServedAdapter, TargetError
from tunesmith.deployment.targets.flip_order import Order
from tunesmith.deployment.targets.options import TargetOptions, Text, read_options
from tunesmith.programs.readings import ProbeResult

KIND = "nginx_map"


class NginxOptions(TargetOptions):
    folder: Text
    """Where nginx reads adapters and map; relative to the workspace, or absolute."""


class NginxMapTarget:
    def __init__(self, options: dict[str, Any], *, root: Path, profile: str) -> None:
        self._folder = root / read_options(NginxOptions, KIND, options).folder
        self._profile = profile
        self._map = self._folder / f"{profile}.conf"
        self._order = Order.beside(self._map)

    def refusal(self, adapter: ServedAdapter) -> str | None:
        try:
            verify_folder(adapter.path, adapter.digest)
        except DataError as error:
            return error.message
        return None

    def load(self, adapter: ServedAdapter) -> None:
        final, staged = self._folder / adapter.name, self._folder / f".{adapter.name}"
        try:
            if final.exists() and verify_folder(final).digest == adapter.digest:
                return  # loaded before
        except DataError:
            shutil.rmtree(final)  # damaged: copied again
        try:
            shutil.rmtree(staged, ignore_errors=True)
            publish_folder(staged, final, copy_published(adapter.path, staged).meta)
        except (OSError, DataError) as error:
            raise TargetError(f"{final}: {error}") from error

    def probe(
        self, adapter: ServedAdapter, prompts: Sequence[Sequence[Mapping[str, Any]]], max_tokens: int
    ) -> list[ProbeResult] | None:
        return None  # nobody here answers prompts, so there is no parity check

    def flip(self, adapter: ServedAdapter | None) -> None:
        route = "" if adapter is None else f" {self._profile} {self._folder / adapter.name};"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._map, f"map $profile $adapter {{{route} }}\n")
        except OSError as error:
            raise TargetError(f"{self._map}: {error}") from error

    def flip_in_order(self, adapter: ServedAdapter | None, order: int) -> None:
        """Optional: a flip of a worker that hung and comes late moves nothing back."""
        with self._order.entering(order):
            self.flip(adapter)

    def drain(self, name: str, timeout_s: float) -> None:
        """nginx finishes the answers under way with the map that they began with."""

    def unload(self, name: str) -> None:
        if name == self._served():
            raise TargetError(f"{name} is served; flip to another version first")
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def loaded(self) -> frozenset[str]:
        return frozenset(path.name for path in self._folder.glob(f"{self._profile}@*") if path.is_dir())

    def observe(self) -> str | None:
        name = self._served()
        try:
            return None if name is None else verify_folder(self._folder / name).digest
        except DataError as error:
            raise TargetError(f"{self._map} leads to a damaged adapter: {error}") from error

    def _served(self) -> str | None:
        """The version that the map names; None: the bare base."""
        try:
            found = re.search(r"/([^/;]+);", self._map.read_text())
        except FileNotFoundError:
            return None
        return found[1] if found else None
