"""The oneDNN backend: costs measured kernel by kernel, graphs compiled into bound programs."""

from __future__ import annotations

import copy
import functools
import os
from functools import partial
from pathlib import Path

import numpy as np

from taso.backends.base import checked_threads
from taso.backends.lowering import BF16, FLOAT32, INT8, Kernel, Layouts, Lowering, is_view, none_chained
from taso.backends.onednn.coded import isa_here
from taso.backends.onednn.executor import Program, name_of, threads_in_force
from taso.backends.onednn.kernels import KERNEL_FORMAT, WHOLE, OneDNNFusion, ways
from taso.backends.onednn.library import library
from taso.backends.onednn.measuring import METHOD, Sweeps, measured, swept_before
from taso.backends.onednn.narrow import NARROW_FORMAT, NarrowLowering
from taso.backends.onednn.needs import overwritable, runs_chain, scratch_of
from taso.backends.onednn.qdq_groups import IntegerLayouts, IntegerLowering, multiplies_integers
from taso.backends.onednn.quantized import SATURATING
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.graph import Graph
from taso.graph.operator import Trait
from taso.graph.types import DType, TensorType


class OneDNNBackend:
    """Runs graphs with oneDNN on `threads` threads (by default as many as OpenMP would use).

    With `precision` "bf16" products of float32 tensors round their factors to bfloat16 and add in float32, where that
    pays and the processor has the instructions, and values between kernels are stored so
    (`taso.backends.onednn.narrow`); with "int8" products whose factors the model has as 8-bit integers,
    behind DequantizeLinear, are products of those. Raises `BackendUnavailable` where the library cannot be loaded or
    the processor has none, `BackendError` for a precision that is none.
    """

    measures = True
    plans = True

    def __init__(self, threads: int | None = None, precision: str = FLOAT32) -> None:
        self._library = library()
        self.name = name_of(checked_precision(precision, self._library.isa))
        self._sweeps = Sweeps()
        self._reads: int | None = None
        self.threads = checked_threads(threads) if threads is not None else self._library.get_max_threads()
        # vectors of 16 floats, or 8: a block of channels is one
        block = 16 if self._library.isa.startswith("avx512") else 8
        # AMX multiplies matrices whose rows are pixels; no blocks of channels
        innermost = precision == BF16 and "amx" in self._library.isa
        layouts = Layouts(block, innermost, permuted=True)
        lowering = Lowering
        if precision == INT8:
            # products of integers have their channels last
            layouts, lowering = IntegerLayouts(block, innermost=True), IntegerLowering
        if precision == BF16:
            lowering = NarrowLowering
        self.lowering = lowering(
            layouts, OneDNNFusion(), partial(ways, layouts=layouts, precision=precision), overwritable,
            scratch_of(layouts, self.threads, precision), precision, WHOLE,
            partial(runs_chain, layouts, self.threads) if precision == FLOAT32 else none_chained,
        )  # fmt: skip

    def device_key(self) -> str:
        """Processor, instruction set, version of oneDNN, threads, and the version of what is built around it."""
        parts = (
            processor(), self._library.isa, f"oneDNN {self._library.version_string}", f"{self.threads} threads",
            f"block {self.lowering.layouts.block}", f"kernels {KERNEL_FORMAT}", f"measured {METHOD}",
            *(["machine code"] if isa_here() is not None else []),
            *([] if self.lowering.precision == FLOAT32 else [self.lowering.precision]),
            *([f"stored {NARROW_FORMAT}"] if self.lowering.precision == BF16 else []),
        )  # fmt: skip
        return "; ".join(parts)

    def measure(self, kernel: Kernel) -> float:
        """Seconds of one run, in such surroundings as it has in a model (`taso.backends.onednn.measuring`).

        0 for what moves nothing. Kernels of opaque operators are not run, since nothing says which inputs they take:
        the reference backend's formula stands in.
        """
        layouts = self.lowering.layouts
        if is_view(kernel) or not kernel.steps and layouts.alike(
            kernel.operands[0].type, kernel.operands[0].layout, kernel.results[0].layout
        ):
            return 0.0
        tensors = [o.type for o in (*kernel.operands, *kernel.results)]
        if any(s.op.has(Trait.OPAQUE) for s in kernel.steps) or not all(map(_measurable, tensors)):
            return ReferenceBackend().measure(kernel)
        with threads_in_force(self._library, self.threads), np.errstate(all="ignore"):
            return measured(kernel, self.lowering, self._sweeps, self._reads)

    def in_model(self, reads: int) -> OneDNNBackend:
        """The same backend, with the costs of kernels in a model whose weights have so many bytes."""
        found = copy.copy(self)
        found._reads = reads
        return found

    def cost_key(self, kernel: Kernel) -> str:
        """The kernel's key, and how much was read before it where the model reads less than models mostly do."""
        swept = swept_before(kernel, self._reads)
        return kernel.key if swept == swept_before(kernel) else f"{kernel.key} behind {swept >> 20} MiB"

    def check(self, graph: Graph) -> None:
        """Raises `BackendError` where the precision is "int8" and the graph has no product of integers."""
        if self.lowering.precision == INT8 and not multiplies_integers(graph):
            raise BackendError(NOT_QUANTISED)

    def compile(self, graph: Graph, threads: int | None = None) -> Program:
        """A program for `graph` on `threads` threads (by default the backend's). Raises `BackendError` as `check` does.
        """
        self.check(graph)
        # where programs are made nothing is measured for now
        self._sweeps.release()
        return Program(graph, self.lowering, self.threads if threads is None else checked_threads(threads))


NOT_QUANTISED = (
    f"the model has no product of 8-bit integers: the precision '{INT8}' is for models that are quantised already, by "
    f"QuantizeLinear and DequantizeLinear around their products; quantise it first, or use '{FLOAT32}'"
)


def checked_precision(precision: str, isa: str) -> str:
    """`precision`, if it is one and a processor with these instructions computes in it."""
    if precision not in (FLOAT32, BF16, INT8):
        raise BackendError(f"the precision is '{FLOAT32}', '{BF16}' or '{INT8}', not {precision!r}")
    if precision == INT8 and isa in SATURATING:
        raise BackendUnavailable(
            f"this processor has no instructions for products of 8-bit integers (oneDNN uses {isa}): use '{FLOAT32}'"
        )
    if precision == BF16 and not any(name in isa for name in ("bf16", "fp16", "amx", "vnni_2")):
        raise BackendUnavailable(
            f"this processor has no instructions for products of bfloat16 (oneDNN uses {isa}): use '{FLOAT32}'"
        )
    return precision


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The processor's name, family, model and stepping as Linux tells them."""
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    except OSError:
        return f"unknown processor ({os.cpu_count()} cores)"
    return " ".join(found[w] for w in wanted if w in found)


def _measurable(t: TensorType) -> bool:
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)


__all__ = ["OneDNNBackend", "processor"]
