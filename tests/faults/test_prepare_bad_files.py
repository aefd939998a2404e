"""Bad JSONL, as users and attackers send it: the exact line, a stable reason, and nothing half-made."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.data import HALF, a_chat, a_file, a_pair, chats, encoded, num_examples
from tunesmith.core.errors import DataError
from tunesmith.datasets.prepare_folder import prepare
from tunesmith.datasets.report import PreparedDataset, PrepareOptions

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


def refusal(tmp_path: Path, *sources: Path, options: PrepareOptions = HALF) -> str:
    """The one line with which these files are refused; nothing stays behind."""
    out = tmp_path / "datasets" / "ds-1"
    with pytest.raises(DataError) as caught:
        prepare(list(sources), out, options)
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 3000
    return message


def dropped(tmp_path: Path, content: bytes) -> tuple[PreparedDataset, list[tuple[int, str, str]]]:
    """What a file becomes, and its bad lines: number, reason, field."""
    dataset = prepare([a_file(tmp_path, content)], tmp_path / "datasets" / "ds-1", HALF)
    bad = [(line.line, line.reason.value, line.field) for drop in dataset.report.drops for line in drop.first]
    return dataset, sorted(bad)


@pytest.mark.parametrize(
    ("bad", "reason", "field"),
    [
        (b"[1, 2]", "not_object", ""),
        (b"17", "not_object", ""),
        (b"null", "not_object", ""),
        (b'"text"', "not_object", ""),
        (b"{", "not_json", ""),
        (b'{"messages": NaN}', "non_finite", ""),
        (b'{"prompt": "a", "prompt": "b", "completion": "c"}', "duplicate_key", "prompt"),
        (b'{"prompt": "a\xff", "completion": "c"}', "invalid_utf8", ""),
        (b'{"prompt": "a\x00", "completion": "c"}', "nul", ""),
        (b'{"prompt": "a\\u0000", "completion": "c"}', "nul", ""),
        (b"\xef\xbb\xbf" + encoded(a_chat(99))[:-1], "byte_order_mark", ""),
        (b"x" * 70_000, "too_long", ""),
        ({"messages": [USER, USER, ANSWER]}, "role_order", "messages[1].role"),
        ({"messages": [ANSWER]}, "role_order", "messages[0].role"),
        ({"messages": [USER, {**ANSWER, "content": ""}]}, "empty_content", "messages[1].content"),
        ({"messages": [USER, {**ANSWER, "content": " \t"}]}, "empty_content", "messages[1].content"),
        ({"messages": []}, "empty_list", "messages"),
        ({"mesages": [USER, ANSWER]}, "missing_field", "messages"),
        (a_pair(99), "mixed_kind", ""),
        (b"[" * 60_000, "not_json", ""),
        (b'{"prompt": ' + b"[" * 30_000 + b"]" * 30_000 + b', "completion": "c"}', "not_json", ""),
        (b'{"prompt": "a", "completion": "\\ud83d"}', "bad_escape", ""),
        (b'{"prompt": "a", "completion": "\xed\xa0\xbd"}', "invalid_utf8", ""),
        (b'{"prompt": 1e999, "completion": "c"}', "non_finite", ""),
        (b'{"prompt": -Infinity, "completion": "c"}', "non_finite", ""),
        (b'{"prompt": ' + b"9" * 400 + b', "completion": "c"}', "non_finite", ""),
        (b'{"messages": [], "id": ' + b"9" * 5000 + b"}", "non_finite", ""),
        ({"messages": "hello"}, "wrong_type", "messages"),
        ({"messages": [USER, {**ANSWER, "content": 7}]}, "wrong_type", "messages[1].content"),
        ({"conversations": [{"from": "human", "value": "Why?"}]}, "no_answer", "conversations"),
        ({"instruction": "Why?", "output": ""}, "empty_content", "output"),
    ],
)
def test_bad_line_is_dropped_with_its_number_reason_and_field(
    tmp_path: Path, bad: Any, reason: str, field: str
) -> None:
    rows = chats(30)
    source = a_file(tmp_path, encoded(*rows[:16], bad, *rows[16:]))
    options = HALF.model_copy(update={"max_line_bytes": 65_536})
    dataset = prepare([source], tmp_path / "ds", options)
    (drop,) = dataset.report.drops
    (line,) = drop.first
    assert (line.source, line.line, line.reason.value, line.field) == ("rows.jsonl", 17, reason, field)
    assert line.fix
    assert num_examples(dataset) == 30


def test_invalid_bytes_are_placed_in_the_file(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + encoded(*chats(20), b'{"prompt": "a\xff"}', *chats(5), b'{"prompt": "a\x00"}')
    dataset, _ = dropped(tmp_path, content)
    told = {drop.reason.value: drop.first[0].problem for drop in dataset.report.drops}
    assert told == {
        "invalid_utf8": f"is not UTF-8 at byte {content.index(0xFF)} of the file",
        "nul": f"holds a NUL byte at byte {content.index(0)} of the file",
    }


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_last_line_that_is_cut_off_is_reported_as_such(tmp_path: Path, cut: int) -> None:
    dataset, bad = dropped(tmp_path, encoded(*chats(31))[: -1 - cut])
    assert bad == [(31, "cut_off", "")]
    assert num_examples(dataset) == 30


def test_last_line_without_an_end_that_is_whole_is_taken(tmp_path: Path) -> None:
    dataset, bad = dropped(tmp_path, encoded(*chats(31))[:-1])
    assert (num_examples(dataset), bad) == (31, [])


def test_crlf_mark_and_blank_lines_are_no_faults(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\r\n" + encoded(*chats(30)).replace(b"\n", b"\r\n\r\n")
    dataset, bad = dropped(tmp_path, content)
    assert (num_examples(dataset), bad, dataset.report.num_blank) == (30, [], 31)


def test_line_ends_of_old_macs_are_explained(tmp_path: Path) -> None:
    message = refusal(tmp_path, a_file(tmp_path, encoded(*chats(30)).replace(b"\n", b"\r")))
    assert "the only line is bad" in message
    assert "end lines with LF" in message


@pytest.mark.parametrize("indent", [None, 1])
def test_bad_item_of_an_array_is_named_by_its_number(tmp_path: Path, indent: int | None) -> None:
    items = [*chats(16), {"messages": []}, *chats(30)[16:], 7]
    dataset, bad = dropped(tmp_path, json.dumps(items, indent=indent).encode())
    assert (num_examples(dataset), bad) == (30, [(17, "empty_list", "messages"), (32, "not_object", "")])
    assert str(dataset.report.drops[0].first[0]).startswith("rows.jsonl item 17: messages has no messages;")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[", "rows.jsonl is cut off after item 0: its array has no end"),
        (b"[" + b", ".join(encoded(chat) for chat in chats(5)) + b",", "is cut off after item 5"),
        (json.dumps(chats(5)).encode() + b" x", "text follows the array after item 5"),
        (b"[]", "rows.jsonl: only blank lines"),
        (b"[[", "the only item is bad: 1 × not_json, first rows.jsonl item 1: is not JSON"),
        (b'[{"prompt": "' + b"x" * (5 << 20), "rows.jsonl item 1 has more than 4194304 bytes"),
    ],
)
def test_array_that_is_none_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path, a_file(tmp_path, content))


def test_array_cut_inside_an_item_names_the_item(tmp_path: Path) -> None:
    _, bad = dropped(tmp_path, json.dumps(chats(31)).encode()[:-30])
    assert bad == [(31, "cut_off", "")]


def _zstd(content: bytes) -> bytes:
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


@pytest.mark.parametrize("pack", [gzip.compress, _zstd])
def test_packed_file_that_is_cut_off_is_refused_with_the_last_line(tmp_path: Path, pack: Any) -> None:
    noise = random.Random(1)
    rows = [a_chat(number, note=noise.randbytes(300).hex()) for number in range(9000)]
    packed = pack(encoded(*rows))
    message = refusal(tmp_path, a_file(tmp_path, packed[: len(packed) * 3 // 4], "rows.jsonl.gz"))
    found = re.fullmatch(
        r"rows\.jsonl\.gz is cut off: its (gzip|zstd) data ends wrongly after line (\d+); copy it again", message
    )
    assert found is not None
    assert 1000 < int(found[2]) < 9000


def test_packed_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(encoded(*chats(2000))))
    packed[len(packed) // 2] ^= 255
    assert "rows.jsonl is damaged: its gzip data ends wrongly" in refusal(tmp_path, a_file(tmp_path, bytes(packed)))


@pytest.mark.parametrize("pack", [gzip.compress, _zstd])
def test_packed_file_that_unpacks_without_end_is_refused(tmp_path: Path, pack: Any) -> None:
    bomb = pack(b" " * (80 << 20))
    message = refusal(tmp_path, a_file(tmp_path, bomb))
    assert message.startswith("rows.jsonl decompresses to more than 250 times its size")


def test_file_packed_twice_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, a_file(tmp_path, gzip.compress(gzip.compress(encoded(*chats(30))))))
    assert message == "rows.jsonl is compressed (gzip) twice, not JSONL in UTF-8; unpack it once: gunzip"


def test_bad_line_of_a_packed_file_is_named_by_its_number(tmp_path: Path) -> None:
    _, bad = dropped(tmp_path, _zstd(encoded(*chats(16), b"junk", *chats(30)[16:])))
    assert bad == [(17, "not_json", "")]


def test_first_valid_row_decides_the_kind(tmp_path: Path) -> None:
    rows = [b"junk", a_pair(0), a_chat(1), *(a_pair(number) for number in range(2, 30))]
    dataset, bad = dropped(tmp_path, encoded(*rows))
    assert dataset.report.kind.value == "preference"
    assert bad == [(1, "not_json", ""), (3, "mixed_kind", "")]


def test_too_many_bad_lines_are_refused_with_first_lines_and_counts(tmp_path: Path) -> None:
    rows: list[Any] = chats(30)
    rows[4], rows[6], rows[9] = {"messages": []}, b"junk", {"messages": []}
    strict = PrepareOptions(max_bad_share=0.05)
    message = refusal(tmp_path, a_file(tmp_path, encoded(*rows)), options=strict)
    assert message == (
        "3 of 30 lines are bad, more than max_bad_share (0.05) allows: "
        "2 × empty_list, first rows.jsonl line 5: messages has no messages; add messages, or remove the line; "
        "1 × not_json, first rows.jsonl line 7: is not JSON at character 1; write one JSON object per line"
    )


def test_share_of_bad_lines_at_the_limit_is_accepted_and_above_it_refused(tmp_path: Path) -> None:
    ten_in_a_hundred = [*chats(90), *[b"junk"] * 10]
    options = HALF.model_copy(update={"max_bad_share": 0.1})
    dataset = prepare([a_file(tmp_path, encoded(*ten_in_a_hundred))], tmp_path / "ds", options)
    assert num_examples(dataset) == 90
    assert "11 of 101" in refusal(tmp_path, a_file(tmp_path, encoded(*ten_in_a_hundred, b"junk")), options=options)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; give a file"),
        (b"\n\r\n  \n", "only blank lines"),
        (b"\xef\xbb\xbf", "only blank lines"),
        (b"junk\n" * 5, "all 5 lines are bad: 5 × not_json, first rows.jsonl line 1"),
        (encoded(a_chat()), "one example only, so nothing can be held out"),
        (encoded(a_chat(), a_chat(), a_chat()), "one example only"),
        (encoded(*[{"prompt": "Same?", "completion": f"Answer {n}"} for n in range(9)]), "none of the 9 examples is"),
        ('{"a": 1}\n'.encode("utf-16"), "is UTF-16 (little endian)"),
    ],
)
def test_file_without_a_usable_dataset_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refusal(tmp_path, a_file(tmp_path, content), options=HALF.model_copy(update={"max_bad_share": 1.0}))


def test_small_file_with_nothing_held_out_says_what_to_do(tmp_path: Path) -> None:
    rows = [{"prompt": "Same?", "completion": f"Answer {number}"} for number in range(9)]
    message = refusal(tmp_path, a_file(tmp_path, encoded(*rows)), options=PrepareOptions(heldout_share=0.001))
    assert message.startswith("none of the 9 examples is held out")
    assert message.endswith("add examples with different prompts, or raise heldout_share (now 0.001)")


def test_one_bad_source_spoils_nothing_but_the_call(tmp_path: Path) -> None:
    good = a_file(tmp_path, encoded(*chats(30)), "good.jsonl")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a pipe" in refusal(tmp_path, good, pipe)
    assert "is a device" in refusal(tmp_path, good, Path("/dev/zero"))
    assert "is a directory" in refusal(tmp_path, good, tmp_path)
    assert "no file" in refusal(tmp_path, good, tmp_path / "missing.jsonl")
    assert "empty.jsonl is empty" in refusal(tmp_path, good, a_file(tmp_path, b"", "empty.jsonl"))


def test_unreadable_source_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    source = a_file(tmp_path, encoded(*chats(30)))
    source.chmod(0)
    assert "Permission denied" in refusal(tmp_path, source)
