"""What an experience looks like as a line of a dataset's source, the split of its prompt, why a line is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tunesmith.datasets.example import TOOLS, Split, num_prompt_of
from tunesmith.datasets.messages import CONTEXT_ANSWER_CODES
from tunesmith.datasets.report import MixKind, PreparedDataset, PrepareOptions
from tunesmith.datasets.splits import SplitRule, group_of, held_out_from
from tunesmith.experience.queries.candidates import StoredCandidate
from tunesmith.experience.rules.experience import ExperienceClass
from tunesmith.experience.rules.mix import Selection

Fields = dict[str, Any]
IN_TWO_SPLITS = "of a conversation that began in another split"
UNREADABLE = "not readable as an example"


def line_of(candidate: StoredCandidate, kind: MixKind) -> bytes:
    """One JSON line: the conversation with the answer to learn, or the prompt with a better and a worse answer."""
    messages, tools = _without_tools(candidate.messages)
    prompt, answer = messages[:-1], messages[-1]
    correction = {"role": "assistant", "content": candidate.correction}
    if kind == "preference" and candidate.correction is not None:
        return orjson.dumps({**tools, "prompt": prompt, "chosen": [correction], "rejected": [answer]})
    is_gold = candidate.class_name is ExperienceClass.GOLD or candidate.correction is None
    return orjson.dumps({**tools, "messages": [*prompt, answer if is_gold else correction]})


def _without_tools(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Fields]:
    """The conversation, and the definitions of functions that stand in front of it."""
    if messages[0]["role"] != TOOLS:
        return messages, {}
    return messages[1:], {TOOLS: json.loads(messages[0]["content"])}


def told_of(candidate: StoredCandidate) -> str:
    """Why it is good enough, beside its place in the mix."""
    if candidate.class_name is ExperienceClass.GOLD:
        return "; ".join(candidate.reasons)
    return f"{candidate.class_name}, corrected by {candidate.corrected_by}"


@dataclass(frozen=True, slots=True)
class Placed:
    split: Split
    group: str
    """Of its prompt."""
    held_out_from: float
    """Held out by every share above this."""


class Splitter:
    """Says for each experience in which split it falls, exactly as preparing will."""

    def __init__(
        self, options: PrepareOptions, kind: MixKind, ever_held_out: set[str], kept: Mapping[str, Split]
    ) -> None:
        from tunesmith.datasets.formats.lines import LineImporter
        from tunesmith.datasets.parse_pool import ParseRules

        rules = ParseRules(
            options.heldout_share, options.validation_share, options.max_line_bytes, windows=options.windows
        )
        self._read = LineImporter(rules).read
        self._rule = SplitRule(options.heldout_share, options.validation_share, kept)
        self._kind = kind
        self._ever_held_out = ever_held_out

    def place_of(self, candidate: StoredCandidate) -> Placed | str:
        """Its split, or why it cannot be in any.

        Turns of one conversation belong into one split: what is trained on holds the answers of the others. Preparing
        groups pairs by their whole prompt, so a pair whose prompt and whose conversation disagree stays out.
        """
        from tunesmith.datasets.example import BadRow

        try:
            # num_group: how many messages name the group; 0: those before the first trained answer
            ((shape, contents, num_group),) = self._read(line_of(candidate, self._kind))
        except (BadRow, ValueError, TypeError):
            return UNREADABLE
        num_prompt = num_prompt_of(shape)
        begin = next((place for place, code in enumerate(shape) if code in CONTEXT_ANSWER_CODES), num_prompt)
        own = group_of(shape[: num_group or num_prompt], contents)
        groups = {own, group_of(shape[:begin], contents)}
        splits = {self._rule.split_of(bytes.fromhex(group)) for group in groups}
        if len(splits) > 1:
            return IN_TWO_SPLITS
        (split,) = splits
        if split is not Split.HELDOUT and not groups.isdisjoint(self._ever_held_out):
            return "of a prompt that was held out before"
        return Placed(split, own, held_out_from(groups))


def provenance(candidate: StoredCandidate, told: Mapping[str, Any]) -> bytes:
    """A line of members.jsonl: where an example came from and why it is in. It repeats nothing of what was said."""
    about = {
        "experience": candidate.id,
        **told,
        "class": candidate.class_name,
        "corrected_by": candidate.corrected_by,
        "source": candidate.source,
        "template": candidate.template,
        "task_type": candidate.task_type,
        "captured_at": candidate.captured_at.isoformat(),
    }
    return orjson.dumps(about) + b"\n"


def why_refused(selection: Selection, prepared: PreparedDataset, kept: set[str]) -> dict[str, str]:
    """By experience that preparing left out: what it said about its line."""
    from tunesmith.datasets.quarantine.undecided import FILE_NAME

    told: dict[int, str] = {}
    for drop in prepared.report.drops:
        told.update((line.line, f"a bad row, {drop.reason}") for line in drop.first)
    aside = prepared.path / FILE_NAME
    if aside.exists():
        with aside.open(encoding="utf-8") as source:
            for text in source:
                row = json.loads(text)
                told[row["line"]] = f"suspect by screen {row['findings'][0]['screen']}"
    other = "an exact copy of another one" if prepared.report.num_duplicates else "a bad row"
    return {pick.id: told.get(line, other) for line, pick in enumerate(selection.picks, start=1) if pick.id not in kept}
