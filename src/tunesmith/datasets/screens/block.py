"""Screens the rows of one block, in the process that parses it; what was found travels with the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.datasets.example import Split, num_prompt_of
from tunesmith.datasets.screens.backdoor_triggers import opening_of
from tunesmith.datasets.screens.contamination import read_cases
from tunesmith.datasets.screens.contradictions import Answer, short_answer
from tunesmith.datasets.screens.finding import ScreenFinding
from tunesmith.datasets.screens.near_duplicates import (
    Signature,
    decode_signatures,
    encode_signatures,
    minhash_signature,
)
from tunesmith.datasets.screens.rows import ROW_SCREENS, RowScreens
from tunesmith.datasets.screens.words import asked

if TYPE_CHECKING:
    from tunesmith.datasets.columns import ParsedRow

_HELDOUT = list(Split).index(Split.HELDOUT)


@dataclass(frozen=True, slots=True)
class Screened:
    """What was found in a block, by 64 bits of the example's id: the same content has the same findings."""

    findings: dict[int, list[ScreenFinding]] = field(default_factory=dict)
    signatures: dict[int, Signature] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    openings: dict[int, int] = field(default_factory=dict)
    """The first words of the answer."""

    def to_json(self) -> dict[str, Any]:
        found = [[key, [astuple(each) for each in findings]] for key, findings in self.findings.items()]
        answers = [(key, *answer) for key, answer in self.answers.items()]
        signatures = encode_signatures(list(self.signatures.values())).hex()
        openings = list(self.openings.items())
        return {"findings": found, "signatures": signatures, "answers": answers, "openings": openings}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Screened:
        found = {key: [ScreenFinding(*each) for each in findings] for key, findings in values["findings"]}
        signatures = {each[0]: each for each in decode_signatures(bytes.fromhex(values["signatures"]))}
        answers = {key: (group, answer) for key, group, answer in values["answers"]}
        return cls(found, signatures, answers, dict(values["openings"]))


class BlockScreener:
    """Looks at parsed rows; nothing of one block matters for the next."""

    def __init__(self, names: Sequence[str], cases: str = "", detectors: Sequence[str] = ()) -> None:
        self._rows = RowScreens([name for name in names if name in ROW_SCREENS], detectors)
        self._has_near_duplicates = "near_copy" in names
        self._has_contradictions = "contradiction" in names
        self._has_triggers = "rare_trigger" in names
        self._contamination = read_cases(Path(cases)) if cases else None
        self._is_off = not names and not cases and not detectors

    def screen(self, rows: Sequence[ParsedRow]) -> Screened:
        """What there is to say about these rows."""
        screened = Screened()
        if self._is_off:
            return screened
        for digest, group, split, *_, shape, contents in rows:
            key = int.from_bytes(digest[:8], "big")
            if found := self._rows.look(contents):
                screened.findings[key] = found
                continue
            num_prompt = num_prompt_of(shape)
            question, answer = asked(shape, contents, num_prompt), contents[num_prompt:]
            if self._contamination is not None and split != _HELDOUT:
                overlap = self._contamination.find(question, "\n".join(answer))
                if overlap is not None:
                    screened.findings[key] = [overlap]
                    continue
            if self._has_near_duplicates and not _is_labelled(shape):
                made = minhash_signature(key, question, "\n".join(answer))
                if made is not None:
                    screened.signatures[key] = made
            if self._has_contradictions and (short := short_answer(group, shape, contents)) is not None:
                screened.answers[key] = short
            if self._has_triggers and shape[num_prompt] != "|":
                screened.openings[key] = opening_of(answer[0])
        return screened


def _is_labelled(shape: str) -> bool:
    """Whether it has one answer with a label: a good and a bad one may be alike, and the difference is taught."""
    _, bar, rejected = shape.partition("|")
    return bool(bar) and (not rejected or shape[num_prompt_of(shape)] == "|")
