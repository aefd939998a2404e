"""Weights are read from the file itself: odd files, NaN, zeros, untouched adapters; with numpy or without."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.core.errors import DataError
from tunesmith.programs.weights import read_header, weights_problem
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.sim.files import safetensors_bytes

A, B = "m.lora_A.weight", "m.lora_B.weight"


def adapter(path: Path, a: float = 0.5, b: float = 0.25) -> Path:
    path.write_bytes(safetensors_bytes({A: ([2, 3], [a] * 6), B: ([3, 2], [b] * 6)}))
    return path


def raw(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


@pytest.fixture(params=["numpy", "standard library"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check runs with numpy and with numpy not installed."""
    if request.param == "standard library":
        monkeypatch.setitem(sys.modules, "numpy", None)
    else:
        pytest.importorskip("numpy")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["a", "b"])
def test_weights_not_finite_anywhere_are_found(tmp_path: Path, value: float, where: str) -> None:
    problem = weights_problem(adapter(tmp_path / "w", **{where: value}))
    assert problem is not None
    assert problem.error_class is ErrorClass.NONFINITE


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("dtype", "good", "nan", "infinity"),
    [
        ("F64", struct.pack("<d", 1e300), struct.pack("<d", math.nan), struct.pack("<d", -math.inf)),
        ("F32", struct.pack("<f", 3e38), struct.pack("<f", math.nan), struct.pack("<f", -math.inf)),
        ("F16", struct.pack("<e", 65504.0), struct.pack("<e", math.nan), struct.pack("<e", -math.inf)),
        ("BF16", b"\x7f\x7f", b"\xc0\x7f", b"\x80\xff"),
    ],
)
def test_weights_every_float_format_tells_large_from_infinite(
    tmp_path: Path, dtype: str, good: bytes, nan: bytes, infinity: bytes
) -> None:
    for last, is_fine in ((good, True), (nan, False), (infinity, False)):
        body = good * 7 + last
        path = raw(tmp_path / "w", {"x": {"dtype": dtype, "shape": [8], "data_offsets": [0, len(body)]}}, body)
        assert (weights_problem(path) is None) is is_fine


@pytest.mark.usefixtures("reader")
def test_weights_all_zero_of_either_sign_are_found(tmp_path: Path) -> None:
    problem = weights_problem(adapter(tmp_path / "w", 0.0, -0.0))
    assert problem is not None
    assert "zero" in problem.message


@pytest.mark.usefixtures("reader")
def test_weights_smallest_number_is_not_zero(tmp_path: Path) -> None:
    assert weights_problem(adapter(tmp_path / "w", 0.0, 2.0**-126)) is None  # its only bit set is 0x80 of a middle byte


def test_weights_b_still_zero_means_nothing_was_learnt(tmp_path: Path) -> None:
    problem = weights_problem(adapter(tmp_path / "w", b=0.0))
    assert problem is not None
    assert "nothing was learnt" in problem.message


def test_weights_equal_to_the_start_mean_nothing_was_learnt(tmp_path: Path) -> None:
    start = adapter(tmp_path / "start")
    same, other = adapter(tmp_path / "same"), adapter(tmp_path / "other", b=0.26)
    problem = weights_problem(same, start)
    assert problem is not None
    assert "nothing was learnt" in problem.message
    assert weights_problem(other, start) is None
    assert weights_problem(other, tmp_path / "no-such-start") is not None


def test_weights_equal_in_another_order_still_mean_nothing_was_learnt(tmp_path: Path) -> None:
    start = adapter(tmp_path / "start")
    (tmp_path / "turned").write_bytes(safetensors_bytes({B: ([3, 2], [0.25] * 6), A: ([2, 3], [0.5] * 6)}))
    assert weights_problem(tmp_path / "turned", start) is not None


