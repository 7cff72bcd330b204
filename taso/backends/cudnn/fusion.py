"""What kernels of this backend take along, and in which layouts tensors lie: as ONNX has them, or channels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from taso.backends.lowering import (
    AXES,
    BLOCKED,
    LAST,
    PLAIN,
    Fusion,
    Group,
    Kernel,
    Layouts,
    Lowering,
    N,
    V,
    View,
    axes_of,
)  # fmt: skip
from taso.graph.operator import Attrs, Operator
from taso.graph.types import DType, TensorType

WHOLE = frozenset({"Gelu", "HardSwish", "Mish", "Swish"})
"""Functions of one element that files have in parts, and cuDNN and kernels of ours in one."""

APART = frozenset({"Attention", "Einsum"})
"""Operators that are made of products."""


class CudnnFusion(Fusion):
    """The general rule, and Erf too, of which a Gelu is made up.

    With `attends` the products and the softmax of an attention may be one kernel.
    """

    least_between = 1 << 16

    def __init__(self, attends: bool = False) -> None:
        self.attends = attends

    def chains(self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], out: TensorType) -> bool:
        if not self.attends or op.domain or out.dtype is not DType.FLOAT or out.shape is None or not out.static:
            return False
        if op.name == "Softmax":
            return attrs.int("axis") % out.rank == out.rank - 1
        return op.name == "MatMul" and all(t is not None and t.rank == out.rank and t.rank in (3, 4) for t in types)

    def reads_beside(self, op: Operator) -> bool:
        return self.attends and op.name == "MatMul"

    def anchors(self, op: Operator, out: TensorType) -> int | None:
        if op.name == "Erf" and out.dtype is DType.FLOAT and out.shape is not None:
            return 5
        return super().anchors(op, out)

    def follows(
        self, op: Operator, attrs: Attrs, position: int, types: Sequence[TensorType | None], out: TensorType
    ) -> bool:  # fmt: skip
        if op.name == "Erf":
            return out.dtype is DType.FLOAT and types[position] == out
        return super().follows(op, attrs, position, types, out)


@dataclass(frozen=True)
class CudnnLayouts(Layouts):
    """PLAIN and LAST. Convolutions have their channels last where `innermost`, as tensor cores want it.

    Where axes may lie in any order, products of cuDNN read matrices so if these are one batch with one step.
    """

    block: int = 1

    def possible(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], result: TensorType
    ) -> tuple[str, ...]:  # fmt: skip
        found = super().possible(op, attrs, types, result)
        return tuple(dict.fromkeys(PLAIN if layout == BLOCKED else layout for layout in found))

    def wanted(self, op: Operator, attrs: Attrs, position: int, t: TensorType, layout: str, out_layout: str) -> str:
        found = super().wanted(op, attrs, position, t, layout, out_layout)
        return PLAIN if found.startswith(AXES) and op.name == "MatMul" and not _one_batch(t, found) else found

    def _of_conv(self, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None]) -> str:
        return LAST if self.innermost or layouts[0] == LAST else PLAIN

    def _conv_in_blocks(self, attrs: Attrs, types: Sequence[TensorType | None]) -> bool:
        # blocks of one channel: the plain layout, which every convolution takes
        return True


def _one_batch(t: TensorType, layout: str) -> bool:
    """Whether matrices lie so that one step leads from each to the next: cuDNN has no plan for other batches."""
    batch = [a for a in range(t.rank - 2) if t.dims[a] != 1]
    order = [a for a in axes_of(layout, t.rank) if t.dims[a] != 1]
    places = [order.index(a) for a in batch]
    return all(after == before + 1 for before, after in zip(places, places[1:], strict=False))


class CudnnLowering(Lowering):
    """The general rule; an attention reads queries, keys and values as they lie, since it brings them to its type."""

    def kernel(self, view: View[N, V], group: Group[N, V]) -> tuple[Kernel, tuple[V, ...]]:
        kernel, values = super().kernel(view, group)
        if not kernel.chained:
            return kernel, values
        factors = {i for s in kernel.steps if s.op.name == "MatMul" for i in s.inputs if i is not None and i >= 0}
        operands = tuple(
            replace(o, layout=view.layout(v)) if i in factors and not o.constant else o
            for i, (o, v) in enumerate(zip(kernel.operands, values, strict=True))
        )
        return replace(kernel, operands=operands), values
