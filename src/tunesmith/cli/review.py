"""`tunesmith experience review`: what waits for a person, and their decision about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import age, coloured, print_id, print_json, say, several, show_fields
from tunesmith.cli.parser import Json, open_client
from tunesmith.core.errors import UsageError

if TYPE_CHECKING:
    from tunesmith.experience.review import Decided, Suspect

_PREFIX = "xp-"
_SHOWN = 20
REVIEW_EXAMPLE = 'Example: tunesmith experience review xp-4t9k --accept --reason "the key is a sample"'


def review(  # noqa: PLR0913, PLR0917 - the options of one command
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROFILE|EXPERIENCE", help="A profile, or ids of experiences.", show_default=False),
    ] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Overrule what is suspected.")] = False,
    reject: Annotated[bool, typer.Option("--reject", help="Keep it out for good.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Reason, recorded in the event history.")] = "",
    all_matching: Annotated[
        str | None,
        typer.Option("--all-matching", metavar="SCREEN", help="All that wait for this: a screen, or rejected_runs."),
    ] = None,
    all_with: Annotated[
        str | None, typer.Option("--all-with", hidden=True)
    ] = None,  # the former name of --all-matching
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Show at most so many.")] = _SHOWN,
    json: Json = False,
) -> None:
    """What waits for a decision, and deciding: --accept or --reject.

    Waiting are suspects that a screen has stopped, and what was in two rejected runs.
    """
    screen = all_with if all_matching is None else all_matching
    ids, profile = _parted(words or [])
    decision = _decision(accept, reject)
    with open_client(ctx) as client:
        if decision is None:
            if screen is not None:
                raise UsageError("--all-matching decides: add --accept or --reject, and --reason")
            waiting = (
                [client.experiences.suspect(each) for each in ids]
                if ids
                else client.experiences.in_review(profile, limit=limit)
            )
            _show(waiting, limit, json)
            return
        if screen is not None:
            if ids:
                raise UsageError("name experiences or --all-matching, not both")
            decided = client.experiences.review_all_with(screen, decision, reason=reason, profile=profile)
        elif ids:
            decided = client.experiences.review(ids, decision, reason=reason)
        else:
            raise UsageError(f"--{decision} what? Name experiences by their ids, or --all-matching SCREEN")
    _show_decided(decided, json)


def _parted(words: list[str]) -> tuple[list[str], str | None]:
    """Ids of experiences, or one profile."""
    ids = [word for word in words if word.startswith(_PREFIX) or ":" in word]
    names = [word for word in words if word not in ids]
    if len(names) > 1 or (ids and names):
        raise UsageError("name one profile, or experiences by their ids, which begin with xp-, or as PROFILE:KEY")
    return ids, names[0] if names else None


def _decision(accept: bool, reject: bool) -> str | None:
    if accept and reject:
        raise UsageError("--accept or --reject, not both")
    return "accept" if accept else "reject" if reject else None


def _show(waiting: list[Suspect], limit: int, as_json: bool) -> None:
    if as_json:
        print_json(waiting)
        return
    if not waiting:
        say("Nothing waits for a review.")
    for suspect in waiting:
        about = f"{suspect.class_name}, {suspect.state} · {suspect.profile}, {age(suspect.captured_at)}"
        say(coloured(suspect.class_name, f"{suspect.id}  {about}"))
        show_fields(
            [
                *(("why", reason) for reason in suspect.why),
                ("decided", suspect.review),
                ("source", suspect.source),
                ("question", suspect.question),
                ("answer", suspect.answer),
                ("correction", suspect.correction),
            ]
        )
    if len(waiting) == limit:
        say(f"… perhaps more: these are the newest {limit}; --limit N shows more")


def _show_decided(decided: list[Decided], as_json: bool) -> None:
    if as_json:
        print_json(decided)
        return
    for each in decided[:_SHOWN]:
        known = "" if each.is_new else " (decided before)"
        say(coloured(each.class_name, f"{each.id} is {each.class_name}{known}"))
    if len(decided) > _SHOWN:
        say(f"… and {several(len(decided) - _SHOWN, 'other')}")
    print_id(decided[-1].id if decided else "nothing waits for that")
