"""Targets that the gateway forwards to: `endpoints`, and the earlier name of that method in plug-ins."""

from __future__ import annotations

from typing import cast

import pytest

from tunesmith.deployment.targets.base import Door, Endpoint, ProxyTarget, ServedAdapter, endpoints_of


class Current:
    def endpoints(self, adapter: ServedAdapter | None) -> list[Endpoint]:
        return [Endpoint("http://127.0.0.1:1", "base" if adapter is None else adapter.name)]


class Earlier:
    def doors(self, adapter: ServedAdapter | None) -> list[Door]:
        return [Door("http://127.0.0.1:1", "base" if adapter is None else adapter.name)]


@pytest.mark.parametrize("kind", [Current, Earlier])
def test_target_is_asked_for_its_endpoints_under_either_name(kind: type[Current] | type[Earlier]) -> None:
    assert endpoints_of(cast(ProxyTarget, kind()), None) == [Endpoint("http://127.0.0.1:1", "base")]
