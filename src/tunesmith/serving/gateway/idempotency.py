"""Idempotency: a repeated `Idempotency-Key` returns the first answer, and is refused with another body.

In memory, for ten minutes: after a restart of the server a request is answered again. Streamed answers are not
stored; a repeated one is generated again.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from tunesmith.core.files import canonical_json, sha256_text
from tunesmith.serving.gateway.api_errors import ApiError

HEADER = "idempotency-key"
_MAX_KEY = 255
_MAX_RECORDS = 1000
_MAX_ANSWER_BYTES = 1 << 20
_MAX_BYTES_HELD = 64 << 20
"""Of all stored answers; the oldest are evicted first."""
_MAX_AGE_S = 600.0


class IdempotencyRecord:
    """The request and answer of one idempotency key."""

    def __init__(self, body_hash: str, at_s: float) -> None:
        self.body_hash = body_hash
        self.at_s = at_s
        self.is_under_way = True
        self.content: bytes | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.content or b"")

    @property
    def answer(self) -> Response | None:
        """The first answer, if it was stored."""
        if self.content is None:
            return None
        return Response(self.content, media_type="application/json", headers={"idempotent-replayed": "true"})

    def store(self, response: Response) -> Response:
        """Store the first answer unless it is streamed or too large; returns it."""
        content = bytes(getattr(response, "body", b""))
        if self.is_under_way and 0 < len(content) <= _MAX_ANSWER_BYTES:
            self.content = content
        return response


class IdempotencyCache:
    """The answers of recent idempotency keys; evicts the oldest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: OrderedDict[str, IdempotencyRecord] = OrderedDict()
        self.num_bytes = 0

    @contextmanager
    def entry(self, headers: Mapping[str, str], path: str, body: Mapping[str, Any]) -> Iterator[IdempotencyRecord]:
        """Use around the handling of a request; a request that fails frees its key."""
        key = headers.get(HEADER)
        if key is None:
            yield IdempotencyRecord("", 0.0)
            return
        if not 0 < len(key) <= _MAX_KEY:
            message = f"the Idempotency-Key is empty or longer than {_MAX_KEY} characters; send a shorter one"
            raise ApiError(400, message, code="invalid_value", param="Idempotency-Key")
        # includes the caller: the keys of two callers never match
        name = hashlib.sha256("\0".join((headers.get("authorization", ""), path, key)).encode()).hexdigest()
        record = self._enter(name, sha256_text(canonical_json(body)))
        if not record.is_under_way:
            yield record
            return
        try:
            yield record
        except BaseException:
            if self._records.get(name) is record:
                del self._records[name]
            raise
        record.is_under_way = False
        if self._records.get(name) is record:  # else it was evicted meanwhile
            self.num_bytes += record.num_bytes
            while self.num_bytes > _MAX_BYTES_HELD:
                self._evict_oldest()

    def _evict_oldest(self) -> None:
        _, record = self._records.popitem(last=False)
        if not record.is_under_way:
            self.num_bytes -= record.num_bytes

    def _enter(self, name: str, body_hash: str) -> IdempotencyRecord:
        now = self._clock()
        while self._records and (
            len(self._records) >= _MAX_RECORDS or next(iter(self._records.values())).at_s < now - _MAX_AGE_S
        ):
            self._evict_oldest()
        known = self._records.get(name)
        if known is None:
            known = self._records[name] = IdempotencyRecord(body_hash, now)
        elif known.body_hash != body_hash:
            message = "this Idempotency-Key came with another body before; send a new key with a new request"
            raise ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
        elif known.is_under_way:
            message = "the same request is being answered already; retry in a moment"
            raise ApiError(429, message, code="under_way", retry_after_s=1.0)
        return known
