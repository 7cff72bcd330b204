"""The cuDNN backend: costs measured kernel by kernel on an NVIDIA GPU, graphs compiled into captured launches."""

from __future__ import annotations

from functools import lru_cache, partial

from taso.backends.base import checked_threads
from taso.backends.cudnn.device import CudaDevice, Device, cupy
from taso.backends.cudnn.executor import Program, name_of
from taso.backends.cudnn.frontend import about, planner
from taso.backends.cudnn.fusion import APART, WHOLE, CudnnFusion, CudnnLayouts, CudnnLowering
from taso.backends.cudnn.kernels import KERNEL_FORMAT, attends, ways
from taso.backends.cudnn.measuring import METHOD, measured
from taso.backends.cudnn.needs import Needs, placed
from taso.backends.lowering import BF16, FLOAT32, FP16, TF32, Kernel, is_view
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError
from taso.graph.graph import Graph
from taso.graph.operator import Trait

PRECISIONS = (FLOAT32, TF32, FP16, BF16)
"""What products of float32 tensors may be computed in."""


class CudnnBackend:
    """Runs graphs on the current NVIDIA GPU.

    `precision` is that of convolutions and matrix products of float32 tensors: "float32" (without TF32), "tf32", "fp16"
    or "bf16", which round factors and add in float32. `device` stands in for the GPU in tests. Raises
    `BackendUnavailable` where a package, the driver or a GPU is missing, `BackendError` for a precision that is none.
    """

    measures = True
    plans = True

    def __init__(self, precision: str = FLOAT32, device: Device | None = None) -> None:
        if precision not in PRECISIONS:
            raise BackendError(f"the precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.device: Device = _gpu() if device is None else device
        self.name = name_of(precision)
        # tensor cores read channels that lie side by side
        layouts = CudnnLayouts(innermost=precision != FLOAT32, permuted=precision != FLOAT32)
        needs = Needs(self.device, precision)
        self.lowering = CudnnLowering(
            layouts, CudnnFusion(attends=precision != FLOAT32), partial(ways, precision=precision),
            needs.overwritable, needs.scratch, precision, WHOLE, partial(attends, self.device, precision), APART,
        )  # fmt: skip

    def device_key(self) -> str:
        """GPU, driver, versions of CuPy and cuDNN, precision, and the version of what is built around them."""
        precision = [] if self.lowering.precision == FLOAT32 else [self.lowering.precision]
        return "; ".join([self.device.key(), f"kernels {KERNEL_FORMAT}", f"measured {METHOD}", *precision])

    def measure(self, kernel: Kernel) -> float:
        """Seconds of one run (`taso.backends.cudnn.measuring`).

        0 for what moves nothing. Kernels of opaque operators are not run, since nothing says which inputs they take:
        the reference backend's formula stands in. Raises `BackendError` where the kernel fails, or memory is short.
        """
        if is_view(kernel) or not kernel.steps and self.lowering.layouts.alike(
            kernel.operands[0].type, kernel.operands[0].layout, kernel.results[0].layout
        ):
            return 0.0
        tensors = [o.type for o in (*kernel.operands, *kernel.results)]
        if any(s.op.has(Trait.OPAQUE) for s in kernel.steps) or not all(map(placed, tensors)):
            return ReferenceBackend().measure(kernel)
        return measured(kernel, self.lowering, self.device)

    def compile(self, graph: Graph, threads: int | None = None) -> Program:
        """A program for `graph`; `threads` is checked and has no effect."""
        if threads is not None:
            checked_threads(threads)
        # where programs are made nothing is measured for now
        self.device.release()
        return Program(graph, self.lowering, self.device)


@lru_cache(maxsize=1)
def _gpu() -> CudaDevice:
    """The current GPU: one device for all backends of a process, which share its plans and its kernels."""
    module = cupy()
    return CudaDevice(module, planner, about())


__all__ = ["PRECISIONS", "CudnnBackend"]
