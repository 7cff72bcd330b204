"""The reference backend: NumPy from the operators' definitions. Slow, right, always there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import Kernel, Lowering, flops, is_view
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph
from taso.graph.types import DType, TensorType

OPERATIONS_PER_SECOND = 1e11
"""Multiplications and additions a second that the formula of costs assumes: a few cores of a present server."""
BYTES_PER_SECOND = 1e10
"""Bytes a second that the formula of costs assumes to pass between memory and processor."""
SECONDS_PER_KERNEL = 1e-6
"""What the formula of costs charges for launching a kernel."""


class ReferenceBackend:
    """Runs graphs with `evaluate_graph`; costs are a formula, since its own times say nothing of any other backend.

    The formula: operations / `OPERATIONS_PER_SECOND` + bytes read and written / `BYTES_PER_SECOND` +
    `SECONDS_PER_KERNEL`. Dimensions that are symbols count as 1.
    """

    name = "reference"
    measures = False
    plans = False

    def __init__(self) -> None:
        self.lowering = Lowering()

    def device_key(self) -> str:
        """The same on every machine: a formula knows of none."""
        return "reference formula 1"

    def measure(self, kernel: Kernel) -> float:
        """Seconds by the formula; nothing is run."""
        if is_view(kernel):
            return 0.0
        moved = sum(_bytes(o.type) for o in (*kernel.operands, *kernel.results))
        return flops(kernel) / OPERATIONS_PER_SECOND + moved / BYTES_PER_SECOND + SECONDS_PER_KERNEL

    def compile(self, graph: Graph, threads: int | None = None) -> ReferenceProgram:
        """A program that evaluates `graph` node by node; `threads` is without effect."""
        return ReferenceProgram(graph)


def _bytes(t: TensorType) -> float:
    if t.other is not None or t.shape is None:
        return 0.0
    size = 1.0
    for dim in t.dims:
        size *= dim if isinstance(dim, int) else 1
    return size * _ITEM_BYTES.get(t.dtype, 4)


_ITEM_BYTES = {DType.DOUBLE: 8, DType.INT64: 8, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.BOOL: 1, DType.INT8: 1,
               DType.UINT8: 1}  # fmt: skip


class ReferenceProgram:
    """A graph that is evaluated with NumPy at each call."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kernels = len(graph.run_time_nodes)

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name; raises `InputError` where `feeds` do not fit the graph's inputs."""
        return {name: _own(array) for name, array in evaluate_graph(self._graph, feeds).items()}

    @property
    def kernels(self) -> int:
        """Operators that depend on an input; what depends on weights alone is not counted."""
        return self._kernels

    @property
    def peak_bytes(self) -> int:
        """0: NumPy allocates as it goes, there is no arena."""
        return 0


def _own(array: Array) -> Array:
    """An array that shares no memory with weights or inputs; what is no array (a sequence) is passed on."""
    if not isinstance(array, np.ndarray):
        return array
    own: Array = array.copy()
    return own
