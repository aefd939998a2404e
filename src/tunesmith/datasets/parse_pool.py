"""Parses blocks in child processes; results come in the order of the blocks, whatever the number of processes.

Started as `python -m tunesmith.datasets.parse_pool RULES` it is such a child: it answers each block on stdin with a
parsed block on stdout, and ends when stdin ends. So no child outlives its parent, however that ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import TunesmithError
from tunesmith.datasets.readers.text import Block

if TYPE_CHECKING:
    from tunesmith.datasets.blocks import ParsedBlock

_BLOCK = struct.Struct("<iqqqBqQ")  # source, first_line, offset, end, ends_open, num_skipped, bytes of text
_SIZE = struct.Struct("<Q")
_PIPE = 1 << 20  # bytes in a pipe at most, where the system lets us: a block then passes in one go


@dataclass(frozen=True, slots=True)
class ParseRules:
    """What of the options matters for a line. Apart from them, because a child that imports less starts sooner."""

    heldout_share: float
    validation_share: float
    max_line_bytes: int
    control_tokens: tuple[str, ...] = ()
    format: str = "auto"
    windows: str = "whole"
    where: tuple[str, ...] = ()
    screens: tuple[str, ...] = ()
    cases: str = ""
    """The file of the cases that no row may overlap; none: there are no cases."""
    kept_splits: str = ""
    """The file of the groups that keep a split which the shares would not give them; none: there are none."""
    detectors: tuple[str, ...] = ()


class ParsePool:
    """Child processes that parse. Each has a thread here that waits for it; the parent does the rest of the work."""

    def __init__(self, rules: ParseRules, num_processes: int) -> None:
        argv = [sys.executable, "-P", "-m", "tunesmith.datasets.parse_pool", json.dumps(astuple(rules))]
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="parse")
        self._children: list[subprocess.Popen[bytes]] = []
        for _ in range(num_processes):
            child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=_PIPE, env=child_environment(os.environ)
            )
            self._children.append(child)
            self._idle.put(child)

    def __enter__(self) -> ParsePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self._children:
            child.kill()  # it holds nothing; a thread that waits for it wakes up
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.communicate()

    def parse(self, blocks: Iterable[Block]) -> Iterator[ParsedBlock]:
        """Each block parsed, in order; two for each process are under way, so memory is bounded."""
        pending: deque[Future[ParsedBlock]] = deque()
        for block in blocks:
            pending.append(self._threads.submit(self._ask, block))
            if len(pending) > 2 * len(self._children):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _ask(self, block: Block) -> ParsedBlock:
        from tunesmith.datasets.blocks import ParsedBlock

        child = self._idle.get()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            _write_block(child.stdin, block)
            return ParsedBlock.from_bytes(_read(child.stdout, _SIZE.unpack(_read(child.stdout, _SIZE.size))[0]))
        except (OSError, EOFError):
            raise TunesmithError("a process that parses the data has ended; is memory short? try again") from None
        finally:
            self._idle.put(child)


def _write_block(sink: IO[bytes], block: Block) -> None:
    head = (block.source, block.first_line, block.offset, block.end, block.is_unterminated, block.num_skipped)
    sink.write(_BLOCK.pack(*head, len(block.text)))
    sink.write(block.text)
    sink.flush()


def _read(source: IO[bytes], size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _answer(rules: ParseRules, source: IO[bytes], sink: IO[bytes]) -> None:
    from tunesmith.datasets.blocks import BlockParser

    parser = BlockParser(rules)
    while head := source.read(_BLOCK.size):
        number, first_line, offset, end, is_unterminated, num_skipped, size = _BLOCK.unpack(head)
        block = Block(number, first_line, offset, _read(source, size), end, bool(is_unterminated), num_skipped)
        data = parser.parse(block).to_bytes()
        sink.write(_SIZE.pack(len(data)))
        sink.write(data)
        sink.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends this process
    try:
        _answer(ParseRules(*json.loads(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, EOFError):
        sys.exit(1)  # the parent is gone
