"""JSONL → validated, hashed, scored, split, deduplicated Parquet: tunesmith beside Hugging Face `datasets`, same job.

    python benchmarks/data.py [--quick]

Each arm runs in a process of its own, in turns, and the best of its rounds counts. `datasets` takes part where it is
installed.
"""

from __future__ import annotations

import sys

if sys.path[0].endswith("benchmarks"):
    del sys.path[0]  # queue.py beside this script would hide the standard library's

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import subprocess
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import Any

OURS = {"tunesmith": None, "tunesmith, one process": 1}
PEERS = {"datasets": os.cpu_count() or 1, "datasets, one process": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, one round")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.source)
        return
    num_rows, rounds = (100_000, 1) if options.quick else (300_000, 3)
    has_peer = importlib.util.find_spec("datasets") is not None
    describe(num_rows, has_peer)
    arms = [*OURS, *(PEERS if has_peer else {})]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        write_rows(source, num_rows)
        best: dict[str, dict[str, float]] = {}
        for _ in range(rounds):
            for arm in arms:
                figures = measure(arm, source)
                if arm not in best or figures["rows_per_s"] > best[arm]["rows_per_s"]:
                    best[arm] = figures
    for arm, figures in best.items():
        print(
            f"{arm:24} {figures['rows_per_s']:>10,.0f} rows/s {figures['cpu_us_per_row']:>8.1f} µs CPU a row "
            f"{figures['memory_mb']:>7,.0f} MB"
        )
    ratios = {}
    if has_peer:
        ratios["datasets"] = round(best["tunesmith"]["rows_per_s"] / max(best[arm]["rows_per_s"] for arm in PEERS), 2)
    print(json.dumps({"name": "data", "ratios": ratios, "figures": best}))


def describe(num_rows: int, has_peer: bool) -> None:
    names = ["orjson", "pyarrow", *(["datasets"] if has_peer else [])]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(
        f"{num_rows:,} chat rows of about 575 bytes; {os.cpu_count()} processors; "
        f"Python {platform.python_version()}, {versions}"
    )
    if not has_peer:
        print("datasets is not installed, so there is nothing to compare with: pip install datasets")


def write_rows(path: Path, num_rows: int) -> None:
    """Chats of a system message, a question of 10 to 40 words and an answer of 15 to 70; one in ten is not ASCII."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as sink:
        for number in range(num_rows):
            question = " ".join(rng.choices(words, k=rng.randint(10, 40))).capitalize() + "?"
            answer = " ".join(rng.choices(words, k=rng.randint(15, 70))).capitalize() + "."
            messages = [
                {"role": "system", "content": "You are a careful assistant."},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer + (" Voilà — “fin”." if number % 10 == 0 else "")},
            ]
            print(json.dumps({"messages": messages}, ensure_ascii=False), file=sink)


def measure(arm: str, source: Path) -> dict[str, float]:
    argv = [sys.executable, __file__, "--arm", arm, "--source", str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_arm(arm: str, source: Path) -> None:
    """One arm, measured from the first byte read to the last one written, imports not counted."""
    with tempfile.TemporaryDirectory() as folder:
        if arm in OURS:
            seconds, num_rows = run_tunesmith(source, Path(folder), OURS[arm])
        else:
            seconds, num_rows = run_datasets(source, Path(folder), PEERS[arm])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "rows_per_s": num_rows / seconds,
        "cpu_us_per_row": sum(usage.ru_utime + usage.ru_stime for usage in used) / num_rows * 1e6,
        "memory_mb": used[0].ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def run_tunesmith(source: Path, folder: Path, num_processes: int | None) -> tuple[float, int]:
    import tunesmith.data.blocks  # noqa: F401  imports are not part of the job
    from tunesmith.data.prepare import prepare
    from tunesmith.domain.dataset import PrepareOptions

    begin = time.perf_counter()
    dataset = prepare([source], folder / "dataset", PrepareOptions(), num_processes=num_processes)
    return time.perf_counter() - begin, dataset.report.num_lines


def run_datasets(source: Path, folder: Path, num_processes: int) -> tuple[float, int]:
    """The same job as a user of `datasets` writes it: load, map in batches, filter, one Parquet file per split."""
    import datasets

    datasets.disable_progress_bars()
    num_proc = num_processes if num_processes > 1 else None
    begin = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder))
    num_rows = len(rows)
    rows = rows.map(enrich, batched=True, num_proc=num_proc)
    seen: set[str] = set()

    def is_new(ok: bool, row_id: str) -> bool:
        new = ok and row_id not in seen
        seen.add(row_id)
        return new

    rows = rows.filter(is_new, input_columns=["ok", "id"])
    for split in ("train", "validation", "heldout"):
        part = rows.filter(lambda found, split=split: found == split, input_columns="split", num_proc=num_proc)
        part.to_parquet(folder / f"{split}.parquet")
    return time.perf_counter() - begin, num_rows


def enrich(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What `datasets` lacks: valid or not, id, group, split, score."""
    found: dict[str, list[Any]] = {"ok": [], "id": [], "group": [], "split": [], "score": []}
    for messages in batch["messages"]:
        before = ""
        ok = bool(messages)
        for message in messages:
            ok = ok and message["role"] in AFTER[before] and bool(message["content"].strip())
            before = message["role"] if message["role"] in AFTER else before
        text = json.dumps(messages, sort_keys=True, ensure_ascii=False)
        prompt = "\x1e".join(message["role"] + fold(message["content"]) for message in messages[:-1])
        group = hashlib.sha256(prompt.encode()).hexdigest()
        place = int(group[:16], 16) / 2**64
        answer = messages[-1]["content"]
        found["ok"].append(ok and before == "assistant")
        found["id"].append(hashlib.sha256(text.encode()).hexdigest())
        found["group"].append(group)
        found["split"].append("heldout" if place < 0.1 else "validation" if place >= 0.95 else "train")
        found["score"].append(0.5 if answer.count(answer[-24:]) >= 3 or messages[-2]["content"] in answer else 1.0)
    return found


AFTER = {
    "": {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}


def fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


if __name__ == "__main__":
    main()
