"""The words and tables of a model card. Pure; every name from elsewhere goes through `plain` or `code`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.profiles.profile import DEFAULT_LR, Method

SPLITS = (("train", "train"), ("validation", "validation"), ("held out", "heldout"))
_SPECIAL = re.compile(r"([\\`*|~]|(?<!\w)_|_(?!\w)|\](?=[(\[:]))")
_WIDTH = 100
_CODE = re.compile(r"`[^`]*`")
_BLANKS = re.compile(r"\s+")


def plain(text: str) -> str:
    """A text as Markdown shows it: one line, no markup, no HTML, whatever it holds."""
    escaped = _SPECIAL.sub(r"\\\1", _visible(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str) -> str:
    """A name or a hash; what would end the span, or begin HTML, is shown by another character."""
    return f"`{_visible(text).replace('`', chr(0x2BC)).replace('|', chr(0xA6))}`" if text else "``"


def _visible(text: str) -> str:
    line = _BLANKS.sub(" ", text).strip()
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def document(front_matter: Mapping[str, Any], sections: Sequence[tuple[str, Sequence[str]]], last: str) -> str:
    """The whole card, with `last` as its last line. Values of the front matter are JSON, which YAML reads."""
    lines = [
        "---",
        *(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front_matter.items()),
        "---",
    ]
    for number, (title, parts) in enumerate(sections):
        lines += ["", f"{'#' if number == 0 else '##'} {title}", "", _joined(parts)]
    return "\n".join([*lines, "", last]) + "\n"


def _joined(parts: Sequence[str]) -> str:
    """Paragraphs apart, the rows of tables and lists together."""
    text, before = "", ""
    for part in parts:
        goes_on = part.startswith(("|", "- ")) and before.startswith(part[0])
        text += ("\n" if goes_on else "\n\n" if text else "") + _wrapped(part)
        before = part
    return text


def _wrapped(part: str) -> str:
    """Prose in lines that a person can read as they are; tables and code stay whole."""
    if part.startswith(("|", "```")):
        return part
    indent = "  " if part.startswith("- ") else ""
    whole = _CODE.sub(lambda found: found[0].replace(" ", "\0"), part)  # a command is not broken
    lines = [
        textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in whole.split("\n")
    ]
    return "\n".join(line for wrapped in lines for line in wrapped).replace("\0", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str | None]]) -> list[str]:
    """A Markdown table; cells are Markdown already."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(cell or '' for cell in row)} |" for row in rows)]


def passes(epochs: float, max_steps: int | None) -> str:
    told = f"{epochs:g} {'pass' if epochs == 1 else 'passes'} over the training split"
    return told if max_steps is None else f"at most {max_steps:,} steps, within {told}"


def default_rate(method: str, recipe: Mapping[str, Any]) -> float:
    """The learning rate of a recipe that names none."""
    return DEFAULT_LR[Method(method)] * (0.1 if recipe.get("tuning") == "full" else 1.0)


def weights_in_words(recipe: Mapping[str, Any]) -> str:
    """Which weights were trained."""
    if recipe.get("tuning") == "full":
        return "Every weight of the model was trained."
    kind = "DoRA" if recipe.get("dora") else "rsLoRA" if recipe.get("rslora") else "LoRA"
    modules = recipe.get("target_modules", "all-linear")
    where = "all linear layers" if modules == "all-linear" else ", ".join(modules)
    base = " over the base in 4 bits (nf4)" if recipe.get("quantize") == "nf4" else ""
    embeddings = " Input and output embeddings were trained too." if recipe.get("train_embeddings") is True else ""
    return (
        f"{kind} of rank {recipe['lora_rank']}, alpha {recipe['lora_alpha']:g}, dropout {recipe['lora_dropout']:g}, "
        f"on {plain(where)}{base}.{embeddings}"
    )


def left_out_of_data(report: Any) -> list[str]:
    """What the dataset could have held and does not, from its report."""
    found = [(f"dropped: {drop.reason.value}", drop.num) for drop in report.drops]
    if report.mix is not None:  # which tells of copies and suspects too, in the words of experiences
        found += list(report.mix.left_out.items())
    else:
        found += [("exact copies of an earlier example", report.num_duplicates)] if report.num_duplicates else []
        found += [(f"quarantined by the screen {each.screen}", each.num) for each in report.quarantine]
        found += list(report.passed_over.items())
    screens = ", ".join(screen.value for screen in report.options.screens)
    lines = [f"Screens that looked at every row: {plain(screens) if screens else 'none'}."]
    if not found:
        return [*lines, "Nothing was left out."]
    rows = [(plain(why), f"{num:,}") for why, num in found]
    return [*lines, "Left out:", *table(("because", "number"), rows)]


def comparisons(report: Mapping[str, Any]) -> list[str]:
    """A row per metric; one without numbers says why."""
    measured = [(code(each["metric"]), each) for each in report["comparisons"]]
    old = report.get("established")
    if old is not None:
        measured.append((f"{code(old['metric'])}, on cases of earlier datasets alone", old))
    rows = []
    for name, each in measured:
        if each.get("problem") or None in (each["candidate"], each["baseline"], each["low"], each["high"]):
            rows.append(
                (name, each.get("better"), "", "", f"no numbers: {plain(each.get('problem') or 'missing')}", "")
            )
            continue
        gain = f"{each['difference']:+.3g} [{each['low']:+.3g}, {each['high']:+.3g}]"
        left_out = f" ({each['num_left_out']:,} left out)" if each.get("num_left_out") else ""
        numbers = (f"{each['baseline']:.4g}", f"{each['candidate']:.4g}", gain, f"{each['n']:,}{left_out}")
        rows.append((f"{name}{_ROLE[bool(each.get('shown_only'))]}", each.get("better") or "unknown", *numbers))
    return table(("metric", "better is", "baseline", "this version", "improvement [interval]", "n"), rows)


_ROLE = {True: ", shown only: it decides nothing", False: ""}


def checks(verdict: Mapping[str, Any]) -> list[str]:
    """The checks of a verdict that stored them, each with what was measured and what was needed."""
    rows = [
        (
            plain(each["name"]),
            code(each["metric"]) if each.get("metric") else "",
            "no numbers" if each["actual"] is None else f"{each['actual']:.4g}",
            f"{each['needs']} {each['threshold']:.4g} ({code(each['setting'])})",
            f"{each['n']:,}",
            "passed" if each["passed"] else "**failed**",
        )
        for each in verdict.get("checks") or ()
    ]
    return table(("check", "metric", "measured", "needed", "n", ""), rows) if rows else []


def how_to_load(name: str, *, is_full: bool, base: str) -> list[str]:
    """Python that loads the version's folder; where the base lies is left to the reader."""
    folder = json.dumps(name)
    if is_full:
        return [
            "```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"folder = {folder}  # the folder with this version's files\n"
            "model = AutoModelForCausalLM.from_pretrained(folder)\n"
            "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
            "```"
        ]
    return [
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"base = {json.dumps(base)}  # the base's folder, or its name on the hub; the content must be the one above\n"
        f"folder = {folder}  # the folder with this version's files\n"
        "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(base)\n"
        "```",
        "Use the chat template that it was trained with: `chat_template.jinja` in its folder, where there is one.",
    ]
