"""The ONNX Runtime backend: costs are those of what it makes of a graph at its default level of optimization."""

from __future__ import annotations

import os

from taso.backends.base import checked_threads
from taso.backends.lowering import Kernel
from taso.backends.onednn.backend import processor
from taso.backends.onnxruntime.executor import RuntimeProgram
from taso.backends.onnxruntime.lowering import BlockedChannels, RuntimeLowering
from taso.backends.onnxruntime.measuring import measured
from taso.backends.onnxruntime.runtime import PROVIDER, channels_in_block, runtime
from taso.backends.reference import ReferenceBackend
from taso.graph.graph import Graph
from taso.graph.operator import Trait
from taso.graph.types import DType, TensorType

FORMAT = 3
"""Grows with every change of what is measured as a kernel, or how."""

_SECONDS: dict[tuple[int, tuple[object, ...]], float] = {}
"""What this process has measured, by threads and by what ONNX Runtime made of the kernel."""


class OnnxRuntimeBackend:
    """Runs graphs in ONNX Runtime on `threads` threads of its CPU provider (by default one for each usable processor).

    Raises `BackendUnavailable` where the package onnxruntime is not installed.
    """

    name = "onnxruntime"
    measures = True
    plans = False

    def __init__(self, threads: int | None = None) -> None:
        self._version = runtime().__version__
        self.threads = checked_threads(_processors() if threads is None else threads)
        self.lowering = RuntimeLowering(BlockedChannels(channels_in_block()), takes_algorithms=True)

    def device_key(self) -> str:
        """Processor, version of ONNX Runtime, provider, threads, and the version of what is measured."""
        parts = (
            processor(), f"ONNX Runtime {self._version}", PROVIDER, f"{self.threads} threads",
            f"block {self.lowering.layouts.block}", f"kernels {FORMAT}",
        )  # fmt: skip
        return "; ".join(parts)

    def measure(self, kernel: Kernel) -> float:
        """Seconds of one run within a graph, on random numbers (the same each time).

        The kernel is optimized and profiled as a model of its own; what is done at the ends of such a model alone, as
        putting channels in blocks, is not counted. Kernels that ONNX Runtime makes the same nodes of cost the same, and
        what it leaves out costs nothing. Kernels of opaque operators are not run, since nothing says which inputs they
        take: the reference backend's formula stands in.
        """
        if all(step.op.has(Trait.IDENTITY) for step in kernel.steps) and kernel.steps:
            return 0.0
        tensors = [o.type for o in (*kernel.operands, *kernel.results)]
        if any(s.op.has(Trait.OPAQUE) for s in kernel.steps) or not all(map(_measurable, tensors)):
            return ReferenceBackend().measure(kernel)
        found = measured(kernel, self.threads)
        return _SECONDS.setdefault((self.threads, found.made_of), found.seconds)

    def compile(self, graph: Graph, threads: int | None = None) -> RuntimeProgram:
        """A session for `graph` on `threads` threads (by default the backend's)."""
        return RuntimeProgram(graph, self.lowering, self.threads if threads is None else checked_threads(threads))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measurable(t: TensorType) -> bool:
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)
