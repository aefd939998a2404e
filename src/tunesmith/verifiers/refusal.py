"""`refusal`: whether an answer declines to answer. Words alone decide, so it is off unless a profile names it."""

from __future__ import annotations

import re

from tunesmith.core.errors import quoted
from tunesmith.verifiers.base import Finding, Interaction, NoSettings, Verifier

_HEAD_CHARS = 300
"""A refusal stands at the beginning; further on it may be quoted, or be about one part of the question."""
_NOT_ABLE = r"(?:can(?:['’]?t|not| not)|could(?:n['’]t| not)|won['’]?t|will not|(?:am|['’]m) (?:not able|unable) to)"
_DO = (
    r"(?:help|assist|answer|comply|provide|do (?:that|this|so)|fulfil+|discuss|create|write|generate|share|give|"
    r"engage|support|continue|respond|participate|offer)"
)
_REFUSAL = re.compile(
    rf"\bI (?:\w+ ){{0,2}}?{_NOT_ABLE} (?:\w+ )?{_DO}\b"
    rf"|\bI{_NOT_ABLE} {_DO}\b"  # I'm unable to …
    r"|\bI (?:must|have to) (?:\w+ )?(?:decline|refuse)\b"
    r"|\b(?:it (?:is|would be)|that (?:is|would be)) against my (?:guidelines|policy|programming)\b"
    r"|\bas an? (?:AI|language model|assistant)\b[^.\n]{0,60}\bI (?:can(?:['’]?t|not)|do(?:n['’]t| not))\b"
    r"|\bich (?:kann|darf|werde) (?:\w+ ){0,3}nicht (?:\w+ ){0,2}(?:helfen|beantworten|unterstützen|weiterhelfen)\b"
    r"|\b(?:dabei|damit|hierbei) kann ich (?:\w+ ){0,2}nicht (?:\w+ )?helfen\b"
    r"|\bje ne (?:peux|puis) (?:pas )?(?:\w+ )?(?:aider|répondre|fournir)\b",
    re.IGNORECASE,
)


def _refusal(interaction: Interaction, settings: NoSettings) -> Finding:
    found = _REFUSAL.search(interaction.answer[:_HEAD_CHARS])
    if found is None:
        return Finding(1.0)
    return Finding(0.0, flagged=True, reason=f"the answer declines: {quoted(' '.join(found[0].split()), 60)}")


REFUSAL = Verifier("refusal", "whether the answer declines to answer, by its first words", NoSettings, _refusal)
