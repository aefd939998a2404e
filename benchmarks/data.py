"""JSONL → validated, hashed, scored, split, deduplicated Parquet: tunesmith beside Hugging Face `datasets`, same job.

    python benchmarks/data.py [--quick] [--rows N] [--rounds N] [--pair | --alone]

Each arm runs in a process of its own, in turns, so that what else the machine does hits all of them; a ratio is taken
within a round, to the quicker of the peer's arms, and the median of the rounds counts. Memory is that of the arm's
whole tree of processes, shared pages counted in each. `datasets` takes part where it is installed; with as many
processes as ours, and with one. `--alone` leaves it out: for ten million rows.
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
import statistics
import subprocess
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import Any

NUM_PROCESSES = min(os.cpu_count() or 1, 4)
OURS = {
    "tunesmith": (NUM_PROCESSES, False),
    "tunesmith, all screens": (NUM_PROCESSES, True),
    "tunesmith, one process": (1, False),
    "tunesmith, one process, all screens": (1, True),
}
PEERS = {"datasets": NUM_PROCESSES, "datasets, one process": 1}
ONCE = [arm for arm in (*OURS, *PEERS) if "one process" in arm]
"""Arms that no ratio needs: one round tells enough."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, one round")
    parser.add_argument("--rows", type=int, help="rows of the file")
    parser.add_argument("--rounds", type=int, help="how often each arm runs")
    parser.add_argument("--pair", action="store_true", help="only the two arms that the ratio needs")
    parser.add_argument("--alone", action="store_true", help="without datasets, and without the arms of one process")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.source)
        return
    num_rows = options.rows or (100_000 if options.quick else 1_000_000)
    rounds = options.rounds or (1 if options.quick else 3)
    has_peer = importlib.util.find_spec("datasets") is not None and not options.alone
    describe(num_rows, rounds, has_peer)
    arms = [*OURS, *(PEERS if has_peer else {})]
    if options.alone or options.pair:
        arms = [arm for arm in arms if arm not in ONCE]
    if options.pair:
        arms = [arm for arm in arms if arm in ("tunesmith", "datasets")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        write_rows(source, num_rows)
        measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for number in range(rounds):
            for arm in arms:
                if number == 0 or arm not in ONCE:
                    measured[arm].append(measure(arm, source))
                    show(arm, measured[arm][-1])
    tell(measured, has_peer)


def show(arm: str, figures: dict[str, float]) -> None:
    print(
        f"{arm:36} {figures['rows_per_s']:>9,.0f} rows/s {figures['cpu_us_per_row']:>7.1f} µs CPU a row "
        f"{figures['tree_memory_mb']:>6,.0f} MB",
        flush=True,
    )


def tell(measured: dict[str, list[dict[str, float]]], has_peer: bool) -> None:
    """The last line: medians, and the ratio with its spread."""
    figures: dict[str, Any] = {
        arm: {key: round(statistics.median(each[key] for each in found), 1) for key in found[0]}
        for arm, found in measured.items()
    }
    ratios = {}
    if has_peer:
        each = sorted(
            ours["rows_per_s"]
            / max(measured[arm][number]["rows_per_s"] for arm in PEERS if number < len(measured.get(arm, ())))
            for number, ours in enumerate(measured["tunesmith"])
        )
        ratios["datasets"] = round(statistics.median(each), 2)
        figures["ratio_spread"] = [round(each[0], 2), round(each[-1], 2)]
        print(f"{ratios['datasets']} times datasets in rows a second, {each[0]:.2f} to {each[-1]:.2f} by round")
    print(json.dumps({"name": "data", "ratios": ratios, "figures": figures}))


def describe(num_rows: int, rounds: int, has_peer: bool) -> None:
    names = ["orjson", "pyarrow", *(["datasets"] if has_peer else [])]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(
        f"{num_rows:,} chat rows of about 575 bytes, {rounds} rounds; {os.cpu_count()} processors, "
        f"{NUM_PROCESSES} processes parse, and {NUM_PROCESSES} map in datasets; "
        f"Python {platform.python_version()}, {versions}"
    )
    if not has_peer:
        print("without datasets (not installed, or --alone), so there is nothing to compare with")


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
    """Run one arm, and watch how much memory its processes hold together."""
    argv = [sys.executable, __file__, "--arm", arm, "--source", str(source)]
    most = 0.0
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        while child.poll() is None:
            most = max(most, sum(map(resident_mb, tree(child.pid))))
            time.sleep(0.1)
        assert child.stdout is not None
        told = child.stdout.read()
    if child.returncode:
        sys.exit(f"{arm} failed")
    figures: dict[str, float] = json.loads(told.splitlines()[-1])
    return figures | {"tree_memory_mb": most}


def tree(pid: int) -> list[int]:
    """A process and all its children."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(found for child in children for found in tree(child))]


def resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except (OSError, IndexError):
        return 0.0  # it has just ended


def run_arm(arm: str, source: Path) -> None:
    """One arm, measured from the first byte read to the last one written, imports not counted."""
    with tempfile.TemporaryDirectory() as folder:
        if arm in OURS:
            seconds, num_rows = run_tunesmith(source, Path(folder), *OURS[arm])
        else:
            seconds, num_rows = run_datasets(source, Path(folder), PEERS[arm])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "rows_per_s": num_rows / seconds,
        "cpu_us_per_row": sum(usage.ru_utime + usage.ru_stime for usage in used) / num_rows * 1e6,
    }
    print(json.dumps(figures))


def run_tunesmith(source: Path, folder: Path, num_processes: int, has_screens: bool) -> tuple[float, int]:
    import tunesmith.datasets.blocks  # noqa: F401  imports are not part of the job
    from tunesmith.datasets.prepare_folder import prepare
    from tunesmith.datasets.report import PrepareOptions
    from tunesmith.profiles.sections.screens import DEFAULT_SCREENS

    options = PrepareOptions(screens=DEFAULT_SCREENS if has_screens else ())
    begin = time.perf_counter()
    dataset = prepare([source], folder / "dataset", options, num_processes=num_processes)
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