@pytest.mark.parametrize(
    "tensors",
    [
        {A: ([2, 3], [0.5] * 6)},
        {A: ([2, 3], [0.5] * 6), B: ([2, 3], [0.5] * 6)},
        {A: ([6], [0.5] * 6), B: ([3, 2], [0.5] * 6)},
    ],
    ids=["A without B", "ranks differ", "flat"],
)
def test_weights_pairs_that_do_not_fit_are_found(
    tmp_path: Path, tensors: dict[str, tuple[list[int], list[float]]]
) -> None:
    (tmp_path / "w").write_bytes(safetensors_bytes(tensors))
    problem = weights_problem(tmp_path / "w")
    assert problem is not None
    assert "rank" in problem.message


X = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
ONE = struct.pack("<f", 1.0)
ODD = {
    "empty file": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(b"1234567"),
    "huge header": lambda path: raw(path, {"x": X}, ONE, length=2**63),
    "header past the end": lambda path: raw(path, {"x": X}, ONE, length=4000),
    "not json": lambda path: raw(path, b"{nonsense", ONE),
    "list": lambda path: raw(path, [X], ONE),
    "deep": lambda path: raw(path, b"[" * 200_000),
    "no tensor": lambda path: raw(path, {"__metadata__": {"format": "pt"}}),
    "only integers": lambda path: raw(path, {"x": {**X, "dtype": "I32"}}, ONE),
    "unknown dtype": lambda path: raw(path, {"x": {**X, "dtype": "F99"}}, ONE),
    "wrong size": lambda path: raw(path, {"x": {**X, "shape": [2]}}, ONE),
    "negative shape": lambda path: raw(path, {"x": {**X, "shape": [-1, -1]}}, ONE),
    "shape of booleans": lambda path: raw(path, {"x": {**X, "shape": [True]}}, ONE),
    "giant shape": lambda path: raw(path, {"x": {**X, "shape": [2**62, 2**62]}}, ONE),
    "offsets turned": lambda path: raw(path, {"x": {**X, "data_offsets": [4, 0]}}, ONE),
    "overlap": lambda path: raw(path, {"x": X, "y": X}, ONE),
    "gap": lambda path: raw(path, {"x": X, "y": {**X, "data_offsets": [8, 12]}}, ONE * 3),
    "trailing bytes": lambda path: raw(path, {"x": X}, ONE + b"PK\x03\x04"),
    "cut": lambda path: raw(path, {"x": X}, ONE[:3]),
    "extra key": lambda path: raw(path, {"x": {**X, "code": "import os"}}, ONE),
    "folder": lambda path: path.mkdir(),
    "pickle": lambda path: path.write_bytes(b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix."),
}


@pytest.mark.parametrize("name", ODD)
def test_weights_odd_file_is_a_mismatch(tmp_path: Path, name: str) -> None:
    ODD[name](tmp_path / "w")
    problem = weights_problem(tmp_path / "w")
    assert problem is not None
    assert problem.error_class is ErrorClass.MISMATCH
    assert "\n" not in problem.message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000) | st.none())
def test_header_damaged_anywhere_is_read_or_refused(tmp_path: Path, place: int, byte: int, cut: int | None) -> None:
    good = bytearray(adapter(tmp_path / "w").read_bytes())
    good[place % len(good)] = byte
    (tmp_path / "w").write_bytes(good[: cut % len(good)] if cut is not None else good)
    weights_problem(tmp_path / "w")  # a verdict, whatever it is; never an exception
    try:
        tensors = read_header(tmp_path / "w")
    except DataError:
        return
    assert sum(tensor.end - tensor.begin for tensor in tensors) < len(good)


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
def test_weights_100_mb_are_checked_in_seconds(tmp_path: Path) -> None:
    body = struct.pack("<f", 0.5) * 25_000_000
    raw(tmp_path / "w", {"x": {"dtype": "F32", "shape": [25_000_000], "data_offsets": [0, len(body)]}}, body)
    begin = time.monotonic()
    assert weights_problem(tmp_path / "w") is None
    assert time.monotonic() - begin < 20.0
