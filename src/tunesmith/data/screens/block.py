"""Screens the rows of one block, in the process that parses it; what was found travels with the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from tunesmith.data.screens.contradictions import Answer, short_answer
from tunesmith.data.screens.finding import Finding
from tunesmith.data.screens.near_copies import Sketch, pack, sketch, unpack
from tunesmith.data.screens.rows import ROW_SCREENS, RowScreens
from tunesmith.domain.example import num_prompt_of

if TYPE_CHECKING:
    from tunesmith.data.columns import ParsedRow


@dataclass(frozen=True, slots=True)
class Screened:
    """What was found in a block, by 64 bits of the example's id: the same content has the same findings."""

    findings: dict[int, list[Finding]] = field(default_factory=dict)
    sketches: dict[int, Sketch] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        found = [[key, [astuple(each) for each in findings]] for key, findings in self.findings.items()]
        answers = [(key, *answer) for key, answer in self.answers.items()]
        return {"findings": found, "sketches": pack(list(self.sketches.values())).hex(), "answers": answers}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Screened:
        found = {key: [Finding(*each) for each in findings] for key, findings in values["findings"]}
        sketches = {each[0]: each for each in unpack(bytes.fromhex(values["sketches"]))}
        return cls(found, sketches, {key: (group, answer) for key, group, answer in values["answers"]})


class BlockScreener:
    """Looks at parsed rows; nothing of one block matters for the next."""

    def __init__(self, names: Sequence[str]) -> None:
        self._rows = RowScreens([name for name in names if name in ROW_SCREENS])
        self._has_near_copies = "near_copy" in names
        self._has_contradictions = "contradiction" in names
        self._is_off = not names

    def screen(self, rows: Sequence[ParsedRow]) -> Screened:
        """What there is to say about these rows."""
        screened = Screened()
        if self._is_off:
            return screened
        for digest, group, *_, shape, contents in rows:
            key = int.from_bytes(digest[:8], "big")
            if found := self._rows.look(contents):
                screened.findings[key] = found
                continue
            if self._has_near_copies and (made := _sketched(key, shape, contents)) is not None:
                screened.sketches[key] = made
            if self._has_contradictions and (answer := short_answer(group, shape, contents)) is not None:
                screened.answers[key] = answer
        return screened


def _sketched(key: int, shape: str, contents: list[str]) -> Sketch | None:
    if _is_labelled(shape):
        return None
    num_prompt = num_prompt_of(shape)
    # The system message and definitions of functions are the same in many rows by design.
    asked = [text for code, text in zip(shape[:num_prompt], contents, strict=False) if code not in "sd"]
    return sketch(key, "\n".join(asked), "\n".join(contents[num_prompt:]))


def _is_labelled(shape: str) -> bool:
    """Whether it has one answer with a label: a good and a bad one may be alike, and the difference is taught."""
    _, bar, rejected = shape.partition("|")
    return bool(bar) and (not rejected or shape[num_prompt_of(shape)] == "|")
