"""The API keys of the key file, reloaded while the server runs: a removed key stops working without a restart.

While the file is invalid, every key is refused. So a key that was removed is refused even if the file has an error;
the price is that a typing error is an outage, which is logged at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tunesmith.core.errors import ConfigError
from tunesmith.core.logs import logger
from tunesmith.serving.gateway.api_errors import ApiError
from tunesmith.serving.gateway.scopes import Caller, Keys

log = logger("gateway")
_POLL_INTERVAL_S = 0.5
_MAX_FAILURES = 2
"""Consecutive failures before keys are refused: an editor may be in the middle of writing the file."""
_RETRY_AFTER_S = 5.0


class KeyFile:
    """Its constructor raises ConfigError for an invalid file."""

    def __init__(self, token: str, key_file: Path | None) -> None:
        self._token, self._key_file = token, key_file
        self._keys = Keys.of(token, key_file)
        self._num_failed = 0
        self.problem: str | None = None
        """Why every key is refused now."""

    def caller_of(self, authorization: str | None) -> Caller:
        """Whose key the header of a request holds; raises 401, or 503 while the key file cannot be used."""
        if self.problem is None:
            return self._keys.caller_of(authorization)
        try:
            return Keys(self._keys.control, ()).caller_of(authorization)  # the server's own token is in no file
        except ApiError:
            message = "no key can be checked, because the server's key file cannot be used; its log says why"
            raise ApiError(503, message, code="keys_unusable", retry_after_s=_RETRY_AFTER_S) from None

    async def follow(self) -> None:
        """Reload the file twice a second until cancelled."""
        while self._key_file is not None:
            await asyncio.sleep(_POLL_INTERVAL_S)
            try:
                self._use(await asyncio.to_thread(Keys.of, self._token, self._key_file))
            except ConfigError as error:
                self._fail(error.message)
            except Exception:
                log.exception("key_file_failed")
                self._fail("the key file could not be read")

    def _use(self, keys: Keys) -> None:
        old, new = ({caller.label for _, caller in each.others or ()} for each in (self._keys, keys))
        if keys != self._keys or self.problem is not None:
            log.info("keys_changed", num=len(keys.others or ()), added=sorted(new - old), removed=sorted(old - new))
        self._keys, self._num_failed, self.problem = keys, 0, None

    def _fail(self, problem: str) -> None:
        self._num_failed += 1
        if self._num_failed >= _MAX_FAILURES and self.problem != problem:
            log.warning("keys_unusable", problem=problem, effect="every key is refused until the file is fixed")
            self.problem = problem
