"""A description in the making, for one kernel: operands by number, results of operations by uid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.description import BF16, FP16, Attribute, Description, Operation, Tensor
from taso.backends.cudnn.frames import Frame, Unmapped
from taso.backends.lowering import Kernel, Operand, Step
from taso.backends.places import OPERAND, RESULT, Place, row_major_strides, strides_of
from taso.graph.errors import BackendError
from taso.graph.types import DType

FLOATS = (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16)
_NARROW = {FP16: DType.FLOAT16, BF16: DType.BFLOAT16}


class WeightTooLarge(BackendError):
    """A constant has values that the type in which a graph reads it does not hold."""


@dataclass(frozen=True)
class Constant:
    """Which constant operand a tensor is, and in which order its axes are taken before they are reshaped to it."""

    operand: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class CudnnLaunch:
    """A graph and what its stored tensors are: buffers of the kernel by uid (constant operands lie plainly in theirs).

    `constants` are those of constant operands that lie otherwise in memory: `laid_out` says how.
    """

    description: Description
    arguments: Mapping[int, Place]
    constants: Mapping[int, Constant] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The operations, shortly."""
        ops = self.description.operations
        return "cudnn:" + "+".join(op.word("mode") if op.kind == "pointwise" else op.kind for op in ops)


def laid_out(array: Array, constant: Constant, tensor: Tensor) -> Array:
    """The memory (one axis) of a constant as a graph reads it.

    Raises `WeightTooLarge` where a finite value is infinite in the tensor's type.
    """
    turned = np.transpose(array, constant.order).reshape(tensor.dims)
    with np.errstate(over="ignore"):
        values = turned.astype(tensor.dtype.numpy)
    if tensor.dtype in _NARROW.values() and np.isfinite(turned).all() and not np.isfinite(values).all():
        raise WeightTooLarge(f"a weight has values beyond what {tensor.dtype.name} holds: use another precision")
    memory = np.zeros(tensor.span, tensor.dtype.numpy)
    steps = tuple(s * memory.itemsize for s in tensor.strides)
    np.lib.stride_tricks.as_strided(memory, tensor.dims, steps)[...] = values
    return memory


