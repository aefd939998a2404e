"""Run small passes as CUDA graphs: launching their kernels one by one takes longer than computing them.

A graph is captured for one bucket of static sizes (`segments.GraphBucket`) and reads its inputs from fixed memory, so
each batch is first padded to a bucket. The first batch of a bucket runs eagerly; the second one is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunesmith.models.attention import SegmentAttention, VarlenTensors
from tunesmith.models.fast.batches import DeviceBatch
from tunesmith.models.segments import GraphBucket

_MAX_WORK = 2.5e13
"""Tokens × parameters up to which launch overhead matters: below half of it a fast device waits for the host, up to it
for the gaps between kernels."""
_MAX_DEVICE_SHARE = 0.9
_MAX_PADDING = 1.02
"""Maximum ratio of padded to real tokens when an existing graph is reused."""
_MAX_GRAPHS = 48
RunLayers = Callable[[Any, Any, Any, SegmentAttention], tuple[Any, Any]]
"""Takes token ids, rotary cosines and sines, and attention; returns the residual stream and the last block's output,
not added to it yet."""


def is_small(num_tokens: int, num_parameters: int) -> bool:
    return num_tokens * num_parameters < _MAX_WORK


class CudaGraphCache:
    """The captured graphs of one model. They share one memory pool, because passes run one after the other."""

    def __init__(self, run_layers: RunLayers) -> None:
        self._run_layers = run_layers
        self._pool = torch.cuda.graph_pool_handle()
        self._seen_buckets: set[GraphBucket] = set()
        self._graphs: dict[GraphBucket, CapturedGraph] = {}
        self.num_passes = 0
        """Number of forward passes started."""
        self.problem: str | None = None
        """Why capturing was given up, or None."""

    def choose(self, bucket: GraphBucket) -> GraphBucket:
        """Return the smallest captured bucket that this one fits in with little padding, else the bucket itself."""
        captured = [other for other in self._graphs if bucket.fits_in(other, _MAX_PADDING)]
        return min(captured, key=lambda other: (other.num_tokens, other.num_segments * other.longest), default=bucket)

    def __call__(self, bucket: GraphBucket, batch: DeviceBatch) -> tuple[Any, Any]:
        """Run the pass as a CUDA graph, with gradients. Call backward before the next forward: graphs share memory."""
        graph = self._graph_for(bucket, batch)
        if graph is None:
            return self._run_layers(batch.ids, batch.cos, batch.sin, batch.attend)
        self.num_passes += 1
        start = torch.empty(0, device=batch.ids.device, requires_grad=True)  # makes autograd call our backward
        outputs: tuple[Any, Any] = _Replay.apply(start, batch, graph, self)
        return outputs

    def _graph_for(self, bucket: GraphBucket, batch: DeviceBatch) -> CapturedGraph | None:
        is_second = bucket in self._seen_buckets and bucket not in self._graphs
        self._seen_buckets.add(bucket)
        if is_second and self.problem is None and len(self._graphs) < _MAX_GRAPHS and _has_headroom(batch.ids.device):
            try:
                self._graphs[bucket] = CapturedGraph(self._run_layers, batch, self._pool)
            except RuntimeError as error:  # a kernel that cannot be captured, or not enough memory
                self.problem = " ".join(str(error).split())[:200]
        return self._graphs.get(bucket)


def _has_headroom(device: Any) -> bool:
    """Whether a pass fits in memory twice: captured graphs keep their memory, and eager passes need it again."""
    held, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return bool(held + 2 * (peak - held) <= _MAX_DEVICE_SHARE * torch.cuda.mem_get_info(device)[1])


class CapturedGraph:
    """The forward and backward pass of one bucket as two CUDA graphs."""

    def __init__(self, run_layers: RunLayers, batch: DeviceBatch, pool: Any) -> None:
        self._batch = _clone(batch)
        self._forwards, self._backwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forwards, pool=pool):
            outputs = run_layers(self._batch.ids, self._batch.cos, self._batch.sin, self._batch.attend)
        self._grads = [torch.zeros_like(tensor) for tensor in outputs]
        with torch.cuda.graph(self._backwards, pool=pool):
            torch.autograd.backward(outputs, self._grads)
        self._outputs = [tensor.detach() for tensor in outputs]

    def forward(self, batch: DeviceBatch) -> list[Any]:
        torch._foreach_copy_(_tensors(self._batch), _tensors(batch))
        self._forwards.replay()
        return self._outputs

    def backward(self, *grads: Any) -> None:
        torch._foreach_copy_(self._grads, list(grads))
        self._backwards.replay()


def _clone(batch: DeviceBatch) -> DeviceBatch:
    """Copy a batch into static memory. It has no segments: later batches reuse the graph, so it must not read them."""
    assert batch.varlen_tensors is not None
    starts = (batch.varlen_tensors.cu_seqlens_q.clone(), batch.varlen_tensors.cu_seqlens_k.clone())
    gathering = batch.varlen_tensors.gathering
    own = None if gathering is None else (gathering[0].clone(), gathering[1].clone())
    varlen_tensors = VarlenTensors(*starts, batch.varlen_tensors.max_seqlen_q, batch.varlen_tensors.max_seqlen_k, own)
    return DeviceBatch(batch.ids.clone(), batch.cos.clone(), batch.sin.clone(), (), varlen_tensors)


def _tensors(batch: DeviceBatch) -> list[Any]:
    assert batch.varlen_tensors is not None
    starts = [batch.varlen_tensors.cu_seqlens_q, batch.varlen_tensors.cu_seqlens_k]
    return [batch.ids, batch.cos, batch.sin, *starts, *(batch.varlen_tensors.gathering or ())]


class _Replay(torch.autograd.Function):
    """Replays a graph. The captured layers add the parameters' gradients in place, so backward returns none."""

    @staticmethod
    def forward(
        ctx: Any, start: Any, batch: DeviceBatch, graph: CapturedGraph, cache: CudaGraphCache
    ) -> tuple[Any, ...]:
        ctx.graph, ctx.cache, ctx.num_passes = graph, cache, cache.num_passes
        return tuple(tensor.view_as(tensor) for tensor in graph.forward(batch))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        if ctx.num_passes != ctx.cache.num_passes:
            raise RuntimeError("another forward pass began before this one's backward: its activations are overwritten")
        ctx.graph.backward(*grads)
        return None, None, None, None
