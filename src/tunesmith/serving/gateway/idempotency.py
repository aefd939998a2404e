"""The same request twice: an `Idempotency-Key` brings the first answer again, and is refused for another body.

Kept in memory, for a while: a server that was started again answers anew. A streamed answer is not kept; asked again
with its key, it is written again.
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
_MOST = 1000
_MOST_BYTES = 1 << 20
_MOST_BYTES_HELD = 64 << 20
"""Of all answers together; the oldest go first."""
_FOR_S = 600.0


class Seen:
    """One key with one body."""

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
        """What was answered the first time."""
        if self.content is None:
            return None
        return Response(self.content, media_type="application/json", headers={"idempotent-replayed": "true"})

    def note(self, response: Response) -> Response:
        """The first answer is remembered, where it is one piece and not too large; one that is written again is not."""
        content = bytes(getattr(response, "body", b""))
        if self.is_under_way and 0 < len(content) <= _MOST_BYTES:
            self.content = content
        return response


class Repeats:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self.num_bytes = 0

    @contextmanager
    def watching(self, headers: Mapping[str, str], path: str, body: Mapping[str, Any]) -> Iterator[Seen]:
        """Around the handling of a request; one that fails leaves its key free."""
        key = headers.get(HEADER)
        if key is None:
            yield Seen("", 0.0)
            return
        if not 0 < len(key) <= _MAX_KEY:
            message = f"the Idempotency-Key is empty or longer than {_MAX_KEY} characters; send a shorter one"
            raise ApiError(400, message, code="invalid_value", param="Idempotency-Key")
        # of whoever asks: another caller's key is another key
        name = hashlib.sha256("\0".join((headers.get("authorization", ""), path, key)).encode()).hexdigest()
        seen = self._enter(name, sha256_text(canonical_json(body)))
        if not seen.is_under_way:
            yield seen
            return
        try:
            yield seen
        except BaseException:
            if self._seen.get(name) is seen:
                del self._seen[name]
            raise
        seen.is_under_way = False
        if self._seen.get(name) is seen:  # else it was let go meanwhile
            self.num_bytes += seen.num_bytes
            while self.num_bytes > _MOST_BYTES_HELD:
                self._let_oldest_go()

    def _let_oldest_go(self) -> None:
        _, seen = self._seen.popitem(last=False)
        if not seen.is_under_way:
            self.num_bytes -= seen.num_bytes

    def _enter(self, name: str, body_hash: str) -> Seen:
        now = self._clock()
        while self._seen and (len(self._seen) >= _MOST or next(iter(self._seen.values())).at_s < now - _FOR_S):
            self._let_oldest_go()
        known = self._seen.get(name)
        if known is None:
            known = self._seen[name] = Seen(body_hash, now)
        elif known.body_hash != body_hash:
            message = "this Idempotency-Key came with another body before; send a new key with a new request"
            raise ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
        elif known.is_under_way:
            message = "the same request is being answered already; ask again in a moment"
            raise ApiError(429, message, code="under_way", retry_after_s=1.0)
        return known
