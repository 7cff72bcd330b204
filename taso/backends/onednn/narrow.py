"""Which values lie in memory as bfloat16 between kernels where products are of bfloat16.

A value is stored so where its kernel and all that read it compute in float32 inside and take what comes in and goes out
in 8 bits of precision: products, pools, normalizations, softmax, activations, sums, and what only moves data. Whatever
else reads a value (differences, quotients, roots, exponentials, comparisons, a change of element type, indices) has it
in float32, and so has a graph its outputs. What no product, pool or norm is near stays in float32 too: positions and
sizes are numbers that 8 bits do not hold.

Who decides looks a few nodes around the value, at operators alone, so that a search knows what a rewrite changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from taso.backends.lowering import Group, Lowering, N, V, View
from taso.graph.operator import Operator, Trait
from taso.graph.types import DType

NARROW_FORMAT = 1
"""Raised whenever kernels of bfloat16 change so much that costs measured before no longer hold."""

COMPUTED = frozenset(
    {
        "Conv", "ConvTranspose", "MatMul", "Gemm", "MaxPool", "AveragePool", "GlobalAveragePool", "BatchNormalization",
        "Softmax", "LayerNormalization",
    }
)  # fmt: skip
"""Operators that make numbers of which 8 bits of precision are enough, and that take such."""
CONVERTING = frozenset({"Conv", "MatMul", "Gemm", "Softmax", "LayerNormalization"})
"""Operators that oneDNN has with one element type coming in and another one going out."""
ELEMENTS = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "Abs", "Elu", "LeakyRelu", "Gelu", "HardSwish", "Mish", "Swish", "Clip",
        "HardSigmoid", "Softplus", "Neg", "Add", "Mul", "Max", "Min",
    }
)  # fmt: skip
MOVING = frozenset({"Concat", "Split", "Slice", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
STORING = COMPUTED | ELEMENTS | MOVING
"""Operators that read and make what is stored as bfloat16."""

_FACTORS = {"Conv": 2, "ConvTranspose": 2, "MatMul": 2, "Gemm": 2, "Max": 2, "Min": 2, "Add": 2, "Mul": 2}
"""How many of an operator's inputs may be stored so, where it is not the first one alone; of a Concat all."""
_AROUND = 3
"""Operators on a way from a product, pool or norm to a value that is stored as it is."""


@dataclass(frozen=True)
class NarrowLowering(Lowering):
    """The local rule with values between kernels that lie in memory as bfloat16."""

    def narrow(self, view: View[N, V], value: V) -> bool:
        t = view.type(value)
        if t.dtype is not DType.FLOAT or t.other is not None or not t.static or not t.size:
            return False
        if view.is_output(value) or view.is_constant(value):
            return False
        node, readers = view.producer(value), view.consumers(value)
        if not _stores(view.op(node)) or not all(_takes(view, reader, value) for reader in readers):
            return False
        if view.op(node).name not in CONVERTING and any(_comes_in(view, v) for v in view.inputs(node) if v is not None):
            return False
        return any(view.op(r).name in COMPUTED for r in readers) or _is_computed(view, node, _AROUND)

    def beside(self, view: View[N, V], group: Group[N, V]) -> Hashable:
        read = (v for node in group.nodes for v in view.inputs(node) if v is not None and not view.is_constant(v))
        return tuple(self.narrow(view, v) for v in (*read, *view.outputs(group.last)))

    def minds_readers(self, op: Operator) -> bool:
        return _stores(op)


def _stores(op: Operator) -> bool:
    return not op.domain and op.name in STORING


def _takes(view: View[N, V], node: N, value: V) -> bool:
    """Whether a node reads a value as well where it is stored as bfloat16."""
    op = view.op(node)
    inputs = view.inputs(node)
    many = len(inputs) if op.name == "Concat" else _FACTORS.get(op.name, 1)
    if not _stores(op) or any(v == value for v in inputs[many:]):
        return False
    # into an output of the graph it would only be converted
    return op.name in CONVERTING or not any(map(view.is_output, view.outputs(node)))


def _comes_in(view: View[N, V], value: V) -> bool:
    return not view.is_constant(value) and view.op(view.producer(value)).has(Trait.SOURCE)


def _is_computed(view: View[N, V], node: N, around: int) -> bool:
    """Whether a product, pool or norm is among the last few operators behind which a value comes out."""
    op = view.op(node)
    if op.domain or op.name not in STORING:
        return False
    if op.name in COMPUTED or not around:
        return op.name in COMPUTED
    given = (v for v in view.inputs(node) if v is not None and not view.is_constant(v))
    return any(_is_computed(view, view.producer(v), around - 1) for v in given)


__all__ = ["COMPUTED", "CONVERTING", "MOVING", "NARROW_FORMAT", "NarrowLowering", "STORING"]
