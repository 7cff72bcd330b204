"""LSTM, GRU and RNN on the device: the product of all inputs at once, then a product and a kernel of ours per step.

Products are cuBLAS's, in float32 whatever the precision. The steps follow each other in the program's CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.device import Device
from taso.backends.cudnn.launching import BytesLaunch, ProductLaunch
from taso.backends.cudnn.sources.launches import SourceLaunch
from taso.backends.cudnn.sources.recurrence import FUNCTIONS, GATES, Cell, gru, gru_end, gru_reset, lstm, rnn
from taso.backends.lowering import PLAIN, Kernel
from taso.backends.places import RESULT, ArraySpec, Place, row_major_strides
from taso.backends.recipe import Launch
from taso.graph.operator import Attrs
from taso.graph.types import DType

RECURRENT = frozenset(GATES)
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_ITEM = 4

Step = SourceLaunch | Launch
"""A kernel of ours, or another launch."""


@dataclass(frozen=True)
class Layer:
    """A recurrent kernel: sizes, and one cell for each direction."""

    kernel: Kernel
    steps: int
    batch: int
    inputs: int
    size: int
    cells: tuple[Cell, ...]

    @property
    def gates(self) -> int:
        return self.cells[0].gates

    @property
    def scratch(self) -> tuple[int, ...]:
        """Bytes of the products with the input, of those with h, of what a GRU multiplies beside, and of an LSTM's
        state where nobody reads it."""
        row = self.batch * self.size * _ITEM
        unread = self.cells[0].op == "LSTM" and not self.has(2)
        state = (len(self.cells) * row,) if unread else ()
        return self.steps * self.gates * row, self.gates * row, 2 * row, *state

    def has(self, result: int) -> bool:
        """Whether an output is made: the last ones are not where nobody reads them."""
        return result < len(self.kernel.results)

    def given(self, position: int) -> int | None:
        """The operand of an input."""
        inputs = self.kernel.steps[0].inputs
        return inputs[position] if position < len(inputs) else None


def layer_of(kernel: Kernel, array: Callable[[int], Array]) -> Layer | None:
    """The layer that a kernel is; None where there are no kernels for it. `array` gives a constant operand.

    Not covered: other types than float32, layout=1, clip, activations that are none of `FUNCTIONS`, and sequences that
    are shorter than the input, or whose lengths are computed.
    """
    step = kernel.anchor
    if step is None or step.op.domain or step.op.name not in RECURRENT or len(kernel.steps) != 1:
        return None
    indices = [i for i in step.inputs if i is not None]
    held = [*kernel.results, *(kernel.operands[i] for i in indices if i >= 0)]
    lengths = step.inputs[4] if len(step.inputs) > 4 else None
    floats = [o for o in held if lengths is None or o is not kernel.operands[lengths]]
    if any(i < 0 for i in indices) or any(o.layout != PLAIN or not o.type.static for o in held):
        return None
    if any(o.type.dtype is not DType.FLOAT or 0 in o.type.static_shape for o in floats):
        return None
    x, r = (kernel.operands[indices[i]].type.static_shape for i in (0, 2))
    if lengths is not None and not (kernel.operands[lengths].constant and bool(np.all(array(lengths) == x[0]))):
        return None
    cells = _cells(step.op.name, step.attrs, x[1], r[2])
    return None if cells is None else Layer(kernel, x[0], x[1], x[2], r[2], cells)


def _cells(name: str, attrs: Attrs, batch: int, size: int) -> tuple[Cell, ...] | None:
    if attrs.int("layout") or attrs["clip"] is not None:
        return None
    ways = 2 if attrs.str("direction") == "bidirectional" else 1
    given = attrs["activations"]
    names = [str(n).lower() for n in (given if isinstance(given, tuple) and given else _DEFAULTS[name] * ways)]
    each = len(_DEFAULTS[name])
    if len(names) != each * ways or any(n not in FUNCTIONS for n in names):
        return None
    late = name == "GRU" and bool(attrs.int("linear_before_reset"))
    coupled = name == "LSTM" and bool(attrs.int("input_forget"))
    return tuple(
        Cell(name, tuple(names[way * each : (way + 1) * each]), batch, size, late, coupled) for way in range(ways)
    )


@dataclass(frozen=True)
class Unrolled:
    """A layer's launches on buffers: `place` gives that of an operand, `scratch` has those of `Layer.scratch`."""

    layer: Layer
    device: Device
    place: Callable[[int], Place]
    scratch: Sequence[Place]

    def launches(self) -> Iterator[Step]:
        """All launches, in order."""
        backwards = self.layer.kernel.steps[0].attrs.str("direction") == "reverse"
        for way, cell in enumerate(self.layer.cells):
            yield self.of_inputs(way)
            order = list(range(self.layer.steps))
            order = order[::-1] if way == 1 or backwards else order
            h, c = self.first(5, way), self.first(6, way) if cell.op == "LSTM" else None
            for t in order:
                after = self.made(0, t * len(self.layer.cells) + way)
                yield from self.step(cell, way, t, h, c, after)
                h, c = after, self.made(2, way) if cell.op == "LSTM" else None
            if h is not None and self.layer.has(1):
                size = self.layer.batch * self.layer.size * _ITEM
                yield BytesLaunch("copy", self.device, h, self.made(1, way), size)

    def step(
        self, cell: Cell, way: int, t: int, h: Place | None, c: Place | None, after: Place
    ) -> Iterator[Step]:  # fmt: skip
        n, late = cell.size, cell.late
        row = cell.gates * cell.batch * n * _ITEM
        x, g, beside = self.scratch[0], self.scratch[1], self.scratch[2]
        given = {"x": replace(x, offset=x.offset + t * row)}
        several = cell.op == "GRU" and not late
        if h is not None:
            rows = 2 if several else cell.gates
            yield self.product(h, self.weights(2, way, 0, rows, n), g, cell.batch, n, rows * n)
            given["g"] = g
        if self.layer.given(3) is not None:
            given["bias"] = self.part(3, way, 2 * cell.gates * n)
        if cell.op == "LSTM":
            if self.layer.given(7) is not None:
                given["peep"] = self.part(7, way, 3 * n)
            yield lstm(cell, given | ({} if c is None else {"before": c}) | {"made": self.made(2, way), "h": after})
            return
        if cell.op == "RNN":
            yield rnn(cell, given | {"h": after})
            return
        if h is not None:
            given["before"] = h
        if not several:
            yield gru(cell, given | {"h": after})
            return
        if h is not None:
            # reset · h, and behind it the product of that
            product = replace(beside, offset=beside.offset + cell.batch * n * _ITEM)
            yield gru_reset(cell, given | {"made": beside})
            yield self.product(beside, self.weights(2, way, 2, 1, n), product, cell.batch, n, n)
            given["last"] = product
        yield gru_end(cell, given | {"h": after})

    def of_inputs(self, way: int) -> Launch:
        """The gates' share of all inputs, for all steps."""
        s = self.layer
        index = s.given(0)
        x = self.place(0 if index is None else index)
        weights, rows = self.weights(1, way, 0, s.gates, s.inputs), s.steps * s.batch
        return self.product(x, weights, self.scratch[0], rows, s.inputs, s.gates * s.size)

    def product(self, left: Place, right: ArraySpec, made: Place, rows: int, inner: int, columns: int) -> Launch:
        inputs = (_matrix(left, rows, inner), right)
        name = f"cublas:{self.layer.kernel.steps[0].op.name}"
        return ProductLaunch(name, self.device, inputs, _matrix(made, rows, columns))

    def weights(self, position: int, way: int, gate: int, gates: int, inner: int) -> ArraySpec:
        """The rows of some gates in W or R, turned."""
        n = self.layer.size
        whole = self.part(position, way, self.layer.gates * n * inner)
        matrix = _matrix(replace(whole, offset=whole.offset + gate * n * inner * _ITEM), gates * n, inner)
        return replace(matrix, shape=matrix.shape[::-1], strides=matrix.strides[::-1])

    def part(self, position: int, way: int, count: int) -> Place:
        """One direction's numbers, so many, of an input that is there."""
        found = self.place(self.layer.given(position) or 0)
        return replace(found, offset=found.offset + way * count * _ITEM)

    def first(self, position: int, way: int) -> Place | None:
        """A state before the first step, None where it is 0."""
        absent = self.layer.given(position) is None
        return None if absent else self.part(position, way, self.layer.batch * self.layer.size)

    def made(self, result: int, number: int) -> Place:
        offset = number * self.layer.batch * self.layer.size * _ITEM
        if not self.layer.has(result):
            return replace(self.scratch[3], offset=self.scratch[3].offset + offset)
        return Place(RESULT, result, offset)


def _matrix(place: Place, rows: int, columns: int) -> ArraySpec:
    strides = tuple(_ITEM * s for s in row_major_strides((rows, columns)))
    return ArraySpec(place, np.dtype(np.float32), (rows, columns), strides)


__all__ = ["RECURRENT", "Layer", "Unrolled", "layer_of"]
