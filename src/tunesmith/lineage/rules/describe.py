"""What the nodes of a lineage graph say about themselves, in one line and in facts. Never what was said. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from tunesmith.lineage.rules.graph import Node, NodeKind

MAX_COUNTED = 10
"""Sources and versions that are named in a summary; the rest is counted together."""
_FORGOTTEN = "forgotten"


class Member(Protocol):
    """Members of a dataset that have everything but their content in common."""

    @property
    def role(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def class_name(self) -> str: ...
    @property
    def source(self) -> str | None: ...
    @property
    def served_by(self) -> str | None: ...
    @property
    def num(self) -> int: ...
    @property
    def first_at(self) -> datetime: ...
    @property
    def last_at(self) -> datetime: ...


def counted(num: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def parts(counts: Mapping[str, int], limit: int = 4) -> str:
    """`60 gold, 40 corrected`, the most frequent first."""
    found = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{num:,} {name}" for name, num in found[:limit]]
    return ", ".join([*shown, f"{len(found) - limit} other kinds"] if len(found) > limit else shown)


def most(counts: Mapping[str, int], limit: int = MAX_COUNTED) -> dict[str, int]:
    """The most frequent names; the rest together under `other`."""
    found = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    rest = sum(num for _, num in found[limit:])
    return dict(found[:limit]) | ({"other": rest} if rest else {})


def members_summary(members: Iterable[Member]) -> dict[str, Any]:
    """Counts of a dataset's experiences. A forgotten one counts as forgotten, and in its role and split only."""
    nums: dict[str, Counter[str]] = {
        name: Counter() for name in ("roles", "splits", "states", "classes", "sources", "answered_by")
    }
    found = list(members)
    for each in found:
        nums["roles"][each.role] += each.num
        nums["splits"][each.split] += each.num
        nums["states"][each.state] += each.num
        if each.state == _FORGOTTEN:
            continue
        nums["classes"][each.class_name] += each.num
        nums["sources"][each.source or "unknown"] += each.num
        if each.served_by is not None:
            nums["answered_by"][each.served_by] += each.num
    told = [each for each in found if each.state != _FORGOTTEN]
    return {
        "num": sum(each.num for each in found),
        "num_forgotten": nums["states"].get(_FORGOTTEN, 0),
        **{name: most(count) for name, count in nums.items()},
        "first_at": min((each.first_at for each in told), default=None),
        "last_at": max((each.last_at for each in told), default=None),
    }


def group_node(dataset_id: str, summary: Mapping[str, Any]) -> Node:
    """The experiences of one dataset, counted."""
    num, forgotten = summary["num"], summary["num_forgotten"]
    said = [parts(summary["roles"])] + ([f"{forgotten:,} forgotten"] if forgotten else [])
    facts = {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in summary.items() if value
    }
    return Node(
        key=f"experiences:{dataset_id}",
        kind=NodeKind.EXPERIENCES,
        id=dataset_id,
        name=counted(num, "experience"),
        summary="; ".join(said),
        facts=facts,
    )


def experience_node(row: Mapping[Any, Any]) -> Node:
    """One experience; nothing but its id, its state and when it was forgotten is left of a forgotten one."""
    at = row["captured_at"] or row["created_at"]
    role = {name: row[name] for name in ("role", "split") if row.get(name)}
    if row["state"] == _FORGOTTEN:
        said = ", ".join([_FORGOTTEN, *role.values()])
        return Node(_key("experience", row["id"]), NodeKind.EXPERIENCE, row["id"], row["id"], said, _FORGOTTEN)
    facts = {name: row[name] for name in ("source", "task_type", "template", "served_by") if row[name]}
    facts |= {"class": row["class_name"], "profile": row["profile"], **role}
    said = ", ".join([*(role.values() or [row["class_name"]]), row["state"]])
    return Node(_key("experience", row["id"]), NodeKind.EXPERIENCE, row["id"], row["id"], said, row["state"], at, facts)


def dataset_node(dataset: Any, files: Sequence[str]) -> Node:
    counts = dataset.counts
    said = f"{counts['train']:,} train, {counts['validation']:,} validation, {counts['heldout']:,} held out"
    facts = {"profile": dataset.profile, "kind": dataset.kind, "fingerprint": dataset.fingerprint, **counts}
    facts |= {"files": list(files)} if files else {}
    return Node(
        _key("dataset", dataset.id), NodeKind.DATASET, dataset.id, dataset.id, said, None, dataset.created_at, facts
    )


def file_node(dataset_id: str, source: Any) -> Node:
    """A file that a dataset was prepared from: its name without folders, and its content's hash."""
    said = f"{counted(source.num_lines, source.unit)}, sha256 {source.sha256[:12]}"
    facts = {"sha256": source.sha256, "num_bytes": source.num_bytes, "num_lines": source.num_lines}
    key = f"file:{dataset_id}:{source.sha256[:16]}:{source.name}"
    return Node(key, NodeKind.FILE, source.name, source.name, said, None, None, facts)


