"""Decompresses gzip and zstd while reading, and refuses decompression bombs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator

from tunesmith.core.errors import DataError

_CODECS = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_MAX_RATIO = 250  # chats of one template shrink to a fiftieth at most
_FREE = 64 << 20  # bytes that may come out before the ratio counts


def codec_of(beginning: bytes) -> str | None:
    """Return the compression of a file that begins with these bytes, or None."""
    return next((codec for mark, codec in _CODECS if beginning.startswith(mark)), None)


def decompressed(
    codec: str, compressed: Iterable[bytes], size: int, name: str, num_lines: Callable[[], int]
) -> Iterator[bytes]:
    """Yield the text of a compressed file in chunks of `size` bytes. `num_lines` returns how many lines were read."""
    import pyarrow as pa

    source = _CompressedFile(compressed)
    num_out = 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(source, mode="r"), codec) as stream:
            while chunk := stream.read(size):
                num_out += len(chunk)
                if num_out > max(_FREE, _MAX_RATIO * source.num_bytes):
                    raise DataError(
                        f"{name} decompresses to more than {_MAX_RATIO} times its size, like a decompression bomb; "
                        f"if it is not one, decompress it first: {codec} -d"
                    )
                yield chunk
    except OSError as error:
        if source.failed is not None:
            raise source.failed from None
        how = "is cut off" if "Truncated" in str(error) else "is damaged"
        raise DataError(
            f"{name} {how}: its {codec} data ends wrongly after line {num_lines()}; copy it again"
        ) from None


class _CompressedFile(io.RawIOBase):
    """A readable file over chunks of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._left = b""
        self.num_bytes = 0
        self.failed: DataError | None = None
        """What reading the file itself raised: on its way through the codec it would lose its kind."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._left:
            try:
                self._left = next(self._chunks, b"")
            except DataError as error:
                self.failed = error
                raise OSError(str(error)) from None
        given = self._left[: len(buffer)]
        buffer[: len(given)] = given
        self._left = self._left[len(given) :]
        self.num_bytes += len(given)
        return len(given)
