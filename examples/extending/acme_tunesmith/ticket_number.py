"""A verifier: tickets in an answer are written as AC-104233, so that a click on one finds it."""

from __future__ import annotations

import re

from pydantic import Field

from tunesmith.core.section import Section
from tunesmith.verifiers.base import Finding, Interaction, Verifier


class TicketSettings(Section):
    prefix: str = Field(default="AC", pattern="^[A-Z]{2,5}$")
    """Letters in front of a ticket's number."""


def look(interaction: Interaction, settings: TicketSettings) -> Finding:
    written = re.findall(rf"\b{settings.prefix}[ _#-]{{0,3}}\d+\b", interaction.answer, re.IGNORECASE)
    if not written:
        return Finding(None, reason="the answer names no ticket")
    wrong = [ticket for ticket in written if not re.fullmatch(rf"{settings.prefix}-\d{{6}}", ticket)]
    reason = f"{wrong[0][:40]} is not written as {settings.prefix}-104233" if wrong else ""
    return Finding(1.0 - len(wrong) / len(written), flagged=bool(wrong), reason=reason)


VERIFIER = Verifier(
    name="ticket_number",
    says="share of the answer's tickets that are written as AC-104233",
    settings=TicketSettings,
    look=look,
)
