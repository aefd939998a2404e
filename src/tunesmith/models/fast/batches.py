"""A micro-batch as one row for the fast path: built on the host, then copied to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import pad

from tunesmith.models.attention import SegmentAttention, VarlenTensors
from tunesmith.models.packs import MicroBatch
from tunesmith.models.segments import (
    GraphBucket,
    Segment,
    VarlenLayout,
    graph_bucket,
    pad_to_bucket,
    to_device,
    varlen_layout_in,
)


@dataclass(frozen=True)
class DeviceBatch:
    """The inputs of one pass, on the device."""

    ids: Any
    cos: Any
    sin: Any
    segments: tuple[Segment, ...]
    varlen_tensors: VarlenTensors | None
    """None where segments are computed one after the other."""

    @property
    def attend(self) -> SegmentAttention:
        return SegmentAttention(self.segments, self.ids.device, varlen_tensors=self.varlen_tensors)


@dataclass(frozen=True)
class HostBatch:
    """The inputs of one pass on the host, padded to a graph bucket if there is one."""

    segments: tuple[Segment, ...]
    ids: Any
    positions: Any
    logit_indices: Any
    """For each target token, the index of the position that predicts it."""
    bucket: GraphBucket | None
    varlen: VarlenLayout | None

    def to_device(self, device: Any, rotary_tables: Callable[[Any], tuple[Any, Any]]) -> DeviceBatch:
        """Copy it to the device; `rotary_tables` computes the cosines and sines of positions."""
        varlen_tensors = None if self.varlen is None else VarlenTensors.of(self.varlen, device)
        return DeviceBatch(
            to_device(self.ids, device),
            *rotary_tables(to_device(self.positions, device)),
            self.segments,
            varlen_tensors,
        )


def host_batch(batch: MicroBatch, choose: Callable[[GraphBucket], GraphBucket] | None) -> HostBatch:
    """Flatten a micro-batch into one row. `choose` maps its own graph bucket to the one to pad to; None: no padding."""
    num_rows, width = batch.ids.shape
    segments = batch.segments or (Segment(width),) * num_rows
    logit_indices = batch.columns[batch.picks] if num_rows == 1 else _logit_indices(batch)
    ids, positions = batch.ids.flatten(), batch.positions.flatten()
    if choose is None:
        return HostBatch(segments, ids, positions, logit_indices, None, None)
    bucket = choose(graph_bucket(segments))
    segments = pad_to_bucket(segments, bucket)
    missing = bucket.num_tokens - len(ids)
    return HostBatch(
        segments,
        pad(ids, (0, missing)),
        pad(positions, (0, missing)),
        logit_indices,
        bucket,
        varlen_layout_in(segments, bucket),
    )


def _logit_indices(batch: MicroBatch) -> Any:
    """For each target token, the index of its logits when all rows are concatenated."""
    num_columns = max(1, len(batch.columns))
    return batch.picks // num_columns * batch.ids.shape[1] + batch.columns[batch.picks % num_columns]