class Sketch:
    """Collects tensors and operations; every method that makes a tensor returns its uid."""

    def __init__(self, kernel: Kernel, precision: str) -> None:
        self.kernel = kernel
        self.precision = precision
        self.tensors: dict[int, Tensor] = {}
        self.operations: list[Operation] = []
        self.arguments: dict[int, Place] = {}
        self.constants: dict[int, Constant] = {}
        self._bound: dict[object, int] = {}

    # ── what the kernel has ──────────────────────────────────────────────────────────────────────────────────────

    def index(self, step: Step, position: int) -> int:
        """The operand in a step's input; raises `Unmapped` where it is none."""
        reference = step.inputs[position] if position < len(step.inputs) else None
        if reference is None or reference < 0:
            raise Unmapped(f"input {position} of {step.op.name} is not an operand of the kernel")
        return reference

    def has(self, step: Step, position: int) -> bool:
        return position < len(step.inputs) and step.inputs[position] is not None

    def given(self, step: Step, position: int) -> Operand:
        return self.kernel.operands[self.index(step, position)]

    def dims(self, step: Step, position: int) -> tuple[int, ...]:
        return self.given(step, position).type.static_shape

    @property
    def out(self) -> Operand:
        return self.kernel.results[0]

    @property
    def out_dims(self) -> tuple[int, ...]:
        return self.out.type.static_shape

    @property
    def narrow(self) -> DType | None:
        """The type to which factors of products are rounded, None where they stay."""
        return _NARROW.get(self.precision) if self.out.type.dtype is DType.FLOAT else None

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def tensor(
        self, dims: Sequence[int], strides: Sequence[int], dtype: DType, virtual: bool = False,
        scalar: float | None = None,
    ) -> int:  # fmt: skip
        uid = len(self.tensors) + 1
        self.tensors[uid] = Tensor(uid, tuple(dims), tuple(strides), dtype, virtual, scalar)
        return uid

    def scalar(self, value: float, rank: int) -> int:
        """A number that is passed by value; the same one is one tensor."""
        key = ("scalar", value, rank)
        if key not in self._bound:
            self._bound[key] = self.tensor((1,) * rank, (1,) * rank, DType.FLOAT, scalar=float(value))
        return self._bound[key]

    def data(self, index: int, dims: Sequence[int], strides: Sequence[int]) -> int:
        """The buffer of operand `index`, seen with these dimensions and strides."""
        operand = self.kernel.operands[index]
        key = (index, tuple(dims), tuple(strides))
        if key not in self._bound:
            self._bound[key] = uid = self.tensor(dims, strides, operand.type.dtype)
            self.arguments[uid] = Place(OPERAND, index)
        return self._bound[key]

    def constant(
        self, index: int, dims: Sequence[int], strides: Sequence[int] | None = None, dtype: DType | None = None,
        order: Sequence[int] | None = None,
    ) -> int:  # fmt: skip
        """Constant operand `index`, its axes taken in `order`, reshaped to `dims` and laid out at these strides.

        What is then as it lies plainly is the operand's own buffer.
        """
        own = self.kernel.operands[index].type
        found = Constant(index, tuple(order) if order is not None else tuple(range(own.rank)))
        steps = tuple(strides) if strides is not None else row_major_strides(dims)
        if found.order == tuple(range(own.rank)) and dtype in (None, own.dtype) and _dense(dims, steps):
            return self.data(index, dims, steps)
        key = (found, tuple(dims), steps, dtype)
        if key not in self._bound:
            self._bound[key] = uid = self.tensor(dims, steps, dtype or own.dtype)
            self.constants[uid] = found
        return self._bound[key]

    def operand(self, index: int, frame: Frame) -> int:
        """Operand `index`, which broadcasts to the frame's result; whole constants are laid out as the result is."""
        operand = self.kernel.operands[index]
        dims = operand.type.static_shape
        if operand.type.dtype not in (*FLOATS, self.out.type.dtype):
            raise Unmapped(f"an operand of {operand.type.dtype.name} among floats")
        placed, strides = frame.placed(dims, strides_of(dims, operand.layout))
        if not operand.constant:
            return self.data(index, placed, strides)
        _, lies = frame.placed(self.out_dims, strides_of(self.out_dims, self.out.layout))
        return self.constant(index, placed, lies if placed == frame.shape else None)

    def vector(self, index: int, rank: int, axis: int = 1) -> int:
        """Operand `index` with all its elements along one axis of the graph."""
        operand = self.kernel.operands[index]
        size = operand.type.size
        dims = tuple(size if a == axis else 1 for a in range(rank))
        if operand.constant:
            return self.constant(index, dims)
        if operand.layout != "plain" and operand.type.rank > 1:
            raise Unmapped("a vector that does not lie plainly")
        return self.data(index, dims, row_major_strides(dims))

    def rounded(self, uid: int) -> int:
        """A factor of a product in the type to which precision has it rounded."""
        narrow, tensor = self.narrow, self.tensors[uid]
        if narrow is None or tensor.dtype is narrow:
            return uid
        attributes: dict[str, Attribute] = {"mode": "identity"}
        return self.apply("pointwise", {"IN_0": uid}, "OUT_0", tensor.dims, tensor.strides, attributes, narrow)

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def apply(
        self, kind: str, inputs: Mapping[str, int], role: str, dims: Sequence[int], strides: Sequence[int],
        attributes: Mapping[str, Attribute] | None = None, dtype: DType = DType.FLOAT,
    ) -> int:  # fmt: skip
        """An operation of one output, which is not stored until `finish` says so."""
        uid = self.tensor(dims, strides, dtype, virtual=True)
        self.operations.append(Operation.of(kind, inputs, {role: uid}, attributes or {}))
        return uid

    def pointwise(self, mode: str, *inputs: int, **attributes: Attribute) -> int:
        """An element-wise operation, its inputs broadcast against each other."""
        tensors = [self.tensors[uid] for uid in inputs]
        dims = tuple(max(sizes) for sizes in zip(*(t.dims for t in tensors), strict=True))
        whole = [t.strides for t in tensors if t.dims == dims and t.scalar is None]
        strides = whole[0] if whole else row_major_strides(dims)
        roles = {f"IN_{i}": uid for i, uid in enumerate(inputs)}
        return self.apply("pointwise", roles, "OUT_0", dims, strides, {"mode": mode, **attributes})

    def finish(self, last: int, strides: Sequence[int]) -> CudnnLaunch:
        """The launch whose result is the tensor `last`, at these strides."""
        dtype = self.out.type.dtype
        self.tensors[last] = replace(self.tensors[last], strides=tuple(strides), dtype=dtype, virtual=False)
        self.arguments[last] = Place(RESULT)
        description = Description(
            tuple(self.tensors.values()), tuple(self.operations), self.precision,
            io=dtype if dtype in FLOATS else DType.FLOAT,
        )  # fmt: skip
        return CudnnLaunch(description, dict(self.arguments), dict(self.constants))


def _dense(dims: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in the order of a plain tensor; strides of axes of size 1 say nothing."""
    wanted = row_major_strides(dims)
    return all(d == 1 or s == w for d, s, w in zip(dims, strides, wanted, strict=True))
