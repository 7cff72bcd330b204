"""What kernels of this backend take along, and in which layouts tensors lie: as ONNX has them, or channels last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taso.backends.lowering import BLOCKED, LAST, PLAIN, Fusion, Layouts
from taso.graph.operator import Attrs, Operator
from taso.graph.types import DType, TensorType

WHOLE = frozenset({"Gelu", "HardSwish", "Mish", "Swish"})
"""Functions of one element that files have in parts, and cuDNN and kernels of ours in one."""


class CudnnFusion(Fusion):
    """The general rule, and Erf too, of which a Gelu is made up."""

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
    """PLAIN and LAST. Convolutions have their channels last where `innermost`, as tensor cores want it."""

    block: int = 1

    def possible(
        self, op: Operator, attrs: Attrs, types: Sequence[TensorType | None], result: TensorType
    ) -> tuple[str, ...]:  # fmt: skip
        found = super().possible(op, attrs, types, result)
        return tuple(dict.fromkeys(PLAIN if layout == BLOCKED else layout for layout in found))

    def _of_conv(self, attrs: Attrs, types: Sequence[TensorType | None], layouts: Sequence[str | None]) -> str:
        return LAST if self.innermost or layouts[0] == LAST else PLAIN

    def _conv_in_blocks(self, attrs: Attrs, types: Sequence[TensorType | None]) -> bool:
        # blocks of one channel: the plain layout, which every convolution takes
        return True
