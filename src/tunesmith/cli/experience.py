"""`tunesmith experience`: add, import, list, show, stats; and `tunesmith feedback`: add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.output import (
    Column,
    age,
    coloured,
    first_line,
    heading,
    print_id,
    print_json,
    say,
    several,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, OfProfile, Profile, command_group, open_client
from tunesmith.cli.progress import preparing
from tunesmith.core.errors import UsageError
from tunesmith.core.errors import quoted as show_text

if TYPE_CHECKING:
    from tunesmith.client.experience_views import ExperienceDetail, ExperienceView

commands = command_group("What the model did, what it is worth, and what was learnt from it.")
feedback_commands = command_group("What people think of an answer.")
Id = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIENCE", help="Id of an experience, its beginning, or PROFILE:KEY.", show_default=False
    ),
]
_SHOWN_TURNS = 20


def _option(flag: str, help_text: str, metavar: str = "TEXT") -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, show_default=False)


@commands.command()
def add(  # noqa: PLR0913, PLR0917 - the options of one command
    ctx: typer.Context,
    profile: Profile,
    prompt: Annotated[str, _option("--prompt", "What the person asked.")],
    answer: Annotated[str, _option("--answer", "What the model answered.")],
    system: Annotated[str | None, _option("--system", "The system message.")] = None,
    key: Annotated[
        str | None, _option("--key", "Permanent unique key; adding the same key again changes nothing.")
    ] = None,
    next_turn: Annotated[str | None, _option("--next-turn", "What the person said next.")] = None,
    context: Annotated[
        list[str] | None,
        _option("--context", "source, session, served_by, template, task_type or reference.", "KEY=VALUE"),
    ] = None,
    about: Annotated[list[str] | None, typer.Option("--about", hidden=True)] = None,  # the former name of --context
) -> None:
    """Store one interaction; it is scored and classified at once."""
    head = [] if system is None else [{"role": "system", "content": system}]
    messages = [*head, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    pairs = {**_pairs("--about", about), **_pairs("--context", context)}
    fields: Any = {"source": "cli", **pairs, "key": key, "next_turn": next_turn}
    with open_client(ctx) as client:
        added = client.experiences.add(profile, messages, **fields)
    say(coloured(added.class_name, f"{added.class_name}{'' if added.is_new else ' (it was there already)'}"))
    for reason in added.reasons:
        say(f"  {reason}")
    print_id(added.id)


@commands.command("import")
def import_files(
    ctx: typer.Context,
    profile: Profile,
    files: Annotated[
        list[str], typer.Argument(metavar="FILES", help="JSONL and what else datasets are made of.", show_default=False)
    ],
    source: Annotated[str | None, _option("--source", "Where they came from; else the file's name.", "NAME")] = None,
    json: Json = False,
) -> None:
    """Store every answer in the files as an experience.

    A label is a rating of its answer; of a pair, the worse answer is stored and the better one corrects it. Importing a
    file again changes nothing.
    """
    with open_client(ctx) as client, preparing() as on_progress:
        imported = client.experiences.import_files(profile, files, source=source, on_progress=on_progress)
    if json:
        print_json(imported)
        return
    stay = f" ({imported.num_forgotten} of them forgotten, and stay so)" if imported.num_forgotten else ""
    known = f"{imported.num_known} known before{stay}"
    say(f"{imported.num_new} new, {known}, {several(imported.num_refused, 'line')} left out")
    show_fields(sorted(imported.classes.items()))
    for problem in imported.problems:
        say(coloured("warning", f"! {problem}"))
    if imported.last_id is not None:
        print_id(imported.last_id)


@commands.command("list")
def list_experiences(
    ctx: typer.Context,
    profile: OfProfile = None,
    class_name: Annotated[str | None, _option("--class", "Only those of this class, e.g. gold.", "CLASS")] = None,
    where: Annotated[
        list[str] | None,
        _option("--where", "Only those whose state, source, session or task_type is this.", "KEY=VALUE"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """The newest first; FIXED counts the corrections."""
    filters: Any = {**_pairs("--where", where), "profile": profile, "class_name": class_name}
    with open_client(ctx) as client:
        found = client.experiences.list(limit=limit, **filters)
    if json:
        print_json(found)
        return
    rows = [
        (e.id, coloured(e.class_name), _rating(e), e.feedback.num_corrections or "", age(e.captured_at),
         first_line(e.question))
        for e in found
    ]  # fmt: skip
    columns = [Column("ID"), Column("CLASS"), Column("RATED", align="right"), Column("FIXED", align="right"),
               Column("AGE"), Column("QUESTION", "cut")]  # fmt: skip
    show_table(columns, rows, empty=_nothing(filters))


@commands.command()
def show(ctx: typer.Context, experience_id: Id, json: Json = False) -> None:
    """What was said, what each verifier and rater thinks of it, and its history."""
    with open_client(ctx) as client:
        detail = client.experiences.show(experience_id)
    if json:
        print_json(detail)
        return
    _describe(detail)


@commands.command()
def stats(ctx: typer.Context, profile: OfProfile = None, json: Json = False) -> None:
    """How many there are, by profile and class; FIXED are those with a correction."""
    with open_client(ctx) as client:
        found = client.experiences.stats(profile)
    if json:
        print_json(found)
        return
    names = ("gold", "needs_improvement", "ambiguous", "quarantined")
    rows = [
        (
            s.profile,
            s.num,
            *(s.classes.get(name, 0) for name in names),
            s.states.get("collected", 0),
            s.num_rated,
            s.num_corrected,
            s.states.get("forgotten", 0),
        )
        for s in found
    ]
    heads = ("ALL", "GOLD", "POOR", "AMBIGUOUS", "SUSPECT", "UNUSED", "RATED", "FIXED", "FORGOTTEN")
    columns = [Column("PROFILE", "fold"), *(Column(name, align="right") for name in heads)]
    show_table(columns, rows, empty="No experience yet: tunesmith experience add PROFILE --prompt … --answer …")


@feedback_commands.command("add")
def add_feedback(
    ctx: typer.Context,
    experience_id: Id,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[RATING]", help="helpful, partial, irrelevant, up, down, or 0 to 1.", show_default=False
        ),
    ] = None,
    rater: Annotated[str | None, _option("--rater", "Who says so; else you.", "NAME")] = None,
    comment: Annotated[str | None, _option("--comment", "In words; never learnt as an answer.")] = None,
    correction: Annotated[str | None, _option("--correction", "The answer that should have been given.")] = None,
) -> None:
    """Rate, comment or correct an answer; its class is decided again.

    The last word of each rater counts.
    """
    if value is None and comment is None and correction is None:
        raise UsageError("nothing is said: give a rating (helpful, partial, irrelevant), --comment or --correction")
    with open_client(ctx) as client:
        rated = client.feedback.add(experience_id, value, rater=rater, comment=comment, correction=correction)
    mean = (
        "" if rated.feedback.mean is None else f", {rated.feedback.mean:.2f} by {several(rated.feedback.num, 'rater')}"
    )
    say(coloured(rated.class_name, f"{rated.experience_id} is {rated.class_name}{mean}"))
    for reason in rated.reasons:
        say(f"  {reason}")
    print_id(rated.id)


def _pairs(flag: str, texts: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts or ()]
    for key, equals, _ in pairs:
        if not equals:
            raise UsageError(f"{flag} {show_text(key)}: write it as KEY=VALUE, e.g. {flag} session=s1")
    return {key.strip(): value for key, _, value in pairs}


def _nothing(filters: Mapping[str, str | None]) -> str:
    """What is said where nothing is listed: nothing is there, or nothing is like this."""
    names = {"profile": "--profile", "class_name": "--class"}
    asked = [f"{names.get(name, name)}={value}" for name, value in filters.items() if value is not None]
    if asked:
        return f"No experience matches {', '.join(asked)}; without a filter, `tunesmith experience list` shows all."
    return "No experience here yet: tunesmith experience add PROFILE --prompt … --answer …"


def _rating(experience: ExperienceView) -> str:
    feedback = experience.feedback
    if feedback.mean is not None:
        return f"{feedback.mean:.2f} ({feedback.num})"
    return "complaint?" if feedback.num_complaints else ""


def _use(detail: ExperienceDetail) -> tuple[str, str | None]:
    """What the version that has it did with it: only what is in the train split was learnt."""
    split = next((each.split for each in detail.datasets if each.dataset_id == detail.dataset_id), None)
    if detail.adapter_id is None or split not in ("heldout", "validation"):
        return "learnt by", detail.adapter_id
    if split == "heldout":
        return "held out", f"it judged {detail.adapter_id}, and is never learnt"
    return "validation", f"it measured the training of {detail.adapter_id}, and was not learnt"


def _describe(detail: ExperienceDetail) -> None:
    experience = detail.experience
    show_fields(
        [
            ("experience", experience.id),
            ("profile", experience.profile),
            ("class", coloured(experience.class_name)),
            ("because", "; ".join(experience.reasons)),
            ("state", experience.state + (", waits for a review" if detail.in_review else "")),
            ("dataset", detail.dataset_id),
            ("run", detail.run_id),
            _use(detail),
            ("rated", _rating(experience)),
            ("source", experience.source),
            ("session", experience.session),
            ("served by", experience.served_by),
            ("served to", experience.key_label and f"API key {experience.key_label}"),
            ("template", experience.template),
            ("task type", experience.task_type),
            ("captured", age(experience.captured_at)),
            ("key", experience.key),
        ],
        indent=0,
    )
    heading("Conversation")
    left_out = len(detail.messages) - _SHOWN_TURNS
    if left_out > 0:
        say(f"  … {several(left_out, 'earlier message')}; --json shows them")
    show_fields([(str(m["role"]), m.get("content") or "(a call)") for m in detail.messages[-_SHOWN_TURNS:]])
    show_fields([("reference", detail.reference)])
    _describe_judgements(detail)
    if detail.datasets:
        heading("Datasets it was in")
        inside = [(member.dataset_id, member.split, member.role, member.reason) for member in detail.datasets]
        show_table([Column("DATASET"), Column("SPLIT"), Column("ROLE"), Column("WHY", "fold")], inside, indent=2)
    heading("History")
    rows = [(age(e.at), e.action, e.actor, e.reason) for e in detail.events]
    show_table([Column("AGE"), Column("ACTION"), Column("ACTOR"), Column("REASON", "fold")], rows, indent=2)


def _describe_judgements(detail: ExperienceDetail) -> None:
    from tunesmith.verifiers.registry import find_verifier

    if detail.findings:
        heading("Verifiers")
        verifiers = {name: find_verifier(name) for name in detail.findings}
        about = {name: verifier.says for name, verifier in verifiers.items() if verifier is not None}
        rows = [
            (
                name,
                "" if f.score is None else f"{f.score:.2f}",
                "!" if f.flagged else "",
                f.reason or about.get(name, ""),
            )
            for name, f in detail.findings.items()
        ]
        columns = [
            Column("NAME"),
            Column("SCORE", align="right"),
            Column("FLAG"),
            Column("REASON, OR WHAT IT LOOKS AT", "fold"),
        ]
        show_table(columns, rows, indent=2)
    if detail.feedback:
        heading("Feedback")
        said = [
            (f.said_by, "" if f.value is None else f"{f.value:.2f}", f"{f.confidence:g}", age(f.created_at), _said(f))
            for f in detail.feedback
        ]
        columns = [Column("RATER"), Column("RATING", align="right"), Column("CONFIDENCE", align="right"),
                   Column("AGE"), Column("SAID", "fold")]  # fmt: skip
        show_table(columns, said, indent=2)
    if detail.corrections:
        heading("Teachers")
        taught = [
            (c.teacher, c.state, age(c.created_at), f"{c.reason}\nanswer: {c.answer}" if c.answer else c.reason)
            for c in detail.corrections
        ]
        columns = [Column("TEACHER", "fold"), Column("DECISION"), Column("AGE"), Column("WHY, AND WHAT", "fold")]
        show_table(columns, taught, indent=2)


def _said(feedback: Any) -> str:
    parts = [feedback.comment, feedback.correction and f"should be: {feedback.correction}"]
    return "; ".join(part for part in parts if part)
