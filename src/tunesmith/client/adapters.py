"""`client.adapters`: what was made, what is live, and who decides about it. Listings stay quick: see `one_adapter`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from tunesmith.client.views import MAX_LISTED, AdapterView, DeploymentView, RequestResult, adapter_view
from tunesmith.core.errors import UsageError
from tunesmith.models import listings
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.models.rules import LiveSpan
    from tunesmith.store.reader import Reader


class Adapters:
    def __init__(self, session: Session) -> None:
        self._session = session

    def list(self, profile: str | None = None, *, limit: int = 100) -> list[AdapterView]:
        """The newest; by profile, the newest of each profile first."""
        return list(self.page(profile, limit=limit)[0])

    def page(self, profile: str | None = None, *, limit: int = 100) -> tuple[Sequence[AdapterView], int]:
        """The newest; by profile, the newest of each profile first. And how many there are in all."""
        if not 1 <= limit <= MAX_LISTED:
            raise UsageError(f"limit must be between 1 and {MAX_LISTED}")
        profile, data_dir = self._session.known_profile(profile), self._session.workspace.data_dir

        def look(reader: Reader) -> tuple[Sequence[AdapterView], int]:
            found = listings.adapters(reader, profile=profile, limit=limit)
            num = len(found) if len(found) < limit else listings.num_adapters(reader, profile=profile)
            return [adapter_view(adapter, data_dir) for adapter in found], num

        return self._session.look(look)

    def show(self, adapter: str) -> AdapterView:
        """One version, with the targets that serve it, or should, and its history."""
        from tunesmith.client import one_adapter

        return one_adapter.show(self._session, adapter)

    def live(self, profile: str) -> AdapterView | None:
        """What is live for a profile; None means the bare base."""
        from tunesmith.client import one_adapter

        return one_adapter.live(self._session, profile)

    def deployment(self, profile: str) -> DeploymentView:
        """What is wanted live and what each target was last seen serving."""
        from tunesmith.client import one_adapter

        return one_adapter.deployment(self._session, profile)

    def history(self, profile: str, *, at: datetime | str | None = None) -> Sequence[LiveSpan]:
        """What was live from when till when, oldest first; with `at`, only what was live then.

        A text is read as ISO 8601; without a time zone it is UTC, without a time it is 00:00.
        """
        from tunesmith.client import one_adapter

        return one_adapter.history(self._session, profile, at)

    def approve(self, adapter: str) -> RequestResult:
        """Let a held version go live."""
        from tunesmith.client import one_adapter

        return one_adapter.approve(self._session, adapter)

    def deploy(self, adapter: str, *, force: bool = False, reason: str = "") -> RequestResult:
        """Ask for any version to go live, whatever its run was told: measured first, or, with `force`, past the gate.

        Forcing needs a reason; both are kept in the history. The answer names the run that carries it out.
        """
        from tunesmith.client import one_adapter

        return one_adapter.deploy(self._session, adapter, force=force, reason=reason)

    def evaluate(self, adapter: str) -> RequestResult:
        """Measure any version on the held-out cases of now, against what is live; nothing goes live by it.

        A held version is measured by its own run, which goes on by the verdict. For every other version the answer
        names a new run that ends `completed`; `runs.show` has the verdict.
        """
        from tunesmith.client import one_adapter

        return one_adapter.evaluate(self._session, adapter)

    def reject(self, adapter: str, reason: str = "") -> RequestResult:
        """Decide against a held version."""
        from tunesmith.client import one_adapter

        return one_adapter.reject(self._session, adapter, reason)

    def rollback(self, profile: str, *, to: str | None = None, reason: str = "") -> str | None:
        """Put the version before the live one (or `to`) in its place; returns what is live now, None for the base."""
        from tunesmith.client import one_adapter

        return one_adapter.rollback(self._session, profile, to=to, reason=reason)

    def revoke(self, adapter: str, reason: str) -> AdapterView:
        """Withdraw a version: no target may load it any more."""
        from tunesmith.client import one_adapter

        return one_adapter.revoke(self._session, adapter, reason)
