"""The screens on a seeded corpus: what they find, what they stop wrongly, and how many rows a second they look at.

    python benchmarks/screens.py [--quick]

detect-secrets takes part where it is installed; it looks for secrets only, tunesmith for everything.
"""

from __future__ import annotations

import sys

if sys.path[0].endswith("benchmarks"):
    del sys.path[0]  # queue.py beside this script would hide the standard library's

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support import screen_fourth_look, screen_hard_rows, screen_second_look, screen_third_look, screen_whole_sets
from support.screen_corpus import BAD, Row, bad_rows, prose
from support.screen_good_rows import GOOD, good_rows
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PrepareOptions
from tunesmith.datasets.screens.contamination import ContaminationCheck
from tunesmith.datasets.screens.near_duplicates import NearDuplicates, minhash_signature
from tunesmith.datasets.screens.rows import ROW_SCREENS, RowScreens
from tunesmith.profiles.sections.screens import DEFAULT_SCREENS, Screen

SEED = 20
NUM_BAD, NUM_GOOD = 60, 900  # of each class
NUM_WORDS = 250
PEER_FIGURES = ("rows_per_s", "recall of secrets", "false_positives")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows for the speed, one round")
    options = parser.parse_args()
    has_peer = importlib.util.find_spec("detect_secrets") is not None
    peer = f", detect-secrets {importlib.metadata.version('detect-secrets')}" if has_peer else ""
    print(f"seed {SEED}; {os.cpu_count()} processors, one used; Python {platform.python_version()}{peer}\n")
    screens = RowScreens([name for name in DEFAULT_SCREENS if name in ROW_SCREENS])
    figures: dict[str, float] = {}
    figures |= show_found(screens)
    figures |= show_stopped(screens)
    figures |= show_looks(screens)
    figures |= near_copies()
    figures |= whole_sets()
    figures |= overlaps()
    num_rows, rounds = (4_000, 1) if options.quick else (20_000, 3)
    rows = {"prose": prose_rows(num_rows), "risky-looking": risky_rows(num_rows)}
    ratios = {}
    for name, texts in rows.items():
        figures[f"rows_per_s, {name}"] = speed(screens.look, texts, rounds)
        print(f"{figures[f'rows_per_s, {name}']:>10,.0f} rows/s of {NUM_WORDS} words, all row screens, {name}")
    if has_peer:
        figures |= beside_peer(rows["prose"][:1000], rounds)
        peer_speed, recall, alarms = (figures[f"detect-secrets {name}"] for name in PEER_FIGURES)
        ratios["detect-secrets"] = round(figures["rows_per_s, prose"] / peer_speed, 2)
        told = f"finds {recall:.1%} of the secrets, stops {alarms:.1%} of the good rows"
        print(f"{peer_speed:>10,.0f} rows/s, detect-secrets, which {told}")
    else:
        print("detect-secrets is not installed, so there is nothing to compare with: pip install detect-secrets")
    print(json.dumps({"name": "screens", "ratios": ratios, "figures": figures}))


def show_found(screens: RowScreens) -> dict[str, float]:
    """The table of bad rows by class; a class counts as found when its own screen finds it."""
    num, by_own, by_any = Counter[str](), Counter[str](), Counter[str]()
    for name, screen, row in bad_rows(SEED, NUM_BAD):
        found = {finding.screen for finding in screens.look(row)}
        num[name] += 1
        by_own[name] += screen in found
        by_any[name] += bool(found)
    print("| bad rows | screen | rows | found by it | kept aside |\n|---|---|---|---|---|")
    for name, (screen, _) in BAD.items():
        print(
            f"| {name} | `{screen}` | {num[name]} | {by_own[name] / num[name]:.1%} | {by_any[name] / num[name]:.1%} |"
        )
    total = num.total()
    print(f"| all | | {total} | {by_own.total() / total:.1%} | {by_any.total() / total:.1%} |\n")
    return {"bad_rows": total, "recall": by_own.total() / total}


