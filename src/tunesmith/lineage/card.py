"""The model card of a version: a hub's front matter, then plain Markdown. Counts and names, never what was said."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tunesmith.core.clock import utc_now
from tunesmith.lineage.rules import card as text
from tunesmith.lineage.rules.card import code, plain, table
from tunesmith.lineage.rules.describe import counted
from tunesmith.lineage.rules.limits import limits_of
from tunesmith.lineage.version_facts import BARE_BASE, VersionFacts, read_version
from tunesmith.runs.commit import COMMIT, DIRTY
from tunesmith.runs.session import Session

_METHODS = {
    "sft": "supervised fine-tuning (SFT): it learns the answers of the examples",
    "dpo": "direct preference optimisation (DPO): it learns to prefer the better of two answers",
    "orpo": "odds-ratio preference optimisation (ORPO): it learns the better of two answers and to avoid the other",
    "kto": "Kahneman-Tversky optimisation (KTO): it learns from answers that are marked as good or bad",
}
_ROLES = {"gold": "good answers", "corrected": "corrected answers", "replay": "replayed from earlier rounds"}


def card_of(session: Session, name: str) -> str:
    """The card of a version; its files are hashed first, and refused where they changed."""
    facts = read_version(session, name)
    sections = [
        (plain(facts.adapter.name), _opening(facts)),
        ("What it is for", _purpose(facts)),
        ("Base model", _base(facts)),
        ("How it was trained", _training(facts)),
        ("Data", _data(facts)),
        ("Evaluation", _evaluation(facts)),
        ("Verdict of the gate", _verdict(facts)),
        ("Limits", [f"- {line}" for line in limits_of(_measured(facts))]),
        ("Serving history", _serving(facts)),
        ("How to load it", text.how_to_load(facts.adapter.name, is_full=_is_full(facts), base=facts.base.name)),
    ]
    written = f"Written by `tunesmith adapter card {facts.adapter.name}` on {_day(utc_now())}."
    return text.document(_front_matter(facts), sections, written)


def _front_matter(facts: VersionFacts) -> dict[str, Any]:
    """What a hub reads. A base that is on no hub has no name there; a wrong one would be worse than none."""
    method, recipe = facts.run.spec["method"], facts.run.spec["recipe"]
    kind = "full" if recipe.get("tuning") == "full" else "lora"
    values = {
        "base_model": facts.base.source if facts.base.source and "/" in facts.base.source else None,
        "library_name": "transformers" if kind == "full" else "peft",
        "pipeline_tag": "text-generation",
        "license": facts.base.licence,
        "tags": ["tunesmith", kind, method, facts.adapter.profile],
    }
    return {name: value for name, value in values.items() if value is not None}


def _is_full(facts: VersionFacts) -> bool:
    return bool(facts.run.spec["recipe"].get("tuning") == "full")


def _opening(facts: VersionFacts) -> list[str]:
    adapter = facts.adapter
    what = "fully tuned copy" if _is_full(facts) else "LoRA adapter"
    size = sum(entry["bytes"] for entry in facts.manifest.files.values())
    return [
        f"{code(adapter.name)} is a {what} of the base model {code(facts.base.name)}. tunesmith made it on "
        f"{_day(adapter.created_at)} in run {code(facts.run.id)}. Its state is **{adapter.state}**.",
        f"Its {counted(len(facts.manifest.files), 'file')} ({size / 1e6:,.1f} MB) have the digest "
        f"{code(adapter.digest)}. `tunesmith adapter provenance {adapter.name}` lists each file's hash.",
    ]


def _purpose(facts: VersionFacts) -> list[str]:
    profile = facts.profile
    if profile is None:
        return [f"Unknown: the profile {code(facts.adapter.profile)} cannot be read any more."]
    said = plain(profile.description) or "The profile has no description"
    written = f"Role: {profile.role.value}. Profile: {code(profile.name)}, as it was when this card was written."
    return [f"{said.removesuffix('.')}.", written]


def _base(facts: VersionFacts) -> list[str]:
    base, said = facts.base, facts.run.spec["base"]
    lock = said.get("lock") or {}
    licence = _licence(facts)
    rows = [
        ("name", code(base.name)),
        ("fetched from", code(base.source) if base.source else None),
        ("revision", code(base.revision) if base.revision else None),
        ("architecture", code(lock["architecture"]) if lock.get("architecture") else None),
        ("content", f"{code(said['digest'])}"),
        ("licence", licence),
    ]
    return table(("", ""), [row for row in rows if row[1]])


def _licence(facts: VersionFacts) -> str:
    base = facts.base
    if base.licence:
        return f"{code(base.licence)}, as the base's README says"
    if base.licence_file:
        return f"not named in a README; the file {code(base.licence_file)} lies beside the base"
    return "unknown; find out before you pass this version on"


def _training(facts: VersionFacts) -> list[str]:
    spec, recipe = facts.run.spec, facts.run.spec["recipe"]
    result: Mapping[str, Any] = {} if facts.training is None else facts.training.result
    method = _METHODS.get(spec["method"], spec["method"])
    start = "the bare base" if facts.start is None else code(facts.start.name)
    length = text.passes(recipe["epochs"], recipe["max_steps"])
    rate = f"{recipe['lr']:g}" if recipe["lr"] is not None else f"{text.default_rate(spec['method'], recipe):g}"
    lines = [
        f"It was trained by {method}. It started from {start}.",
        f"{text.weights_in_words(recipe)} Learning rate {rate}, {recipe['schedule']} schedule with "
        f"{recipe['warmup']:.0%} warm-up; {recipe['batch_tokens']:,} tokens per step; examples of up to "
        f"{recipe['max_length']:,} tokens; {length}; seed {recipe['seed']}.",
    ]
    if result:
        lines.append(
            f"The training took {counted(result.get('num_steps') or 0, 'step')} over "
            f"{result.get('num_trained_tokens') or 0:,} trained tokens, {result.get('train_s') or 0:,.0f} s on "
            f"{code(spec['hardware_tier'])} with the trainer {code(spec['trainer'])}."
            + (f" The weights are those of step {result['best_step']}." if result.get("best_step") else "")
        )
    else:
        lines.append("How long it took is not recorded.")
    return [*lines, *_code(facts)]


def _code(facts: VersionFacts) -> list[str]:
    fingerprints, metadata = facts.run.spec["fingerprints"], facts.run.spec.get("metadata") or {}
    libraries = facts.libraries
    known = None if libraries is None else {name: each for name, each in libraries.items() if each != "none"}
    told = (
        "unknown: the code or a library has changed since, and only their fingerprint was kept"
        if known is None
        else ", ".join(f"{name} {each}" for name, each in known.items())
    )
    dirty = {"yes": ", with uncommitted changes", "no": ", without uncommitted changes"}
    commit = metadata.get(COMMIT)
    rows = [
        ("settings", code(fingerprints["config"])),
        ("code", code(fingerprints["code"])),
        ("libraries", plain(told)),
        ("workspace's git commit", f"{code(commit)}{dirty.get(metadata.get(DIRTY, ''), '')}" if commit else "none"),
    ]
    return ["Fingerprints of what made it:", *table(("", ""), rows)]


def _data(facts: VersionFacts) -> list[str]:
    dataset, report = facts.dataset, facts.report
    counts = [(name, f"{dataset.counts[key]:,}") for name, key in text.SPLITS]
    lines = [
        f"Dataset {code(dataset.id)} ({plain(dataset.kind)}), fingerprint {code(dataset.fingerprint)}.",
        *table(("split", "examples"), counts),
    ]
    trained = facts.run.spec["dataset"]
    if dataset.fingerprint != trained["fingerprint"]:
        lines.append(
            f"Examples were forgotten after the training, and taken out: it was trained on "
            f"{trained['num_train']:,} examples, as {code(trained['fingerprint'])}."
        )
    lines += _experiences(facts.members) if facts.members is not None else _files(facts)
    if report is None:
        return [*lines, "The dataset's report cannot be read any more, so what was left out is unknown."]
    return [*lines, *text.left_out_of_data(report)]


def _files(facts: VersionFacts) -> list[str]:
    if facts.report is None:
        return []
    rows = [(code(each.name), f"{each.num_lines:,}", code(each.sha256[:16])) for each in facts.report.sources]
    return ["It was prepared from files:", *table(("file", "lines, items or rows", "sha256 begins"), rows)]


def _experiences(members: Mapping[str, Any]) -> list[str]:
    lines = [f"It was assembled from {counted(members['num'], 'experience')}, captured answers of this profile:"]
    rows = []
    for name, title in (
        ("roles", "role"),
        ("classes", "class now"),
        ("sources", "source"),
        ("answered_by", "answered by"),
    ):
        words = _ROLES if name == "roles" else {}
        rows += [(title, words.get(key, plain(key)), f"{num:,}") for key, num in members[name].items()]
    lines += table(("by", "", "number"), rows)
    if members["first_at"] is not None:
        lines.append(f"They were captured between {_day(members['first_at'])} and {_day(members['last_at'])}.")
    if members["num_forgotten"]:
        lines.append(f"Forgotten since, with nothing left of their text: {members['num_forgotten']:,} of them.")
    return lines


def _evaluation(facts: VersionFacts) -> list[str]:
    if not facts.evaluations:
        return ["It was never evaluated."]
    latest = facts.evaluations[0]
    report, baseline = latest.judged["report"], facts.baselines[latest.id]
    lines = [
        f"Measured on {_day(latest.created_at)} on {counted(report['num_cases'], 'held-out case')} that were never "
        f"trained on, against {_baseline(baseline)}, case by case. Intervals are at {report['confidence']:.0%}; a "
        "positive improvement is better, whichever way the metric goes.",
        *text.comparisons(report),
    ]
    if len(facts.evaluations) > 1:
        rows = [
            (_day(each.created_at), _baseline(facts.baselines[each.id]), plain(each.judged["verdict"]["decision"]))
            for each in facts.evaluations[1:]
        ]
        lines += ["Earlier evaluations:", *table(("on", "against", "verdict"), rows)]
    return lines


def _baseline(name: str) -> str:
    return name if name == BARE_BASE else code(name)


def _verdict(facts: VersionFacts) -> list[str]:
    forced = [event for event in facts.history if event.action == "forced"]
    lines = [
        f"On {_day(event.at)} it was **forced** past the gate by {code(event.actor)}: {plain(event.reason)}"
        for event in forced
    ]
    if not facts.evaluations:
        return [*lines, "There is none."]
    verdict = facts.evaluations[0].judged["verdict"]
    lines.append(f"**{plain(verdict['decision'])}**, because:")
    return [*lines, *(f"- {plain(reason)}" for reason in verdict["reasons"]), *text.checks(verdict)]


def _serving(facts: VersionFacts) -> list[str]:
    moves = [event for event in facts.history if event.new_state is not None]
    rows = [
        (_day(event.at), plain(event.new_state or ""), plain(event.reason) or "—", code(event.actor)) for event in moves
    ]
    lines = table(("at", "became", "reason", "by"), rows)
    if not facts.lives:
        lines.append("It was never live.")
    for begin, end in facts.lives:
        until = "until now" if end is None else f"until {_day(end.at)}"
        lines.append(f"Live from {_day(begin.at)} {until}.")
    if facts.num_answers or facts.lives:
        scope = "" if facts.answers_are_all else " among the newest experiences of the profile"
        lines.append(f"Of its answers, {facts.num_answers:,} are kept as experiences{scope}.")
    return lines


def _measured(facts: VersionFacts) -> dict[str, Any]:
    """What the limits follow from, as plain values."""
    latest = facts.evaluations[0] if facts.evaluations else None
    return {
        "report": None if latest is None else latest.judged["report"],
        "baseline": None if latest is None else facts.baselines[latest.id],
        "decision": None if latest is None else latest.judged["verdict"]["decision"],
        "is_forced": any(event.action == "forced" for event in facts.history),
        "min_cases": facts.run.spec["gate"].get("min_cases"),
        "num_train": facts.run.spec["dataset"]["num_train"],
        "members": facts.members,
        "has_licence": bool(facts.base.licence),
        "has_libraries": facts.libraries is not None,
        "dirty": (facts.run.spec.get("metadata") or {}).get(DIRTY),
        "forgotten_since": facts.dataset.fingerprint != facts.run.spec["dataset"]["fingerprint"],
        "data_is_there": facts.report is not None,
    }


def _day(instant: datetime) -> str:
    return f"{instant:%Y-%m-%d %H:%M} UTC"
