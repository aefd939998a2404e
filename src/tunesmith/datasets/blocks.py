"""Turns a block of lines into columns: validated, scored, each row with its split. Pure, so any process can do it."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.core.errors import quoted
from tunesmith.datasets.columns import ParsedRow, batch_from_bytes, batch_to_bytes, to_batch
from tunesmith.datasets.example import BadRow, Reason
from tunesmith.datasets.formats.lines import Found, LineImporter
from tunesmith.datasets.parse_pool import ParseRules
from tunesmith.datasets.readers.text import Block
from tunesmith.datasets.rejected_rows import RejectedRows
from tunesmith.datasets.row_identity import RowIdentity
from tunesmith.datasets.screens.block import BlockScreener, Screened
from tunesmith.datasets.splits import SplitRule, read_kept


@dataclass(frozen=True, slots=True)
class ParsedBlock:
    """What a block held."""

    end: int
    """How much of the source has been read with this block."""
    num_rows: int
    """Its lines, without the blank ones."""
    num_blank: int
    passed_over: dict[str, int]
    bad: RejectedRows
    ignored_fields: dict[str, int]
    batch: Any
    """The valid rows, as an Arrow record batch."""
    screened: Screened

    def to_bytes(self) -> bytes:
        """The block for another process."""
        facts = {
            "end": self.end,
            "num_rows": self.num_rows,
            "num_blank": self.num_blank,
            "passed_over": self.passed_over,
            "bad": self.bad.to_json(),
            "ignored_fields": self.ignored_fields,
            "screened": self.screened.to_json(),
        }
        return batch_to_bytes(self.batch, json.dumps(facts).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> ParsedBlock:
        batch, text = batch_from_bytes(data)
        facts = json.loads(text)
        facts["bad"], facts["screened"] = RejectedRows.from_json(facts["bad"]), Screened.from_json(facts["screened"])
        return cls(**facts, batch=batch)


class BlockParser:
    """Parses blocks, one after the other; nothing of one block matters for the next."""

    def __init__(self, rules: ParseRules) -> None:
        self._rules = rules
        self._screener = BlockScreener(rules.screens, rules.cases, rules.detectors)
        kept = read_kept(rules.kept_splits) if rules.kept_splits else None
        self._identity = RowIdentity(SplitRule(rules.heldout_share, rules.validation_share, kept))
        longest_first = sorted(rules.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def parse(self, block: Block) -> ParsedBlock:
        """Every line of a block."""
        was_enabled = gc.isenabled()
        gc.disable()  # rows hold no cycles: looking for them at every few hundred allocations would find nothing
        try:
            return self._parsed(block)
        finally:
            if was_enabled:
                gc.enable()

    def _parsed(self, block: Block) -> ParsedBlock:
        rejected, importer = RejectedRows(), LineImporter(self._rules)
        rows: list[ParsedRow] = []
        if block.num_skipped:
            rejected.add(block.source, block.first_line, self._too_long(block.num_skipped))
            return ParsedBlock(block.end, 1, 0, {}, rejected, {}, to_batch(rows, block.source), Screened())
        if not block.text or block.text.isspace():  # a small packed file may hold millions of blank lines
            num_blank = block.text.count(b"\n") + 1
            return ParsedBlock(block.end, 0, num_blank, {}, rejected, {}, to_batch(rows, block.source), Screened())
        lines = block.text.split(b"\n")
        open_index = len(lines) - 1 if block.is_unterminated else -1
        read, identify = importer.read, self._identity.identify
        num_blank = 0
        for index, line in enumerate(lines):
            if not line or line.isspace():
                num_blank += 1
                continue
            try:
                found = read(line, is_unterminated=index == open_index)
                if self._control is not None:
                    self._refuse_control_tokens(found, self._control)
            except BadRow as bad:
                if bad.at_byte is not None and block.offset >= 0:
                    place = block.offset + sum(len(before) + 1 for before in lines[:index]) + bad.at_byte
                    bad.problem += f" at byte {place} of the file"
                rejected.add(block.source, block.first_line + index, bad)
                continue
            for row in found:
                rows.append(identify(row, block.first_line + index))
        passed_over = dict(importer.passed_over)
        ignored = dict(importer.ignored_fields)
        num_rows, batch = len(lines) - num_blank, to_batch(rows, block.source)
        screened = self._screener.screen(rows)
        return ParsedBlock(block.end, num_rows, num_blank, passed_over, rejected, ignored, batch, screened)

    def _refuse_control_tokens(self, found: Sequence[Found], control: re.Pattern[str]) -> None:
        """A text that the model would read as the end of a turn, or the start of another, is no text."""
        for _, contents, _ in found:
            for content in contents:
                if (token := control.search(content)) is not None:
                    problem = f"a text holds {quoted(token[0])}, a control token of the base model"
                    raise BadRow(Reason.CONTROL_TOKEN, "", problem, "remove it, or write it differently")

    def _too_long(self, num_bytes: int) -> BadRow:
        problem = f"has {num_bytes} bytes, more than {self._rules.max_line_bytes}"
        return BadRow(Reason.TOO_LONG, "", problem, "split or remove the line")