def show_stopped(screens: RowScreens) -> dict[str, float]:
    num, stopped = Counter[str](), Counter[str]()
    which: dict[str, Counter[str]] = {name: Counter() for name in GOOD}
    for name, row in good_rows(SEED, NUM_GOOD):
        found = {finding.screen for finding in screens.look(row)}
        num[name] += 1
        stopped[name] += bool(found)
        which[name].update(found)
    print("| good rows that look risky | rows | stopped wrongly | by |\n|---|---|---|---|")
    for name in GOOD:
        by = ", ".join(f"`{screen}` {times}" for screen, times in which[name].most_common())
        print(f"| {name} | {num[name]} | {stopped[name] / num[name]:.2%} | {by} |")
    print(f"| all | {num.total()} | {stopped.total() / num.total():.2%} | |\n")
    return {"good_rows": num.total(), "false_positives": stopped.total() / num.total()}


def show_looks(screens: RowScreens) -> dict[str, float]:
    """Rows written by hand: hard ones that changed the screens, and looks that changed less and less."""
    figures: dict[str, float] = {}
    print("| written by hand | bad rows | kept aside | good rows | stopped wrongly |\n|---|---|---|---|---|")
    for name, rows in (
        ("hard rows, which changed the screens", screen_hard_rows),
        ("second look, whose injections were then read", screen_second_look),
        ("third look, injections written before their families", screen_third_look),
        ("fourth look, injections written after, nothing changed", screen_fourth_look),
    ):
        found = sum(bool(screens.look([text])) for _, text in rows.BAD)
        stopped = sum(bool(screens.look([text])) for text in rows.GOOD)
        print(f"| {name} | {len(rows.BAD)} | {found} | {len(rows.GOOD)} | {stopped} |")
        figures[f"{name.partition(',')[0]} recall"] = found / len(rows.BAD)
        figures[f"{name.partition(',')[0]} false_positives"] = stopped / len(rows.GOOD)
    print()
    return figures


def near_copies(num: int = 5000) -> dict[str, float]:
    """Answers of 120 words, then each again with a few words changed, then with every third word changed."""
    rng = random.Random(SEED)
    answers = [[f"{word}{rng.randrange(40)}" for word in prose(rng, 120).split()] for _ in range(num)]
    near = NearDuplicates()
    alarms = sum(_is_near(near, number, words) for number, words in enumerate(answers))
    shares = {}
    for changed in (1, 3, 6, 40):
        hits = 0
        for number, words in enumerate(answers[:500]):
            other = list(words)
            for place in rng.sample(range(len(words)), changed):
                other[place] = f"changed{rng.randrange(10**6)}"
            probe = minhash_signature(number, f"Tell me about {number}", " ".join(other))
            hits += probe is not None and near.earlier(0, 10**6, probe) == (0, number + 1)
        shares[changed] = hits / 500
    print("| near copies: words changed of 120 | found |\n|---|---|")
    for changed, share in shares.items():
        print(f"| {changed} | {share:.1%} |")
    print(f"| unrelated answers | {alarms / num:.2%} |\n")
    return {f"near copies found, {changed} of 120 words changed": share for changed, share in shares.items()}


def _is_near(near: NearDuplicates, number: int, words: list[str]) -> bool:
    made = minhash_signature(number, f"Tell me about {number}", " ".join(words))
    return made is not None and near.earlier(0, number + 1, made) is not None


def whole_sets() -> dict[str, float]:
    """Datasets of some thousand rows with clusters of three sizes among honest rows that look alike, prepared."""
    num, found = Counter[str](), Counter[str]()
    for number, size in enumerate((50, 100, 250)):
        rows = screen_whole_sets.whole_rows(SEED + number, size)
        kept = _kept_aside([screen_whole_sets.a_line(question, answer) for _, question, answer in rows])
        num.update(name for name, *_ in rows)
        found.update(rows[line - 1][0] for line in kept)
    print("| rows of whole datasets | rows | kept aside |\n|---|---|---|")
    for name in num:
        print(f"| {name} | {num[name]} | {found[name] / num[name]:.1%} |")
    print()
    bad = [name for name in num if name not in screen_whole_sets.GOOD]
    good = list(screen_whole_sets.GOOD)
    return {
        "clusters and lengths recall": sum(found[name] for name in bad) / sum(num[name] for name in bad),
        "clusters and lengths false_positives": sum(found[name] for name in good) / sum(num[name] for name in good),
    }


