"""`tunesmith plan`: what the queue will do, or what a run of a profile would be before it is queued."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.output import (
    Column,
    coloured,
    duration,
    first_line,
    heading,
    print_json,
    say,
    several,
    show_fields,
    show_table,
)
from tunesmith.cli.parser import Json, Set, open_client
from tunesmith.cli.progress import preparing
from tunesmith.core.errors import UsageError

if TYPE_CHECKING:
    from tunesmith.client import Client
    from tunesmith.orchestration.plan import RunPlan
    from tunesmith.training.memory_estimate import Outlook
    from tunesmith.training.rules.estimate import Estimate

_PARTS = (
    ("weights", "the base"),
    ("trained", "what is trained, its gradients and moments"),
    ("activations", "what the layers keep of the largest pass"),
    ("head", "at the output layer"),
    ("transient", "for a moment in the backward pass or the update"),
    ("process", "interpreter, libraries and data"),
)


def plan(
    ctx: typer.Context,
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", help="Name of a profile.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None, typer.Argument(metavar="DATA", help="A dataset id, or JSONL files.", show_default=False)
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """What waits, or what a run would need: time and memory.

    Alone: what is under way and what waits, in order, and why. With a profile: steps, time and memory of a run on this
    data, how it would fit its device, or why it would not; nothing is queued, and no device is needed.
    """
    with open_client(ctx) as client:
        if profile is None:
            if overrides:
                raise UsageError("--set changes a run that is planned; name a profile: tunesmith plan PROFILE [DATA]")
            _queue(client, as_json=json)
            return
        source = data[0] if data and len(data) == 1 else [Path(file) for file in data] if data else None
        with preparing() as on_progress:
            made = client.profiles.plan(profile, source, overrides or (), on_progress)
    if json:
        print_json(made)
    else:
        _show(made)


def _queue(client: Client, *, as_json: bool) -> None:
    planned = client.runs.plan()
    workers = client.system.workers()
    stopped = client.system.show_estop().is_on
    if as_json:
        print_json({"runs": planned, "workers": workers, "estop": stopped})
        return
    rows = [
        (
            p.run.id,
            p.run.profile,
            coloured(p.run.state),
            p.run.priority,
            p.num_examples,
            "" if p.estimate_s is None else f"~{duration(max(p.estimate_s, 1.0))}",
            first_line(p.run.waits_for or p.run.reason),
        )
        for p in planned
    ]
    columns = [Column("RUN"), Column("PROFILE", "fold"), Column("STATE"), Column("PRIORITY"),
               Column("EXAMPLES", align="right"), Column("TRAINING", align="right"), Column("WHY", "fold")]  # fmt: skip
    show_table(columns, rows, empty="Nothing is waiting and nothing is under way.")
    say(f"\n{several(len(workers), 'worker')} running{'; the e-stop is on' if stopped else ''}")


def _show(made: RunPlan) -> None:
    schedule = made.schedule
    fields = [("profile", made.profile), ("trainer", f"{made.trainer} · {made.method} · {made.tier}")]
    given = "" if made.newest_dataset_id is None else f"{made.newest_dataset_id}, the newest (none given): "
    if schedule is not None:
        told = f"{several(schedule.num_examples, 'example')}, about {schedule.num_tokens} tokens to train on"
        steps = f"about {several(schedule.num_steps, 'step')}"
        fields += [("data", f"{given}{told}"), ("training", f"{steps}, {_time(schedule.estimate)}")]
    else:
        fields.append(("data", "none given: for examples as long as recipe.max_length allows"))
    if made.per_thousand is not None:
        fields += [
            ("training", f"for each 1,000 examples at most {duration(max(made.per_thousand.seconds, 1.0))}"),
            ("from", made.per_thousand.basis),
        ]
    show_fields(fields, indent=0)
    if made.memory is None:
        say(f"\nTrainer {made.trainer} makes no memory plan.")
    else:
        _memory(made.memory)


def _time(guess: Estimate) -> str:
    return f"{'under a second' if guess.seconds < 1 else f'about {duration(guess.seconds)}'} ({guess.basis})"


def _memory(outlook: Outlook) -> None:
    from tunesmith.training.rules.memory_forecast import size_text

    made = outlook.plan
    again = f"{made.checkpointed_layers} of {made.num_layers} layers activation-checkpointed"
    earlier = f"from {several(outlook.num_earlier, 'earlier run')} of the same shape"
    heading("Memory")
    show_fields(
        [
            ("device", f"{size_text(made.limit_bytes)} ({outlook.device_basis})"),
            ("usable", f"{size_text(outlook.usable_bytes)}; the rest stays free for gaps and workspaces"),
            ("passes", f"of up to {made.pack_tokens} tokens, {again}"),
            ("why", made.reason),
            ("correction", f"× {made.correction:.2f} {earlier if outlook.num_earlier else '(no earlier run)'}"),
        ]
    )
    say()
    rows = [(name, size_text(size), what) for name, what in _PARTS if (size := getattr(made.forecast, name))]
    rows.append(("forecast", size_text(made.forecast.total), "at the peak"))
    show_table([Column("PART"), Column("SIZE", align="right"), Column("WHAT", "fold")], rows, indent=2)
