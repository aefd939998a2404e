"""Identifiers: two never meet, whatever forks or threads; what people type is checked before it goes anywhere."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tunesmith.core.ids import is_id, is_in_share, is_name, new_id, new_token, next_id


def test_ids_are_unique_and_look_like_ids() -> None:
    made = [new_id("run") for _ in range(10_000)] + [next_id("task") for _ in range(10_000)]
    assert len(set(made)) == 20_000
    assert all(is_id(text) for text in made)
    assert len({new_token() for _ in range(1000)}) == 1000


def test_counted_ids_follow_each_other_in_order() -> None:
    made = [next_id("task") for _ in range(5000)]
    breaks = sum(a >= b for a, b in pairwise(made))
    assert breaks <= 1  # once in 2^80 the counter starts again at nought
    assert len({text[:-4] for text in made}) <= 3  # neighbours in an index


def test_counted_ids_of_threads_never_meet() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [i for some in pool.map(lambda _: [next_id("att") for _ in range(2000)], range(8)) for i in some]
    assert len(set(made)) == 16_000


def test_counted_ids_of_a_forked_process_are_its_own() -> None:
    ours = {next_id("task") for _ in range(10)}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(next_id("task") for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    theirs = set(os.read(reader, 65536).decode().split("\n"))
    os.close(reader)
    ours |= {next_id("task") for _ in range(100)}
    assert len(theirs) == 100
    assert not ours & theirs


@pytest.mark.parametrize("text", ["run-4t9kq2m7x1bz", "run-4", "task-0123456789abcdef", "att-z"])
def test_id_or_its_beginning_is_accepted(text: str) -> None:
    assert is_id(text)


@pytest.mark.parametrize("text", [
    "", "run", "run-", "run-" + "a" * 17, "RUN-4T9", "run-../x", "run-%", "run-a b", "r-1", "runner-1", "run-1\n",
    "run_1",
])  # fmt: skip
def test_anything_else_is_not_an_id(text: str) -> None:
    assert not is_id(text)


@pytest.mark.parametrize(("text", "fine"), [
    ("dates", True), ("my.profile_2-b", True), ("a", True), ("a" * 63, True),
    ("", False), ("a" * 64, False), (".hidden", False), ("-x", False), ("a..b", False), ("A", False),
    ("a/b", False), ("a b", False), ("a\x00", False), ("a\n", False), ("ä", False),
])  # fmt: skip
def test_name_is_safe_in_paths_and_urls(text: str, fine: bool) -> None:
    assert is_name(text) is fine


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.5, 0.999, 1.0])
def test_key_is_in_a_share_as_stored_keys_were_sorted_before(share: float) -> None:
    for number in range(3000):
        key = f"key-{number}"
        digest = hashlib.sha256(key.encode()).digest()
        assert is_in_share(key, share) == (int.from_bytes(digest[:8], "big") < share * 2**64)
        assert is_in_share(key, share, num_bytes=4) == (int.from_bytes(digest[:4]) / 2**32 < share)


def test_share_of_known_keys_is_what_it_always_was() -> None:
    within = "".join(str(int(is_in_share(f"key-{number}", 0.5, num_bytes=4))) for number in range(40))
    assert within == "0010010111011011111000001000011000010111"
