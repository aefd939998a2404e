"""What is wrong with an adapter's weights, read from the safetensors file itself: no torch, no trust.

A header is believed only if its tensors cover the file exactly: no overlap, no gap, no trailing byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tunesmith.core.errors import DataError
from tunesmith.profiles import safetensors_header
from tunesmith.profiles.safetensors_header import HeaderCut
from tunesmith.runs.rules.task import ErrorClass

_MAX_HEADER = 16 << 20
_MAX_TENSORS = 200_000
_CHUNK = 4 << 20
_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_EXPONENT = {"F64": 0x7FF0 << 48, "F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""All exponent bits set means NaN or infinity, in each of these formats."""
_UNSIGNED = {dtype: (1 << (8 * width - 1)) - 1 for dtype, width in _FLOATS.items()}
"""Everything but the sign; none of it set means zero."""


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header; `begin` and `end` are places in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> list[Tensor]:
    """The tensors of a safetensors file, in the order of their bytes; raises DataError on anything odd."""
    try:
        entries, place, size = safetensors_header.read_header(path, _MAX_HEADER, on_duplicate=_stands_twice)
        if len(entries) > _MAX_TENSORS:
            raise _Odd(f"more than {_MAX_TENSORS} tensors")
        tensors = [_tensor(name, entry, place) for name, entry in entries.items()]
    except HeaderCut:
        raise DataError(f"{path.name}: its header is larger than the file or than any header of an adapter") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Odd) else type(error).__name__
        raise DataError(f"{path.name}: not a readable safetensors file ({reason})") from None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    for tensor in tensors:
        if tensor.begin != place:
            raise DataError(f"{path.name}: tensor {tensor.name[:80]!r} overlaps another or leaves a gap")
        place = tensor.end
    if place != size:
        raise DataError(f"{path.name}: its tensors end at byte {place}, the file at {size}")
    return tensors


class _Odd(ValueError):
    """What is odd about a header, in words for people."""


def _stands_twice(name: str) -> _Odd:
    return _Odd("a name stands twice in its header")


@dataclass(frozen=True)
class WeightsProblem:
    """Why weights must not be registered."""

    error_class: ErrorClass
    message: str


class _Found(Exception):
    """Ends the search at the first problem."""

    def __init__(self, error_class: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.problem = WeightsProblem(error_class, message)


def weights_problem(path: Path, start: Path | None = None) -> WeightsProblem | None:
    """Why these weights must not be registered, or None: odd file, not finite, all zero, or nothing learnt.

    `start` is the weights file that training started from. Without one, LoRA's B matrices start at zero, so an adapter
    in which they all are still zero learnt nothing.
    """
    try:
        _search(path, start)
    except _Found as found:
        return found.problem
    except DataError as error:
        return WeightsProblem(ErrorClass.MISMATCH, error.message)
    except OSError as error:
        return WeightsProblem(ErrorClass.MISMATCH, f"{path.name}: cannot be read ({error.strerror})")
    return None


def _search(path: Path, start: Path | None) -> None:
    tensors = read_header(path)
    with path.open("rb") as source:
        zero = {tensor.name: _is_zero(source, tensor) for tensor in tensors if tensor.dtype in _FLOATS}
    odd = next((tensor for tensor in tensors if tensor.dtype not in _FLOATS), None)
    if odd is not None and zero:
        raise _Found(ErrorClass.MISMATCH, f"{path.name}: tensor {odd.name[:80]!r} holds {odd.dtype}, no weights")
    if not zero:
        raise _Found(ErrorClass.MISMATCH, f"{path.name}: holds no weights")
    if all(zero.values()):
        raise _Found(ErrorClass.MISMATCH, f"{path.name}: all weights are zero")
    _check_pairs(path, tensors)
    late = [is_zero for name, is_zero in zero.items() if ".lora_B." in name]
    if start is None and late and all(late):
        raise _Found(ErrorClass.MISMATCH, "every lora_B is still zero, as at the start: nothing was learnt")
    if start is not None and _same_weights(path, tensors, start):
        raise _Found(ErrorClass.MISMATCH, "the weights equal those it started from: nothing was learnt")


def _check_pairs(path: Path, tensors: list[Tensor]) -> None:
    """Each A (rank × in) has its B (out × rank)."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for name, shape in shapes.items():
        for ours, theirs, axis in ((".lora_A.", ".lora_B.", 0), (".lora_B.", ".lora_A.", 1)):
            partner = shapes.get(name.replace(ours, theirs), ())
            if ours in name and (min(len(shape), len(partner)) < 2 or shape[axis] != partner[1 - axis]):
                raise _Found(ErrorClass.MISMATCH, f"{path.name}: {name[:80]!r} has no partner of the same rank")


def _tensor(name: str, entry: dict[str, object], offset: int) -> Tensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if set(entry) != {"dtype", "shape", "data_offsets"} or not isinstance(dtype, str):
        raise ValueError
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(shape) > 8:
        raise ValueError
    begin, end = offsets
    if any(type(number) is not int or number < 0 for number in [*shape, begin, end]):
        raise ValueError
    if math.prod(shape) * _SIZES[dtype] != end - begin:
        raise ValueError
    return Tensor(name, dtype, tuple(shape), offset + begin, offset + end)


def _is_zero(source: BinaryIO, tensor: Tensor) -> bool:
    """Whether all values are zero, of either sign; raises at the first that is no finite number."""
    zero = True
    for chunk in _chunks(source, tensor):
        is_finite, is_zero = _look(chunk, tensor.dtype)
        if not is_finite:
            raise _Found(ErrorClass.NONFINITE, f"tensor {tensor.name[:80]!r} holds NaN or infinity")
        zero = zero and is_zero
    return zero


def _look(chunk: bytes, dtype: str) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are zero. numpy where it is installed; a loop where it is not."""
    exponent, unsigned = _EXPONENT[dtype], _UNSIGNED[dtype]
    try:
        import numpy
    except ImportError:
        finite, zero = True, True
        for value in _integers(chunk, dtype):
            finite = finite and value & exponent != exponent
            zero = zero and not value & unsigned
        return finite, zero
    values = numpy.frombuffer(chunk, dtype=f"<u{_FLOATS[dtype]}")
    is_special = (values & values.dtype.type(exponent)) == exponent
    return not is_special.any(), not (values & values.dtype.type(unsigned)).any()


def _integers(chunk: bytes, dtype: str) -> memoryview[int]:
    view = memoryview(chunk)
    match _FLOATS[dtype]:
        case 8:
            return view.cast("Q")
        case 4:
            return view.cast("I")
        case _:
            return view.cast("H")


def _same_weights(path: Path, tensors: list[Tensor], start: Path) -> bool:
    others = {tensor.name: tensor for tensor in read_header(start)}
    if {tensor.name for tensor in tensors} != set(others):
        return False
    with path.open("rb") as ours, start.open("rb") as theirs:
        for tensor in tensors:
            other = others[tensor.name]
            if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
                return False
            if any(a != b for a, b in zip(_chunks(ours, tensor), _chunks(theirs, other), strict=True)):
                return False
    return True


def _chunks(source: BinaryIO, tensor: Tensor) -> Iterator[bytes]:
    place = tensor.begin
    while place < tensor.end:
        source.seek(place)
        chunk = source.read(min(_CHUNK, tensor.end - place))
        if not chunk:
            raise DataError(f"the file ends inside tensor {tensor.name[:80]!r}")
        place += len(chunk)
        yield chunk