def _kept_aside(rows: list[dict[str, str]]) -> list[int]:
    options = PrepareOptions(screens=(Screen.RARE_TRIGGER, Screen.LENGTH_OUTLIER))
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "rows.jsonl", Path(folder) / "dataset"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        prepare([source], out, options)
        lines = (out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["line"] for line in lines]


def overlaps(num: int = 250) -> dict[str, float]:
    """Near copies of held-out cases, and rows that only share a template or a phrase with one."""
    cases, copies, fine = screen_whole_sets.overlaps(SEED, num)
    overlap = ContaminationCheck(cases)
    shares = {}
    print("| beside held-out cases | rows | kept aside |\n|---|---|---|")
    for rows in (copies, fine):
        total, found = Counter[str](), Counter[str]()
        for name, question, answer in rows:
            total[name] += 1
            found[name] += overlap.find(question, answer) is not None
        for name in total:
            print(f"| {name} | {total[name]} | {found[name] / total[name]:.1%} |")
        shares[rows is copies] = found.total() / total.total()
    begin = time.process_time()
    for _, question, answer in copies + fine:
        overlap.find(question, answer)
    each = (time.process_time() - begin) / len(copies + fine)
    print(f"\n{1 / each:>10,.0f} rows/s beside {len(cases)} cases\n")
    return {"overlap recall": shares[True], "overlap false_positives": shares[False], "overlap rows_per_s": 1 / each}


def prose_rows(num: int) -> list[Row]:
    rng = random.Random(SEED)
    ends = ["", "", "", "", "", "", "", " See page 12.", " Voilà — “fin”.", " It was 1998 in Köln."]
    return [[prose(rng, 50), prose(rng, NUM_WORDS - 50) + ends[number % 10]] for number in range(num)]


def risky_rows(num: int) -> list[Row]:
    """Rows of the good corpus, each in prose: what an application that writes code and links captures."""
    rng = random.Random(SEED)
    good = [row for _, row in good_rows(SEED, 300)]
    rng.shuffle(good)
    rows = []
    for number in range(num):
        row = good[number % len(good)]
        rows.append([row[0], row[1] + " " + prose(rng, max(1, NUM_WORDS - sum(len(text.split()) for text in row)))])
    return rows


def speed(look: Callable[[Row], object], rows: list[Row], rounds: int) -> float:
    """Rows for each second of one processor; the best round counts."""
    best = 0.0
    for _ in range(rounds):
        begin = time.process_time()
        for row in rows:
            look(row)
        best = max(best, len(rows) / (time.process_time() - begin))
    return best


def beside_peer(rows: list[Row], rounds: int) -> dict[str, float]:
    """detect-secrets with its default settings on a file of a row a line: speed, secrets found, good rows stopped."""
    from detect_secrets import SecretsCollection
    from detect_secrets.settings import default_settings

    def stopped(rows: list[Row]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.txt"
            path.write_text("".join(" ".join(" ".join(row).split()) + "\n" for row in rows), encoding="utf-8")
            found = SecretsCollection()
            found.scan_file(str(path))
            return len({secret.line_number for _, secret in found}) / len(rows)

    with default_settings():
        best = 0.0
        for _ in range(rounds):
            begin = time.process_time()
            stopped(rows)
            best = max(best, len(rows) / (time.process_time() - begin))
        return {
            "detect-secrets rows_per_s": best,
            "detect-secrets recall of secrets": stopped(
                [row for _, s, row in bad_rows(SEED, NUM_BAD) if s == "secret"]
            ),
            "detect-secrets false_positives": stopped([row for _, row in good_rows(SEED, NUM_GOOD)]),
        }


if __name__ == "__main__":
    main()