def base_node(base: Mapping[str, Any]) -> Node:
    """The bare base by its content; its folder is named without the folders above it."""
    name = str(base.get("path", "")).rstrip("/").rpartition("/")[2] or "base"
    family = (base.get("lock") or {}).get("family")
    facts = {"digest": base["digest"], "revision": base.get("revision"), "family": family}
    said = ", ".join(filter(None, [family, f"sha256 {base['digest'][:12]}"]))
    return Node(
        key=_key("base", base["digest"]),
        kind=NodeKind.BASE,
        id=base["digest"],
        name=name,
        summary=said,
        facts={key: value for key, value in facts.items() if value},
    )


def run_node(run: Any, num_checkpoints: int, result: Mapping[str, Any] | None) -> Node:
    spec = run.spec
    result = result or {}
    facts = {
        "profile": run.profile,
        "method": spec.get("method"),
        "trainer": spec.get("trainer"),
        "num_steps": result.get("num_steps"),
        "num_trained_examples": result.get("num_trained_examples"),
        "train_s": result.get("train_s"),
        "num_checkpoints": num_checkpoints or None,
        "submitted_by": run.created_by,
        "automatic": run.automatic,
        "campaign": run.campaign_id,
        "config": (spec.get("fingerprints") or {}).get("config"),
        "code": (spec.get("fingerprints") or {}).get("code"),
        **{name: value for name, value in (spec.get("metadata") or {}).items() if name.startswith("git.")},
    }
    what = "deploys a version again" if spec.get("deploys") else f"{spec.get('method')} with {spec.get('trainer')}"
    steps = [counted(result["num_steps"], "step")] if result.get("num_steps") and not spec.get("deploys") else []
    return Node(
        key=_key("run", run.id),
        kind=NodeKind.RUN,
        id=run.id,
        name=run.id,
        summary=", ".join([run.state, what, *steps]),
        state=run.state,
        at=run.created_at,
        facts={name: value for name, value in facts.items() if value is not None},
    )


def version_node(adapter: Any) -> Node:
    return Node(
        key=_key("version", adapter.id),
        kind=NodeKind.VERSION,
        id=adapter.id,
        name=adapter.name,
        summary=f"{adapter.state}, {adapter.id}",
        state=str(adapter.state),
        at=adapter.created_at,
        facts={"profile": adapter.profile, "digest": adapter.digest, "metrics": dict(adapter.metrics)},
    )


def evaluation_node(evaluation: Any) -> Node:
    verdict, report = evaluation.judged["verdict"], evaluation.judged["report"]
    comparisons = [
        {name: each.get(name) for name in ("metric", "n", "baseline", "candidate", "difference", "low", "high")}
        for each in report["comparisons"]
    ]
    facts = {
        "decision": verdict["decision"],
        "reasons": list(verdict["reasons"]),
        "num_cases": report["num_cases"],
        "confidence": report["confidence"],
        "comparisons": comparisons,
        "run": evaluation.run_id,
    }
    return Node(
        key=_key("evaluation", evaluation.id),
        kind=NodeKind.EVALUATION,
        id=evaluation.id,
        name=evaluation.id,
        summary=", ".join([verdict["decision"], counted(report["num_cases"], "case"), *_told(comparisons)]),
        state=verdict["decision"],
        at=evaluation.created_at,
        facts=facts,
    )


def _told(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    first = comparisons[0] if comparisons else None
    if first is None or first["candidate"] is None or first["baseline"] is None:
        return []
    return [f"{first['metric']} {first['baseline']:.3g} → {first['candidate']:.3g}"]


def flip_node(profile: str, flip: Any) -> Node:
    return Node(
        key=_key("flip", f"{profile}:{flip.seq}"),
        kind=NodeKind.FLIP,
        id=f"{profile}:{flip.seq}",
        name=f"flip {flip.at:%Y-%m-%d %H:%M}",
        summary=f"by {flip.actor}",
        at=flip.at,
        facts={"profile": profile, "actor": flip.actor},
    )


def answer_node(key: str, at: datetime) -> Node:
    return Node(_key("answer", key), NodeKind.ANSWER, key, key, f"given {at:%Y-%m-%d %H:%M}", None, at)


def answers_node(name: str, num: int, *, has_older: bool, looked_at: int) -> Node:
    """The experiences that a version answered, counted."""
    said = f"among the newest {looked_at:,} of the profile" if has_older else "kept as experiences"
    facts = {"num": num, "answered_by": {name: num}}
    return Node(f"answers:{name}", NodeKind.EXPERIENCES, name, counted(num, "answer"), said, facts=facts)


def _key(kind: str, thing_id: str) -> str:
    return f"{kind}:{thing_id}"
