"""What a GPU's runner asks of its device, by torch's own calls: memory, and recorded work.

Streams and events are `torch.Stream` and `torch.Event`, which serve every accelerator of torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.worker.gpu.graphs import Replay


class AcceleratorMeter:
    """`MemoryMeter` of an accelerator whose memory torch's allocator manages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.accelerator.synchronize(self._device)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.memory_reserved(self._device)

    def peak(self) -> int:
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.max_memory_reserved(self._device)

    def device(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self._device)


class CudaRecorder:
    """`GraphRecorder` by CUDA graphs (HIP's, on AMD GPUs) that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        if self._graph is None:
            raise RuntimeError("No graph is being captured.")
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph.replay
